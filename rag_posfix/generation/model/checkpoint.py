"""Files next to the weights of a model: generation config, weight packages, adapters.

Checkpoints that need more than transformers' plain loading: GGUF files, and folders with quantised weights.

Both are checked before weights are read. Loads no model.

The fingerprint of a model: equal for equal files wherever they lie, different when any byte of them differs.

Every byte of the weights is digested, once per file: the digest of a file is remembered in the cache directory with
what ``stat`` says of the file, so that a later start reads no weights. Loads no model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

from rag_posfix.checkpoints import PROJECTED, PROJECTOR, WEIGHTS, fetch_command, located, weights_version
from rag_posfix.errors import ConfigError, missing_extra

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
        return f"{WEIGHTS[self.name].packages[0]}-{weights_version(self.name)}-bfloat16"

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


def read_projector(folder: Path, model: Any) -> tuple[Any, ...]:
    """Return the matrices of a reranker's head in the dtype of a model, the first first; none of other models."""
    from safetensors import safe_open

    matrices = {}
    for path in sorted(folder.glob("*.safetensors")) if PROJECTED in (model.config.architectures or ()) else ():
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if (found := PROJECTOR.fullmatch(name)) is not None:
                    matrices[int(found[1])] = file.get_tensor(name).to(model.dtype)
    return tuple(matrix for _, matrix in sorted(matrices.items()))


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


_log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".gguf"})
"""Suffixes of files that ``from_pretrained`` takes weights from."""
TOKENIZER_NAMES = frozenset({"tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja"})
"""Files of a tokenizer that are not JSON."""
ADAPTER_WEIGHTS = "adapter_model"
"""Stem of the file that holds the weights of a PEFT adapter."""
REMEMBERED_IN = "weight-digests.json"
"""Name of the file with the remembered digests, in the cache directory."""
FORMAT = 1
"""Of the remembered digests and of the fingerprint; a change of either raises it."""
SETTLED_NS = 2_000_000_000
"""A file that changed this shortly before it was digested may change again within one tick of its file system's clock
and keep its times: its digest is not remembered. Git treats such entries of its index as changed for this reason."""
THREADS = 4


def model_fingerprint(folder: Path, dtype: str, digests: FileDigests, adapters: Sequence[Path] = ()) -> str:
    """Return the identity of a model, 32 hexadecimal digits: weights, configuration, tokenizer, adapters and dtype.

    It depends on the names and the content of files, not on the path of their folder: copies of a model on several
    machines agree. Links are followed.

    Args:
        folder: Holds the model, and possibly an adapter.
        dtype: What the weights are converted to.
        adapters: Folders of adapters that lie elsewhere, in the order in which they are applied.

    Raises:
        ConfigError: a folder holds no weights, or a file cannot be read.

    """
    folders = [(folder, _files_in(folder, "model")), *((each, _files_in(each, "adapter")) for each in adapters)]
    sha256s = iter(digests.of([file for _, files in folders for file in files]))
    content = [FORMAT, dtype, [[[file.name, next(sha256s)] for file in files] for _, files in folders]]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


