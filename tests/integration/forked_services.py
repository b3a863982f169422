"""Starts several services, each a process of its own, and imports torch and transformers once for all of them.

``python -m tests.integration.forked_services`` reads JSON from stdin: ``models``, changes to the tiny model by the
folder it is written to, and ``services``, the environment variables of each. The processes end when this one gets
SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType

from rag_posfix.pipeline import build  # noqa: F401 - before the fork, once
from rag_posfix.settings import Settings
from rag_posfix_api.server import run
from tests.support.tiny import save_tiny


def serve(environment: Mapping[str, str]) -> None:
    """Serve in this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    run(Settings())


def main() -> None:
    """Write the models, fork a process for each service, and wait for all of them."""
    asked = json.load(sys.stdin)
    for folder, changes in asked["models"].items():
        save_tiny(folder, **changes)
    children = []
    for environment in asked["services"]:
        child = os.fork()
        if child == 0:
            serve(environment)
            os._exit(0)
        children.append(child)

    def end(number: int, frame: FrameType | None) -> None:
        for each in children:
            os.kill(each, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
