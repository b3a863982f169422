"""Every error that rag_posfix raises on purpose.

    RagPosfixError
    ├── ConfigError                a setting, parameter or argument is outside of what is allowed
    │   └── UnknownNameError       a name that no registry holds (with "did you mean")
    ├── UnsupportedModelError      a model that the attention hook or a method cannot serve
    ├── PlanConflictError          a plan that the engine cannot run, or two plans that exclude each other
    ├── PromptTooLongError         the prompt and the tokens to generate exceed the context window
    ├── RetrievalError             reading documents, building, saving, loading or searching an index
    │   ├── NotTextError           a file that is named as text and holds other bytes
    │   ├── IndexBusyError         another thread or process is writing the index
    │   └── VectorStoreError       a vector store of another program did not answer
    ├── RerankingError             scoring documents
    │   └── RerankingTimeoutError  scoring took longer than it may, or nobody waits for it any more
    ├── GenerationError            the generator failed
    │   ├── GenerationCancelled    the caller went away
    │   └── UpstreamError          a server that generates for us failed, refused, or answered what cannot be read
    │       ├── NoAnswerError      its model called a tool, refused, or sent no text
    │       └── UpstreamTimeoutError  it took longer than it may
    ├── CacheError                 a cache was configured wrongly (a failing cache never raises)
    ├── EvaluationError            data to evaluate on is missing or malformed
    └── OverloadedError            no capacity now; try again later

A message says what is wrong, the value, what is allowed and what to do, on one line.
"""

from __future__ import annotations

__all__ = [
    "CacheError",
    "ConfigError",
    "EvaluationError",
    "GenerationCancelled",
    "GenerationError",
    "IndexBusyError",
    "NoAnswerError",
    "NotTextError",
    "OverloadedError",
    "PlanConflictError",
    "PromptTooLongError",
    "RagPosfixError",
    "RerankingError",
    "RerankingTimeoutError",
    "RetrievalError",
    "UnknownNameError",
    "UnsupportedModelError",
    "UpstreamError",
    "UpstreamTimeoutError",
    "VectorStoreError",
    "missing_extra",
]

INSTALL_FROM = "."
"""What pip installs: the folder of a copy of the repository, and the name of the package once it is on PyPI."""
TORCH_FOR_CPUS = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


class RagPosfixError(Exception):
    """Base of every error that rag_posfix raises on purpose."""


class ConfigError(RagPosfixError, ValueError):
    """A setting, parameter or argument is outside of what is allowed."""


class UnknownNameError(ConfigError):
    """A name that no registry holds."""


class UnsupportedModelError(RagPosfixError):
    """A model that the attention hook or a method cannot serve."""


class PlanConflictError(RagPosfixError):
    """A plan that the engine cannot run, or two plans that exclude each other."""


class PromptTooLongError(RagPosfixError):
    """The prompt and the tokens to generate exceed the model's context window."""


class RetrievalError(RagPosfixError):
    """Documents could not be read, or an index could not be built, saved, loaded or searched."""


class NotTextError(RetrievalError):
    """A file that is named as text holds other bytes."""


class IndexBusyError(RetrievalError):
    """Another thread or process is writing the index."""


class VectorStoreError(RetrievalError):
    """A vector store of another program did not answer, or answered with an error."""


class RerankingError(RagPosfixError):
    """Documents could not be scored."""


class RerankingTimeoutError(RerankingError):
    """Scoring took longer than it may, or nobody waits for it any more."""


class GenerationError(RagPosfixError):
    """The generator failed."""


class GenerationCancelled(GenerationError):
    """The caller went away before the answer was complete."""


class UpstreamError(GenerationError):
    """A server that generates for us failed, refused the request, or gave an answer that cannot be read.

    Attributes:
        status: The HTTP status that it answered with; None if it gave none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NoAnswerError(UpstreamError):
    """The model of another server called a tool, refused, or sent no text. The message is for its users."""


class UpstreamTimeoutError(UpstreamError):
    """A server that generates for us took longer than it may."""


class CacheError(RagPosfixError):
    """A cache was configured wrongly. A cache that fails at run time never raises."""


class EvaluationError(RagPosfixError):
    """Data to evaluate on is missing or malformed."""


class OverloadedError(RagPosfixError):
    """There is no capacity now; the caller may try again later.

    Args:
        retry_seconds: When to try again, if that is known.
    """

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


def missing_extra(package: str, extra: str) -> ConfigError:
    """Return the error for an optional dependency that is not installed.

    Args:
        package: The import name that failed.
        extra: The extra of rag-posfix that installs it.
    """
    hint = f"; without an NVIDIA GPU first: {TORCH_FOR_CPUS}" if package == "torch" else ""
    return ConfigError(f"{package} is not installed; {install_command(extra)}{hint}")


def install_command(extra: str) -> str:
    """Return the instruction that installs an extra, for messages."""
    folder = "in a copy of the repository run" if INSTALL_FROM == "." else "run"
    return f"{folder}: pip install '{INSTALL_FROM}[{extra}]'"


_EXTRA_PACKAGES = {
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
}  # fmt: skip


def missing_package(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the error for an import of an optional dependency that failed; None for other modules."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in _EXTRA_PACKAGES.items() if package in packages), None)
    return None if extra is None else missing_extra(package, extra)
