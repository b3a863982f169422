"""The default folders of files, and the names of their subfolders. Reads no settings."""

from __future__ import annotations

from pathlib import Path

ANSWERS_FOLDER = "answers"
"""Folder of the disk tier of the answer cache, in the folder of caches."""

PASSAGES_FOLDER = "passages"
"""Folder of the disk tier of the passage KV store, in the folder of caches."""


def default_cache_dir() -> Path:
    """Return the folder for converted weights and cached answers: ``~/.cache/rag_posfix``."""
    return Path.home() / ".cache" / "rag_posfix"


def default_data_dir() -> Path:
    """Return the folder for the API keys and collections of a service: ``~/.local/share/rag_posfix``."""
    return Path.home() / ".local" / "share" / "rag_posfix"