class FileDigests:
    """SHA-256 digests of files, remembered for as long as ``stat`` says that a file is the same.

    A remembered digest is used only if path, size, modification time, change time, inode and device equal the
    digested file's. A file that is rewritten in place, with its size and its modification time restored, still
    has another change time, which no program can set. Not noticed: a change that leaves the change time alone, which
    takes a clock that was set back, writing to the disk past the file system, or Windows, which has no such time.

    The file of remembered digests may be lost, damaged or impossible to write, and several processes may write it at
    the same time: the worst that comes of it is that a file is digested again. Who may write it decides which
    fingerprint a model gets; it is made readable and writable for its owner alone.

    Args:
        path: The file with the remembered digests; None remembers nothing.
        now_ns: The clock of the file system, in nanoseconds since the epoch.
    """

    def __init__(self, path: Path | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._now_ns = now_ns

    def of(self, files: Sequence[Path]) -> list[str]:
        """Return the SHA-256 of each file, as hexadecimal digits; files that are not remembered are read whole."""
        paths = [os.path.realpath(file) for file in files]
        digests = self._recall(paths)
        missing = [path for path in dict.fromkeys(paths) if path not in digests]
        if missing:
            _log.info("taking the digest of %d files", len(missing))
            with ThreadPoolExecutor(THREADS) as pool:
                taken = dict(zip(missing, pool.map(self._digest, missing), strict=True))
            self._remember(taken)
            digests.update({path: entry.sha256 for path, entry in taken.items()})
        return [digests[path] for path in paths]

    def _digest(self, path: str) -> _Taken:
        started = self._now_ns()
        try:
            with open(path, "rb", buffering=0) as file:
                before = _Stamp.of(os.fstat(file.fileno()))
                sha256 = sha256_of(file)
                after = _Stamp.of(os.fstat(file.fileno()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read for the fingerprint of its model: {error.strerror}") from error
        settled = max(before.mtime_ns, before.ctime_ns) < started - SETTLED_NS
        return _Taken(sha256, before if before == after and settled else None)

    def _recall(self, paths: Sequence[str]) -> dict[str, str]:
        remembered, digests = self._read(), {}
        for path in paths:
            entry = remembered.get(path)
            if isinstance(entry, dict) and re.fullmatch("[0-9a-f]{64}", str(entry.get("sha256"))):
                with contextlib.suppress(OSError):  # opening a missing file raises
                    if entry == {**asdict(_Stamp.of(os.stat(path))), "sha256": entry["sha256"]}:
                        digests[path] = entry["sha256"]
        return digests

    def _read(self) -> Mapping[str, Any]:
        if self._path is None:
            return {}
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        files = content.get("files") if isinstance(content, dict) and content.get("format") == FORMAT else None
        return files if isinstance(files, dict) else {}

    def _remember(self, taken: Mapping[str, _Taken]) -> None:
        """Add to what is remembered, and forget files that are gone. The file is replaced whole."""
        added = {
            path: {**asdict(digest.stamp), "sha256": digest.sha256} for path, digest in taken.items() if digest.stamp
        }
        if self._path is None or not added:
            return
        remembered = {path: entry for path, entry in self._read().items() if os.path.exists(path)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, scratch = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)  # mode 0600
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    json.dump({"format": FORMAT, "files": {**remembered, **added}}, file, indent=1)
                os.replace(scratch, self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)
                raise
        except OSError as error:
            _log.info("digests are not remembered, each start takes them again: %s: %s", self._path, error.strerror)


def sha256_of(file: FileIO) -> str:
    """Return the SHA-256 of a file that is open for reading. All reads of weights for a fingerprint are in here."""
    return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What ``stat`` says of a file and changes when the file does."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, stat: os.stat_result) -> _Stamp:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A digest, and the stamp by which it may be remembered; None if it may not."""

    sha256: str
    stamp: _Stamp | None


def _files_in(folder: Path, of_what: str) -> list[Path]:
    """Return the files that determine the output of a model or an adapter, by name; links are not resolved."""
    try:
        files = sorted(file for file in folder.iterdir() if _is_part_of_model(file) and file.is_file())
    except OSError as error:
        raise ConfigError(f"the folder {folder} of the {of_what} cannot be read: {error.strerror}") from error
    weights = [file for file in files if file.suffix in WEIGHT_SUFFIXES]
    if not any(of_what == "adapter" or file.stem != ADAPTER_WEIGHTS for file in weights):
        raise ConfigError(
            f"the folder {folder} holds no weights of the {of_what}, so its fingerprint cannot be taken; it needs a "
            f"file that ends in one of {', '.join(sorted(WEIGHT_SUFFIXES))}"
        )
    return files


def _is_part_of_model(file: Path) -> bool:
    return file.suffix in WEIGHT_SUFFIXES or file.suffix == ".json" or file.name in TOKENIZER_NAMES


_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
_FREQUENCIES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that scale the rotation."""
_READ_SCALING = frozenset({"gpt-oss", "qwen35", "qwen35moe"})
"""Architectures whose scaling of the rotation transformers reads from GGUF files."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in a GGUF file of the user. It is converted once, as ``PackagedModel`` is.

    Attributes:
        path: The file.
        sha256: Its digest: another file at the same path is converted anew.
    """

    path: Path
    sha256: str

    @property
    def gguf(self) -> str:
        """Name of the file."""
        return self.path.name

    @property
    def folder_name(self) -> str:
        """Name of the folder for the converted model."""
        return f"{self.path.stem}-{self.sha256[:16]}-bfloat16"

    @property
    def megabytes(self) -> int:
        """Disk space of the converted model, at most: weights of less than 4 bits are rare."""
        return 4 * self.path.stat().st_size // 10**6

    def files(self, cache_dir: Path) -> tuple[Path, ...]:
        """Return the file."""
        return (self.path,)

    @contextmanager
    def whole_file(self, cache_dir: Path) -> Iterator[Path]:
        """Yield the file.

        Raises:
            ConfigError: it is damaged, or transformers would compute another model from it.
        """
        _check_rotation(self.path)
        yield self.path


def read_gguf(model: str, digests: FileDigests) -> GgufFile | None:
    """Return the GGUF file that a model's name is the path of; None for other names.

    Cost: the digest of the file, which is read once.

    Raises:
        ConfigError: there is no such file, it is not a full GGUF file, or ``gguf`` is not installed; or the model is a
            folder with GGUF files and no configuration.
    """
    path = Path(model)
    if path.suffix.lower() != _SUFFIX:
        _refuse_folder(model, path)
        return None
    if not path.is_file():
        raise ConfigError(f"model {model!r} cannot be loaded: there is no such file; give the path of a GGUF file")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"model {model!r} cannot be loaded: it is not a GGUF file; download it again")
    if (part := _PART.search(path.stem)) is not None:
        raise ConfigError(
            f"model {model!r} cannot be loaded: it is one of {int(part[1])} parts; join them with: "
            f"llama-gguf-split --merge FIRST_PART {_PART.sub('', path.stem)}{_SUFFIX}"
        )
    if find_spec("gguf") is None:
        raise missing_extra("gguf", "local")
    (sha256,) = digests.of([path])
    return GgufFile(path.resolve(), sha256)


def _check_rotation(path: Path) -> None:
    """Reject a GGUF file whose rotation is scaled where transformers would leave the scaling out."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
        scales = scaling is not None and scaling.contents() != "none"
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is damaged ({' '.join(str(error).split())[:100]}); download it again") from error
    scales = scales or any(tensor.name in _FREQUENCIES for tensor in reader.tensors)
    if scales and architecture not in _READ_SCALING:
        raise ConfigError(
            f"model {str(path)!r} cannot be loaded: its rotation is scaled for long prompts, which transformers does "
            f"not read from GGUF files of {architecture}; give the checkpoint it was made from, or {serving(path)}"
        )


def serving(path: Path) -> str:
    """Return how a GGUF file is served, for messages."""
    return (
        f"serve it with llama.cpp: llama-server -m {str(path)!r} --port 8080, and "
        f"model=openai:{path.stem}@http://127.0.0.1:8080/v1"
    )


def _refuse_folder(model: str, folder: Path) -> None:
    """Reject a folder that holds GGUF files and no configuration."""
    try:
        files = [] if (folder / "config.json").exists() else sorted(folder.glob(f"*{_SUFFIX}"))
    except (OSError, ValueError):  # names that no path can have; loading reports them
        return
    if files:
        raise ConfigError(
            f"model {model!r} cannot be loaded: it is a folder of GGUF files; give one of them: {str(files[0])!r}"
        )


_PACKAGES: Mapping[str, Mapping[str, str]] = {
    "aqlm": {"aqlm": "aqlm"},
    "auto-round": {"auto_round": "auto-round"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "eetq": {"kernels": "kernels"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "hqq": {"hqq": "hqq"},
    "quanto": {"optimum.quanto": "optimum-quanto"},
    "torchao": {"torchao": "torchao"},
    "vptq": {"vptq": "vptq"},
}
"""Kind of quantisation -> what transformers imports for it: its name in pip."""

_INSTEAD = "give a checkpoint without quantisation, or serve it with vLLM and model=openai:NAME@URL"


def check_quantisation(source: str, config: Any, kinds: Collection[str]) -> None:
    """Reject a quantised checkpoint that transformers cannot read, or that needs packages which are not installed.

    Args:
        source: The model.
        config: Its configuration, with a ``quantization_config``.
        kinds: What transformers reads.

    Raises:
        ConfigError: as above; the message has the command that installs what is missing.
    """
    stated = config.quantization_config
    fields = stated if isinstance(stated, Mapping) else vars(stated)
    kind = fields.get("quant_method")
    kind = str(getattr(kind, "value", kind or ""))
    if not kind and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        kind = "bitsandbytes"
    if kind not in kinds:
        raise ConfigError(
            f"model {source!r} cannot be loaded: transformers does not read its quantization_config {dict(fields)}; "
            f"{_INSTEAD}"
        )
    missing = [name for package, name in _PACKAGES.get(kind, {}).items() if not _is_installed(package)]
    if missing:
        raise ConfigError(
            f"model {source!r} cannot be loaded: its weights are quantised by {kind}, which needs "
            f"{' and '.join(missing)}; run: pip install {' '.join(missing)}; or {_INSTEAD}"
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False
