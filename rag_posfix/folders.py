"""Where files are kept that nobody gave a folder for, and what folders in it are called. Reads no settings."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PASSAGES_FOLDER", "default_cache_dir"]

PASSAGES_FOLDER = "passages"
"""Folder of the disk tier of the passage store, in the folder of caches."""


def default_cache_dir() -> Path:
    """Return the folder for converted weights and cached answers: ``~/.cache/rag_posfix``."""
    return Path.home() / ".cache" / "rag_posfix"
