"""Which number formats the processor computes fast in."""

from __future__ import annotations


def cpu_has_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16; without them it is emulated, slower than float32."""
    import torch

    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))
