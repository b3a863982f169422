"""Every client works on every route that it speaks, and what does not work is told."""

from __future__ import annotations

import pytest

from benchmarks.clients import Cell, cells, measure, outcome, service
from benchmarks.tables import table

FORMS = ("whole", "streamed")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with service() as url:
        return measure(url)


def test_every_client_works_whole_and_streamed(rows: list[dict[str, str]]):
    assert [row for row in rows if any(row[form] not in ("", "works") for form in FORMS)] == []
    chats = [row for row in rows if row["route"].endswith(("/chat/completions", "/chat", "/messages", "/responses"))]
    assert len(chats) == 8
    assert all(row["streamed"] == "works" for row in chats)


def test_a_client_that_gets_an_error_or_another_answer_is_told(rows: list[dict[str, str]]):
    def fails() -> str:
        raise RuntimeError("404 a | b")

    assert outcome(fails, "x") == "RuntimeError: 404 a | b"
    assert outcome(lambda: "y", "x") == "other content: 'y'"
    assert outcome(None, "x") == ""
    row = {"client": "openai", "route": "/v1/x", "whole": outcome(fails, "x"), "streamed": ""}
    head = {"kind": "clients", "summary": {"clients": {"openai": "1"}, "cells": [row]}}
    assert table([head]).splitlines()[-1] == r"| `openai` 1 | `/v1/x` | RuntimeError: 404 a \| b |  |"


def test_a_service_that_is_gone_is_an_error_of_each_client():
    found = cells("http://127.0.0.1:9")  # holds the client open
    cell = next(found)
    assert isinstance(cell, Cell)
    assert outcome(cell.whole, "x").startswith("APIConnectionError")
