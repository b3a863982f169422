"""Fixtures of the disk tier."""

from __future__ import annotations

import pytest

from tests.unit.caching.disk_tier import open_tier


@pytest.fixture
def in_files(monkeypatch):
    """Every value has a file of its own, as only large ones have otherwise."""
    monkeypatch.setattr("rag_posfix.caching.disk.INLINE_BYTES", -1)


@pytest.fixture(params=["rows", "files"])
def anywhere(request):
    if request.param == "files":
        request.getfixturevalue("in_files")


@pytest.fixture
def tier(tmp_path):
    with open_tier(tmp_path) as tier:
        yield tier
