"""Writes ``docs/openapi.json``: run ``python -m rag_posfix_api.openapi docs/openapi.json`` after changing a route."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api.app import create_app


def main(arguments: list[str]) -> int:
    """Write the OpenAPI document to a path. It depends on the routes only, not on the version of rag-posfix."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m rag_posfix_api.openapi PATH\n")
        return 2
    schema = create_app(Settings(), service=ServiceSettings()).openapi()
    schema["info"]["version"] = "1"
    document = json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    Path(arguments[0]).write_text(document, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
