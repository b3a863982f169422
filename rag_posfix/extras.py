"""Which extra installs a package: for imports of optional dependencies that fail."""

from __future__ import annotations

from types import MappingProxyType

from rag_posfix.errors import ConfigError, missing_extra

_EXTRA_PACKAGES = MappingProxyType({
    "local": (
        "torch", "transformers", "accelerate", "gguf", "jinja2", "safetensors", "sentence_transformers", "faiss",
        "bm25s", "filelock", "numpy",
    ),
    "server": ("fastapi", "starlette", "uvicorn", "prometheus_client", "fastapi_offline"),
    "mcp": ("mcp", "mcp_types"),
    "remote": ("httpx2",),
    "telemetry": ("opentelemetry",),
    "redis": ("redis",),
    "train": ("peft",),
    "eval": ("scipy", "matplotlib", "ir_measures", "pytrec_eval"),
    "report": ("altair", "vl_convert"),
    "ray": ("ray",),
})  # fmt: skip


def missing_package(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the error for an import of an optional dependency that failed; None for other modules."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in _EXTRA_PACKAGES.items() if package in packages), None)
    return None if extra is None else missing_extra(package, extra)
