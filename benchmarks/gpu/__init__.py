"""The GPU in one command: exactness, first token, KV store, batches and profile, measured in one process.

    python -m benchmarks.gpu --out DIR [--minutes 8]

Needs torch, transformers, numpy and safetensors alone, no network and no weights: models have their real shapes and
random weights. Each part writes its record to DIR after every cell. See ``docs/gpu.md``.
"""
