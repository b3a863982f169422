"""Evaluation data that is not part of the repository: beside it, or where EVALUATION_DATA says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def outside_data(name: str) -> Path:
    """Return the path of a file of evaluation data, or skip the test with the reason."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(os.environ.get("EVALUATION_DATA", beside)) / name
    if not path.is_file():
        pytest.skip(f"{path} is absent; it is not part of the repository (EVALUATION_DATA names another folder)")
    return path
