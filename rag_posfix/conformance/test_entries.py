"""There is something to test."""

from __future__ import annotations

from rag_posfix.conformance.models import plugins
from rag_posfix.registry import GROUPS


def test_there_is_a_plugin() -> None:
    """Without one every other test is skipped."""
    assert any(plugins(kind) for kind in GROUPS), (
        "no plug-in was found: install a package with entry points, or name a file in RAG_POSFIX_PLUGINS"
    )
