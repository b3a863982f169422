"""Loading: a packaged model, an id or a folder becomes an engine whose attention hook is verified."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rag_posfix.checked import check_type
from rag_posfix.checkpoints import check_tensors, folder_of, quiet_loading, refuse_adapter
from rag_posfix.errors import ConfigError, RagPosfixError, UnsupportedModelError, missing_extra
from rag_posfix.files import default_cache_dir
from rag_posfix.generation.engine import Engine, cpu_has_bfloat16
from rag_posfix.generation.model.batch_invariance import ALL_ROWS, BatchInvariance, rows_for
from rag_posfix.generation.model.checkpoint import (
    PACKAGED,
    REMEMBERED_IN,
    FileDigests,
    GenerationConfig,
    GgufFile,
    PackagedModel,
    adapter_tokenizer,
    check_adapter,
    check_quantisation,
    merge_adapter,
    model_fingerprint,
    read_generation_config,
    read_gguf,
    read_projector,
    serving,
)
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.patching.install import plain_shape, prepare
from rag_posfix.patching.spec import Ranks
from rag_posfix.patching.structure import FAMILIES, family_of, shape_of
from rag_posfix.plan.plan import ModelShape
from rag_posfix.process import allowed_threads, checked_device

__all__ = ["load_engine"]

_STARTS_OF_PATHS = ("/", "./", "../", "~")
_PLACED = frozenset({"device_map", "distributed_config"})
"""Options with which transformers puts the weights where they belong."""

_log = logging.getLogger(__name__)

DEMO_MODEL = "smollm2"
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load_engine(
    model: str = DEMO_MODEL,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    cache_dir: Path | None = None,
    ranks: Ranks | None = None,
    adapter: Path | None = None,
    batch_invariant: BatchInvariance = "auto",
) -> Engine:
    """Load a model, install the attention hook and check it.

    Args:
        model: ``smollm2`` or ``gemma3-270m`` (weights that come as packages), a model id, a folder, or a GGUF file.
        dtype: ``auto``, ``bfloat16``, ``float16`` or ``float32``. ``auto`` is bfloat16 where it is fast.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ...
        device_map: ``auto``, ``balanced``, ``balanced_low_0`` or ``sequential``: transformers distributes the layers
            over all devices, in place of ``device``. Methods that concatenate or rotate keys then cannot run; see
            ``rag-posfix verify``. None puts the whole model on ``device``.
        cache_dir: Where packaged weights and GGUF files are kept once converted, and the digests of files; default
            ``~/.cache/rag_posfix``.
        ranks: The processes that the model is split over, each of which calls this; None loads it whole. See
            ``generation.parallel``, which starts them.
        adapter: Folder of a LoRA adapter, as ``rag-posfix train`` writes it, which is merged into the weights. A
            tokenizer or a chat template in it takes the place of the model's.
        batch_invariant: Whether an answer has the same bits alone and among others: ``on``, ``off``, or ``auto``,
            which is ``on`` for bfloat16 and float16 on CPUs. Passes are padded, or computed in blocks of rows where
            padding does not help; ``blocks`` always does the second. Not with ``ranks``.

    Raises:
        ConfigError: the model cannot be found or read, or a setting is outside of what is allowed.
        UnsupportedModelError: its family is not supported, or the attention hook changes what it computes.
    """
    for name, value, kind, allowed in (
        ("model", model, str, "a packaged model, a model id, or a folder, as text"),
        ("dtype", dtype, str, "auto, bfloat16, float16 or float32"),
        ("ranks", ranks, Ranks | None, "the Ranks of a split model, or None"),
        ("adapter", adapter, Path | str | None, "the path of a folder, or None"),
        ("cache_dir", cache_dir, Path | None, "the Path of a folder, or None"),
    ):
        check_type(name, value, kind, allowed)
    if adapter is not None:
        adapter = Path(adapter)
        check_adapter(adapter)
    model_device = usable_device(device)
    _respect_quota()
    torch_dtype = _dtype(dtype, model_device)
    options = _placement_options(device_map, ranks)
    converted = _converted(model, cache_dir)
    if converted is not None:
        source, loaded, tokenizer = _load_converted(
            converted, cache_dir or default_cache_dir(), torch_dtype, model_device, **options
        )
    else:
        source, (loaded, tokenizer) = model, load_pretrained(model, torch_dtype, model_device, **options)
    if adapter is not None:
        from transformers import AutoTokenizer

        loaded = merge_adapter(loaded, adapter)
        tokenizer = adapter_tokenizer(adapter, tokenizer, AutoTokenizer.from_pretrained)
    fingerprint = _fingerprint(source, torch_dtype, cache_dir or default_cache_dir(), adapter)
    generation_config = read_generation_config(folder_of(source))
    with _as_config_error(
        source, f"run in {str(torch_dtype).removeprefix('torch.')} on {model_device}", "use another dtype or device"
    ):
        spec = prepare(loaded, ranks)
        is_whole = ranks is None and spec.unhooked is None
        rows = rows_for(batch_invariant, loaded) if is_whole else ALL_ROWS
        encoder = Tokenizer(tokenizer, eos_ids=generation_config.eos_ids)
        if ranks is None:
            _check_vocabulary(model, loaded, encoder)
    name = _name_of(model, adapter)
    _log.info("loaded %s as %s on %s", name, torch_dtype, model_device)
    if generation_config.ignored:
        _log.info("settings of its generation config that are not applied: %s", generation_config.ignored)
    projector = read_projector(folder_of(source), loaded)
    return Engine(LoadedModel(loaded, spec, rows, projector), encoder, name, fingerprint)


def _check_vocabulary(name: str, model: Any, encoder: Tokenizer) -> None:
    """Raise if a prompt may hold tokens that the model has no embeddings for."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if isinstance(rows, int) and (beyond := encoder.writable_from(rows)):
        shown = ", ".join(f"{token!r} is {number}" for token, number in beyond[:3])
        raise ConfigError(
            f"model {name!r} cannot be loaded: its embeddings have {rows} rows, and its tokenizer has ids beyond them "
            f"({shown}); save the model after resize_token_embeddings and training these rows, or give it the "
            "tokenizer of its base model"
        )


