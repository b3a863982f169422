"""Files of training samples: written line by line, continued after an interruption, and read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import malformed
from rag_posfix.training.data.sample import Sample, malformed_row, sample_of

_log = logging.getLogger(__name__)

SAMPLES = "samples.jsonl"
_UNFINISHED = ".partial"


def write_samples(
    folder: Path, run: str, count: int, make: Callable[[int], Sample], report: Callable[[int, int], None]
) -> Path:
    """Write ``count`` samples to a file in ``folder``, and continue the file of an interrupted run.

    Samples are appended to ``samples.jsonl.partial``, which is renamed when it is complete. A file of an earlier run
    counts if each of its rows has the same ``run``; an incomplete last line is removed. So the file of a run that was
    interrupted equals that of one that was not.
    """
    final = folder / SAMPLES
    partial = folder / (SAMPLES + _UNFINISHED)
    try:
        if _whole_lines(final, run)[0] == count:
            report(count, count)
            return final
        folder.mkdir(parents=True, exist_ok=True)
        done, length = _whole_lines(partial, run)
        if partial.exists():
            os.truncate(partial, length)
        with partial.open("ab") as opened:
            for number in range(done, count):
                row = {**make(number).row(), "run": run}
                opened.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                opened.flush()
                report(number + 1, count)
            os.fsync(opened.fileno())
        os.replace(partial, final)
    except OSError as error:
        raise EvaluationError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error
    return final


def _whole_lines(path: Path, run: str) -> tuple[int, int]:
    """Return the number of complete rows of this run at the start of a file, and their bytes."""
    done = length = 0
    if not path.exists():
        return 0, 0
    with path.open("rb") as opened:
        for line in opened:
            try:
                row = json.loads(line)
                known = line.endswith(b"\n") and (row["run"], row["id"]) == (run, done)
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:
                if done == 0:
                    _log.warning("%s is of other settings and is replaced", path)
                break
            done += 1
            length += len(line)
    return done, length


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file in the format of Lost in the Middle."""
    try:
        with path.open(encoding="utf-8") as opened:
            for number, line in enumerate(opened):
                if line.strip():
                    yield _read(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"{path} cannot be read ({error}); give a file of training samples, as rag-posfix train data writes it"
        ) from error


def _read(path: Path, number: int, line: str) -> Sample:
    try:
        return sample_of(json.loads(line), number)
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise malformed_row(path, number + 1, malformed(error)) from error
