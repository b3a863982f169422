"""Adapters: what fine-tuning added to a model, merged into its weights when it is loaded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError, missing_extra

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
        import peft  # noqa: F401 - told before the weights of the model are read
    except ImportError as error:
        raise missing_extra("peft", "train") from error


def merge_adapter(model: Any, folder: Path) -> Any:
    """Return a model with an adapter in its weights: it has the modules, the speed and the methods of its base.

    The sums are rounded to the dtype of the weights.

    Args:
        model: The stock model; it is changed.
        folder: Holds the adapter, as ``check_adapter`` wants it.

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
            adapted = PeftModel(model, PeftConfig.from_pretrained(str(folder)))
            report = adapted.load_adapter(str(folder), "default", torch_device=str(model.device))
            merged = adapted.merge_and_unload(safe_merge=True)
    # peft raises what torch and safetensors raise.
    except Exception as error:
        raise _of_another(folder, " ".join(str(error).split())[:200]) from error
    if report.missing_keys or report.unexpected_keys:
        raise _of_another(
            folder, f"{len(report.missing_keys)} tensors missing, {len(report.unexpected_keys)} unexpected"
        )
    return merged


def _of_another(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"adapter={str(folder)!r} does not fit this model ({reason}); give the model that it was trained on"
    )
