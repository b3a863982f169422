"""The program of the ranks that ``load_parallel`` starts: ``python -m ...tensor_parallel.follower JOB``."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import traceback

from rag_posfix.errors import RagPosfixError
from rag_posfix.generation.tensor_parallel.launch import follow_job
from rag_posfix.generation.tensor_parallel.rank_config import RankConfig

GRACE_SECONDS = 0.5


def main() -> None:
    """Follow the first rank; what goes wrong is the last line on stderr, where the first rank finds it."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    config = RankConfig(**json.loads(sys.argv[1]))
    parent = threading.Thread(target=_end_with_parent, args=(config.folder,), daemon=True)
    parent.start()
    failed = True
    try:
        follow_job(config)
        failed = False
    except RagPosfixError as error:
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
    except Exception:
        parent.join(GRACE_SECONDS)  # the connection breaks too when the first rank is gone
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(failed)  # taking down what was imported takes seconds, and the first rank waits


def _end_with_parent(folder: str | None) -> None:
    """End this process, whatever it is doing, once the first rank's end of the pipe is closed."""
    while os.read(0, 4096):  # not through sys.stdin, whose lock the end of the interpreter would wait for
        pass
    if folder is not None:  # the first rank may have had no time to remove it
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
