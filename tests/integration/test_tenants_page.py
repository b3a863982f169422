"""Every command of the page on tenants runs as it stands there, one after another, against a running service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rag_posfix_api.keys.store import KeyStore
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.pages import blocks
from tests.support.serving import serving
from tests.support.tenants import pipeline_with_embeddings

pytestmark = pytest.mark.slow

PAGE = "tenants.md"
ADDRESS = "http://127.0.0.1:8000"
REVOKED = "1b2c3d4e5f607182"
"""The id of the key that the page revokes."""
MARK = "--- the next command ---"


def commands() -> list[str]:
    """The commands of all shell blocks; a line that ends with a backslash goes on in the next one."""
    texts = [text for kind, text, _ in blocks(PAGE) if kind == "bash"]
    return [line for text in texts for line in re.sub(r" *\\\n *", " ", text).splitlines() if line.strip()]


def run_all(folder: Path, url: str, revoked: str) -> dict[str, str]:
    """Run all commands in one shell, since they share a variable; return what each prints."""
    asked = commands()
    script = f"\necho; echo '{MARK}'\n".join(asked).replace(ADDRESS, url).replace(REVOKED, revoked)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAG_POSFIX_SERVICE_DATA_DIR": str(folder),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(MARK)
    assert len(printed) == len(asked)
    return dict(zip(asked, printed, strict=True))


def test_every_command_does_what_the_page_says(tmp_path: Path):
    keys = KeyStore(tmp_path)
    old, _ = keys.create("acme")
    pipeline = pipeline_with_embeddings(generator=OrderBiasedGenerator())
    with serving(pipeline, data_dir=tmp_path) as url:
        printed = run_all(tmp_path, url, old.id)

    def answer(*parts: str) -> Any:
        (found,) = [text for command, text in printed.items() if all(part in command for part in parts)]
        return json.loads(found)

    (created,) = [key for key in keys.table().keys.values() if key.name == "web"]
    (first,) = [text for command, text in printed.items() if "--requests-per-minute" in command]
    assert f"rpk_{created.id}_" in first
    assert (created.requests_per_minute, created.max_concurrent) == (600, 8)
    (listed,) = [text for command, text in printed.items() if command.endswith("keys list")]
    assert created.id in listed
    assert old.id not in keys.table().keys, "revoked, and then removed"
    assert answer("/v1/collections ")["name"] == "notes"
    assert answer("/documents")["ids"] == ["torvane"]
    assert answer("/search")["data"][0]["id"] == "torvane"
    text = "The Torvane lighthouse was first lit in 1883"
    assert answer("/v1/chat/completions")["choices"][0]["message"]["content"].startswith(text)
    evaluated = answer("/v1/evaluate/order")
    assert {one["text"] for one in evaluated["answers"]} == {"Torvane was lit in 1883.", "Maravel was lit in 1871."}
    assert evaluated["flip_rate"] > 0
