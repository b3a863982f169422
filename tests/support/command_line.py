"""Runs the command line in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rag_posfix.cli import main as cli
from rag_posfix.files import default_cache_dir


def command_line(captured) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command and returns its exit code, stdout and stderr.

    Args:
        captured: The fixture ``capsysbinary``.
    """

    def call(*arguments):
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        printed = captured.readouterr()
        return exit_.value.code or 0, printed.out.decode(), printed.err.decode()

    return call


def cache_with_models(folder: Path) -> Path:
    """Return ``folder`` as a folder of caches that is empty but for the converted models, which take long to make."""
    models = default_cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models)
    return folder
