"""llama-server's own HTTP server from the wheel xllamacpp, as a program; its interpreter needs xllamacpp alone."""

from __future__ import annotations

import argparse
import signal

import xllamacpp

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--alias")
    for name in ("--port", "--ctx-size", "--parallel", "--threads"):
        parser.add_argument(name, type=int)
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--no-cache-prompt", action="store_true")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias, params.port = options.model, {options.alias}, options.port
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = options.ctx_size, options.parallel, options.threads
    params.no_extra_bufts, params.cache_prompt = options.no_repack, not options.no_cache_prompt
    params.warmup = False
    server = xllamacpp.Server(params)
    signal.pause()
