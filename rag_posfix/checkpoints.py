"""Checkpoints: where the files of a model are, and whether transformers reads all of them as that model.

It initialises missing tensors at random, ignores unexpected ones, and goes on. Models are passed in; nothing here
imports transformers or torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError

_ADAPTER = "adapter_config.json"
_SHOWN = 3
_COMPUTED = re.compile(r"rotary_emb\.\w*inv_freq$")
"""Rotary frequencies, which older checkpoints hold: transformers computes them from the configuration."""


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep the progress bars of transformers, once it is imported, off the terminal."""
    library: Any = sys.modules.get("transformers.utils.logging")
    was_enabled = library is not None and library.is_progress_bar_enabled()
    if was_enabled:
        library.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            library.enable_progress_bar()


def folder_of(source: str) -> Path:
    """Return the folder with the files of a model that was loaded by its folder or by its id.

    In the cache of the Hub it is the folder of the commit of the main branch, as far as the cache knows: loading asks
    the Hub and writes it down. The configuration of a loaded model does not say from which commit it is.

    Raises:
        ConfigError: the model is in neither a folder nor the cache of the Hub.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source, "config.json")
    if not isinstance(config, str):
        raise ConfigError(
            f"the files of model {source!r} are not in the cache of the Hub, where they are checked; download the "
            "model and give its folder"
        )
    return Path(config).parent


def refuse_adapter(source: str) -> None:
    """Reject a model with the files of an adapter: transformers applies them only if peft is installed."""
    config = Path(source) / _ADAPTER
    if not Path(source).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            config = Path(hf_hub_download(source, _ADAPTER))
        except Exception:  # there is none, no such model, or no connection: loading reports the latter
            return
    if config.is_file():
        raise ConfigError(
            f"model {source!r} cannot be loaded: it holds {_ADAPTER}; move the files of the adapter to another folder "
            f"and pass that as adapter=, with model={_base_of(config)}"
        )


def _base_of(config: Path) -> str:
    """Return the base model in the config of an adapter."""
    try:
        base = json.loads(config.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    return repr(base) if base else "the model that it was trained on"


def check_tensors(source: str, model: Any, report: Mapping[str, Any]) -> None:
    """Reject a checkpoint that lacks tensors of its model, or holds tensors that the model does not have.

    ``report`` is what ``from_pretrained`` returns with ``output_loading_info=True``. Tied weights and what the class
    of the model lists as harmless (``_keys_to_ignore_on_load_*``) are not in it.
    """
    unexpected = [name for name in report["unexpected_keys"] if not _COMPUTED.search(name)]
    shapes = (f"{name} {[*stored]} instead of {[*expected]}" for name, stored, expected in report["mismatched_keys"])
    counts = (
        _count("missing", report["missing_keys"]),
        _count("unexpected", unexpected),
        _count("of another shape", shapes),
    )
    if any(counts):
        raise ConfigError(
            f"model {source!r} cannot be loaded: its files do not hold the weights of a {type(model).__name__}: "
            f"{', '.join(filter(None, counts))}; {_advice(model)}"
        )


def check_encoder(source: str, model: Any) -> None:
    """Reject the checkpoint of an encoder that is loaded already; as ``check_tensors``, by the names in its files.

    Harmless: heads in the files that the model does not have, and a missing pooler of a model without a head, which no
    embedding reads. ``model`` is the transformers model that sentence-transformers loaded from ``source``, or None.
    """
    if model is None:
        return
    folder = folder_of(source)
    modules = folder / "modules.json"
    path = json.loads(modules.read_bytes())[0]["path"] if modules.is_file() else ""
    options = {"config": model.config, "device_map": "meta", "ignore_mismatched_sizes": True}
    _, report = type(model).from_pretrained(folder / path, output_loading_info=True, **options)  # reads no weights
    children = {name for name, _ in model.named_children()} - {"pooler"}
    roots = re.compile(rf"({re.escape(model.base_model_prefix)}\.)?({'|'.join(map(re.escape, children))})\.")
    unexpected = [name for name in report["unexpected_keys"] if roots.match(name)]
    missing = [name for name in report["missing_keys"] if not name.startswith("pooler.")]
    check_tensors(source, model, {**report, "unexpected_keys": unexpected, "missing_keys": missing})


def _count(kind: str, names: Iterable[str]) -> str:
    """Return how many names there are, and the first; "" if there are none."""
    sorted_names = sorted(names)
    ellipsis = ", ..." if len(sorted_names) > _SHOWN else ""
    return f"{len(sorted_names)} {kind} ({', '.join(sorted_names[:_SHOWN])}{ellipsis})" if sorted_names else ""


def _advice(model: Any) -> str:
    """Return the likely cause, and the remedy."""
    config = model.config
    quantization = getattr(config, "quantization", None)
    if isinstance(quantization, Mapping):  # MLX
        return (
            f"transformers does not read its quantization {dict(quantization)}; use a checkpoint without quantisation"
        )
    architectures = ", ".join(getattr(config, "architectures", None) or ())
    if architectures and architectures != type(model).__name__:
        return f"config.json calls it a {architectures}; use a checkpoint of a {type(model).__name__}"
    return "download it again, with the config.json that belongs to the weights"
