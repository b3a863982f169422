"""The default folders of files, and files that survive a power failure once they are written. Reads no settings.

The configuration file: settings in TOML, with a table for each group. Reads no environment.
"""

from __future__ import annotations

import difflib
import os
import secrets
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError

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


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that replaces a former one at once; after an ``OSError`` the former one is still there."""
    scratch = path.parent / f".{path.name}.{secrets.token_hex(8)}.partial"
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    flush(path.parent)


CONFIG_FILE = "rag-posfix.toml"
"""Name of the file that commands read in the working folder."""


def read_config_file(path: Path, names: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    """Return the settings of a configuration file by group; "" is the group of settings outside of tables.

    Args:
        names: The names of the settings by group.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a key that is not a setting.
    """
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"the configuration file {str(path)!r} cannot be read ({error.strerror or error}); give another one to "
            "--config or RAG_POSFIX_CONFIG"
        ) from error
    except ValueError as error:
        raise ConfigError(f"the configuration file {str(path)!r} is not TOML: {error}; correct it") from error
    groups: dict[str, dict[str, Any]] = {group: {} for group in names}
    for key, value in content.items():
        if key in groups:
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {key} is a table of settings; write them below a line [{key}]")
            for name in value:
                _check_key(path, f"{key}.", name, names[key])
            groups[key] = value
        else:
            _check_key(path, "", key, [*names[""], *filter(None, groups)])
            groups[""][key] = value
    return groups


def _check_key(path: Path, table: str, key: str, names: Collection[str]) -> None:
    if key not in names:
        hint = nearest_name(key, {name: f"{table}{name}" for name in names})
        raise ConfigError(f"{path}: {table}{key} is not a setting{hint}; correct or remove it")


def nearest_name(name: str, names: Mapping[str, str]) -> str:
    """Return "; did you mean X?" for an unknown name: the shortest one that begins with it, or the most similar one.

    Args:
        names: What a message calls each known name, which is the key.

    Returns:
        The empty string where no name is near.
    """
    shown = {known.lower(): text for known, text in names.items()}
    sought = name[:100].lower()
    longer = sorted((known for known in shown if known.startswith(sought)), key=len)
    near = longer or difflib.get_close_matches(sought, shown, n=1)
    return f"; did you mean {shown[near[0]]}?" if near else ""
