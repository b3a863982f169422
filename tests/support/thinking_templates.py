"""What chat templates of reasoning models do with thoughts, switches and ends of contents, without their tools."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1] / "data" / "thinking_templates"

THINKING_TEMPLATES = {path.stem: path.read_bytes().decode("utf-8") for path in sorted(_FOLDER.glob("*.jinja"))}
"""Family -> its chat template."""