def _respect_quota() -> None:
    """Use no more threads than a container may keep busy: the others would wait, and be waited for."""
    import torch

    threads = allowed_threads()
    if threads is not None and threads < torch.get_num_threads():
        torch.set_num_threads(threads)


def _placement_options(device_map: str | None, ranks: Ranks | None) -> dict[str, Any]:
    """Return what transformers needs to place the weights other than on one device."""
    if device_map is None and (ranks is None or ranks.count == 1):
        return {}
    if device_map is None and ranks is not None:
        from transformers import DistributedConfig

        # This rank's share: heads and channels of each layer, split evenly.
        return {"distributed_config": DistributedConfig(tp_size=ranks.count)}
    if device_map not in DEVICE_MAPS:
        raise ConfigError(f"device_map={device_map!r} must be one of {', '.join(DEVICE_MAPS)}")
    if find_spec("accelerate") is None:
        raise missing_extra("accelerate", "tp")
    return {"device_map": device_map}


def source_of(model: str, cache_dir: Path | None = None) -> str:
    """Return the folder or the id that a model is loaded from; packaged models and GGUF files are converted once."""
    converted = _converted(model, cache_dir)
    return model if converted is None else str(_converted_folder(converted, cache_dir or default_cache_dir()))


def _converted(model: str, cache_dir: Path | None) -> PackagedModel | GgufFile | None:
    """Return the model that is converted before it is loaded; None for a folder or an id."""
    digests = FileDigests((cache_dir or default_cache_dir()) / REMEMBERED_IN)
    return PACKAGED.get(model) or read_gguf(model, digests)


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model without its weights in memory; attributes as those of ``Engine``."""

    name: str
    fingerprint: str
    context_window: int
    hidden_size: int
    tokenizer: Tokenizer


def read_metadata(
    model: str, *, dtype: str, device: str, cache_dir: Path, adapter: Path | None = None
) -> ModelMetadata:
    """Read a model without its weights; a packaged model is converted if needed.

    Raises:
        ConfigError: the model cannot be found or read.
        UnsupportedModelError: its family is not supported.
    """
    from transformers import AutoTokenizer

    if adapter is not None:
        check_adapter(adapter)
    torch_dtype = _dtype(dtype, usable_device(device))
    source = source_of(model, cache_dir)
    with _as_config_error(source):
        shape = read_shape(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        if adapter is not None:
            tokenizer = adapter_tokenizer(adapter, tokenizer, AutoTokenizer.from_pretrained)
        eos_ids = read_generation_config(folder_of(source)).eos_ids
        return ModelMetadata(
            _name_of(model, adapter),
            _fingerprint(source, torch_dtype, cache_dir, adapter),
            shape.context_window,
            shape.hidden_size,
            Tokenizer(tokenizer, eos_ids=eos_ids),
        )


def generation_config_of(model: str, cache_dir: Path) -> GenerationConfig:
    """Return the generation config of a model that has been loaded; errors as those of ``read_metadata``."""
    return read_generation_config(folder_of(source_of(model, cache_dir)))


def _name_of(model: str, adapter: Path | None) -> str:
    packaged = PACKAGED.get(model)
    base = packaged.title if packaged else Path(os.path.abspath(model)).name if Path(model).exists() else model
    return base if adapter is None else f"{base}+{adapter.resolve().name}"


def read_shape(source: str, *, is_split: bool = False) -> ModelShape:
    """Return the shape that a model's configuration states; errors as those of ``read_metadata``.

    Args:
        is_split: Whether the model is to be split over processes, which needs a listed family.
    """
    config = _read_config(source).get_text_config(decoder=True)
    if config.model_type not in FAMILIES and not is_split:  # what its attention allows is read from the loaded model
        return plain_shape(config, "its family is not listed")
    return shape_of(config, family_of(config))


def usable_device(device: str) -> str:
    """Return the device, ``cpu`` or ``cuda`` for ``auto``; ConfigError if it cannot be used."""
    import torch

    checked_device(device)
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()  # `meta` can be allocated on, and holds nothing
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={device!r} cannot be used: {reason}; use 'auto' or 'cpu'") from error
    return device


def _dtype(dtype: str, device: str) -> Any:
    import torch

    names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype in names:
        return names[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype={dtype!r} must be one of auto, {', '.join(names)}")
    if device != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def load_pretrained(source: str, dtype: Any, device: str, **options: Any) -> tuple[Any, Any]:
    """Return the stock model and the tokenizer of a folder or an id, as transformers loads them.

    Errors as those of ``read_metadata``, raised before the weights are read where the configuration suffices.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.quantization_config import QuantizationMethod
    except ImportError as error:
        raise missing_extra("transformers", "local") from error
    auto_class: Any = AutoModelForCausalLM
    gguf = Path(source) / options["gguf_file"] if "gguf_file" in options else None
    name, advice = (source, "") if gguf is None else (str(gguf), serving(gguf))
    with _as_config_error(name, advice=advice), quiet_loading():
        is_listed = False  # a GGUF file is converted, and its attention is not run
        if gguf is None:  # an unsupported family raises before its weights are read
            config = _read_config(source)
            _check_decoder(config)
            auto_class = auto_class_of(config)
            is_listed = config.get_text_config(decoder=True).model_type in FAMILIES
            if is_quantised(config):
                check_quantisation(source, config, {kind.value for kind in QuantizationMethod})
                if not _PLACED & options.keys():
                    # Quantised weights are made where they stay: most kinds cannot be moved.
                    options["device_map"] = device
        tokenizer = AutoTokenizer.from_pretrained(source, **{k: v for k, v in options.items() if k == "gguf_file"})
        model, report = auto_class.from_pretrained(
            source,
            dtype=dtype,
            **({"attn_implementation": "sdpa"} if is_listed else {}),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            **options,
        )
        check_tensors(source, model, report)
        return (model.eval() if _PLACED & options.keys() else model.eval().to(device)), tokenizer


