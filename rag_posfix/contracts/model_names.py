"""Names of models for responses and messages: a folder is shown by its last name only."""

from __future__ import annotations

from pathlib import Path, PurePath


def shown_model(model_id: str) -> str:
    """Return a name of a model without the folders of this machine; an id of the form owner/name stays."""
    path = PurePath(model_id)
    if model_id.startswith((".", "~")) or path.is_absolute() or ("/" in model_id and _is_folder(model_id)):
        return Path(model_id).expanduser().resolve().name or "model"
    return model_id


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False
