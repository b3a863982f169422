"""Times one prompt in llama.cpp and prints one JSON object. Needs ``llama-cpp-python`` and the standard library only.

Run by ``benchmarks.llama_cpp``, by its path and with ``-P``, so that an interpreter without rag_posfix can run it. The
config comes as JSON on stdin: ``gguf``, ``other``, ``prompt``, ``reordered`` (token ids), ``new_tokens``, ``threads``,
``extra_buffers``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from llama_cpp import Llama, __version__
from llama_cpp import llama_cpp as binding


def without_extra_buffers() -> None:
    """Leave the weights as the file holds them.

    By default llama.cpp repacks them for the processor; on processors with AMX the first decode of these weights has
    been seen to crash then, and ``Llama`` has no argument for it.
    """
    default = binding.llama_model_default_params

    def params() -> Any:
        found = default()
        found.use_extra_bufts = False
        return found

    binding.llama_model_default_params = params


def timed(model: Llama, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """Return seconds to the first token, tokens per second after it, and the tokens, greedily chosen.

    What the prompt shares with the last one from its beginning on is taken from the cache.
    """
    started = time.perf_counter()
    tokens = model.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
    chosen = [next(tokens)]
    first = time.perf_counter()
    chosen.extend(next(tokens) for _ in range(new_tokens))
    seconds = time.perf_counter() - first
    return {"ttft_s": first - started, "decode_tokens_per_s": new_tokens / seconds, "tokens": chosen}


def main() -> None:
    config = json.load(sys.stdin)
    if not config["extra_buffers"]:
        without_extra_buffers()
    model = Llama(
        model_path=config["gguf"],
        n_ctx=len(config["prompt"]) + config["new_tokens"] + 8,
        n_threads=config["threads"],
        n_threads_batch=config["threads"],
        verbose=False,
    )
    timed(model, config["other"], 1)  # the first use maps the weights and starts the threads
    model.reset()
    found = {
        "cold": timed(model, config["prompt"], config["new_tokens"]),
        "again": timed(model, config["prompt"], config["new_tokens"]),
        "reordered": timed(model, config["reordered"], config["new_tokens"]),
    }
    system = binding.llama_print_system_info().decode()
    about = {"version": __version__, "system": system, "n_batch": model.n_batch, "n_ctx": model.n_ctx()}
    print(json.dumps({"times": found, "about": about}))


if __name__ == "__main__":
    main()