def auto_class_of(config: Any) -> Any:
    """Return transformers' loader of a decoder: multimodal wrappers that write text may have one of their own."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _check_decoder(config: Any) -> None:
    """Raise for a model with an encoder, before its weights are read."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has an encoder, and passages would be read by it; use a decoder "
            "(AutoModelForCausalLM)"
        )


def is_quantised(config: Any) -> bool:
    """Return whether a checkpoint holds quantised weights: bitsandbytes, torchao, GPTQ and AWQ share this field."""
    return getattr(config, "quantization_config", None) is not None


def _read_config(source: str) -> Any:
    """Return the configuration; a source with the files of an adapter is rejected."""
    from transformers import AutoConfig

    with _as_config_error(source):
        refuse_adapter(source)
        return AutoConfig.from_pretrained(source)


@contextmanager
def _as_config_error(source: str, action: str = "be loaded", advice: str = "") -> Iterator[None]:
    """Make a ``ConfigError`` with the name of the model of every error that is not ours.

    Hub, configuration, tokenizer, weights and kernels come from different libraries, which raise what they like.
    """
    try:
        yield
    except RagPosfixError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        advice = advice or f"give a folder, a Hub id, or one of {', '.join(PACKAGED)}"
        if source.startswith(_STARTS_OF_PATHS) and not Path(source).exists():
            reason = "there is no such folder"
        elif _is_lack_of_memory(error):
            advice = "use a smaller or quantised model, tp, or device_map='auto'"
        raise ConfigError(f"model {source!r} cannot {action}: {reason}; {advice}") from error


