"""A process that serves without weights: ``with Host() as host: url = host.serve(redis=...)``.

The service runs in a process of its own, as users run it: its memory can be measured, its disk limited, and a busy
client does not take its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rag_posfix.caching.answers.build import build_answer_cache
from rag_posfix.settings import CacheSettings
from tests.support.serving import WordReranker, make_pipeline, serving

ROOT = Path(__file__).parents[2]


class Host:
    """The process. It serves any number of services, each on a port of its own, until the block ends."""

    def __enter__(self) -> Host:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.host"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # What glibc keeps for itself would look like growth.
            env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate("", timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def serve(self, folder: Path | None = None, limits: dict[str, Any] | None = None, **cache: Any) -> str:
        """Return the address of one more service.

        Args:
            folder: Folder of its disk tier, or None for none.
        """
        asked = {"folder": None if folder is None else str(folder), "limits": limits or {}, "cache": cache}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        url = self._process.stdout.readline().strip()
        if not url:
            raise RuntimeError("the process of the services ended; run `python -m benchmarks.faults.host` to see why")
        return url

    def rss_bytes(self) -> int:
        """Return how much memory the process has now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Serve what each line of stdin asks for, until it ends."""
    with ExitStack() as services:
        for line in sys.stdin:
            asked = json.loads(line)
            settings = CacheSettings(**{"memory_entries": 20, "disk_bytes": 0, **asked["cache"]})
            cache = build_answer_cache(settings, Path(asked["folder"] or "."))
            assert cache is not None
            services.callback(cache.close)
            pipeline = make_pipeline(cache=cache, reranker=WordReranker())
            print(services.enter_context(serving(pipeline, **asked["limits"])), flush=True)


if __name__ == "__main__":
    main()