def _is_lack_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory ran out: torch's allocators raise errors of several classes."""
    return isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error)) is not None


def _load_converted(
    converted: PackagedModel | GgufFile, cache_dir: Path, dtype: Any, device: str, **options: Any
) -> tuple[str, Any, Any]:
    """Return where the model was loaded from, and it; damaged converted weights are converted again, once."""
    source = str(_converted_folder(converted, cache_dir))
    try:
        loaded, tokenizer = load_pretrained(source, dtype, device, **options)
    except ConfigError as error:
        if _is_lack_of_memory(error.__cause__):  # the weights are sound, and making them again takes more memory
            raise
        _log.warning("the converted weights are damaged and are made again: %s", error)
        source = str(_converted_folder(converted, cache_dir, again=True))
        loaded, tokenizer = load_pretrained(source, dtype, device, **options)
    return source, loaded, tokenizer


def _converted_folder(converted: PackagedModel | GgufFile, cache_dir: Path, *, again: bool = False) -> Path:
    """Return the folder with the model as bfloat16 safetensors, converting it from its GGUF once."""
    converted.files(cache_dir)  # raises for a removed package, also if its weights were converted before
    target = cache_dir / "models" / converted.folder_name
    if again or not (target / "complete").exists():
        _log.info("converting %s once, to %s", converted.gguf, target)
        try:
            with converted.whole_file(cache_dir) as gguf:
                convert(gguf, target)
        except OSError as error:
            raise ConfigError(
                f"the model cannot be kept in {target}: {error.strerror or error}; set RAG_POSFIX_CACHE_DIR to a "
                f"folder that can be written and has {converted.megabytes} MB free"
            ) from error
    return target


def convert(gguf: Path, target: Path) -> None:
    """Write the dequantised model next to ``target``, then rename it; the last of several writers wins."""
    import torch
    from transformers import modeling_gguf_pytorch_utils

    dense: dict[str, Any] = {}
    with suppress(ImportError):  # older transformers unpack GGUF weights always and lack the option
        from transformers.utils.quantization_config import GgufConfig

        dense = {"quantization_config": GgufConfig(dequantize=True)}
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    # Its bar of the conversion has no switch.
    shown = modeling_gguf_pytorch_utils.tqdm
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    try:
        model, tokenizer = load_pretrained(str(gguf.parent), torch.bfloat16, "cpu", gguf_file=gguf.name, **dense)
        # True where the Hub is off; the files' content is the fingerprint, and stores are shared by fingerprint.
        tokenizer.init_kwargs["local_files_only"] = False
        with quiet_loading():
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        (unfinished / "complete").write_text("ok\n")
        shutil.rmtree(target, ignore_errors=True)
        try:
            unfinished.replace(target)
        except OSError:
            if not (target / "complete").exists():  # else another process was quicker
                raise
    finally:
        modeling_gguf_pytorch_utils.tqdm = shown
        shutil.rmtree(unfinished, ignore_errors=True)


def _fingerprint(source: str, dtype: Any, cache_dir: Path, adapter: Path | None) -> str:
    adapters = () if adapter is None else (adapter,)
    return model_fingerprint(folder_of(source), str(dtype), FileDigests(cache_dir / REMEMBERED_IN), adapters)
