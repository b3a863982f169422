"""Embeddings with sentence-transformers, loaded on first use. Knows nothing of documents or indexes.

``embedding_identity`` names a model by its weights, the same on every machine, so that an index rejects searches with
another model than it was built with.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.embeddings import Embeddings

from rag_posfix.checked import check_type
from rag_posfix.checkpoints import check_encoder, quiet_loading
from rag_posfix.errors import ConfigError, RetrievalError, missing_extra
from rag_posfix.files import default_cache_dir
from rag_posfix.text import clean_text, text_beginning
from rag_posfix.weight_packages import fetch_command, located

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

__all__ = ["EncodeTexts", "SentenceEmbeddings", "embedding_identity"]

EncodeTexts: TypeAlias = Callable[[Sequence[str]], "NDArray[np.float32]"]
"""Returns one unit vector per text."""

_PACKAGED = "minilm"
_PACKAGED_NAME = "all-MiniLM-L6-v2"
_PRESETS = {"multilingual": ("intfloat/multilingual-e5-small", {"query": "query: ", "document": "passage: "})}
"""Model id, and the texts that it needs before a question and before a document, which its files do not state."""

_BATCHES_PER_REPORT = 4


class SentenceEmbeddings(Embeddings):
    """Embeddings of a sentence-transformers model, each vector of length one.

    The model is loaded, and sentence-transformers imported, when the first text is embedded. Instances may be shared
    between threads.

    Args:
        model: ``minilm`` (English; see ``weight_packages``), ``multilingual`` (``intfloat/multilingual-e5-small``, for
            about 100 languages), a model id, or a folder.
        device: ``auto``, ``cpu``, ``cuda``, ...
        batch_size: Texts per forward pass.
        progress: Called with (texts embedded, texts to embed) while ``embed_documents`` runs.
        encoder: Makes a function from the loaded model that embeds many texts, in place of the model's own; for one
            batch or less the model's own is used. Such vectors may differ slightly from those of the model.
        cache_dir: Where ``rag-posfix models fetch`` put the packaged model; default ``~/.cache/rag_posfix``.

    Raises:
        ConfigError: ``batch_size`` is below 1 or ``model`` is empty.
    """

    def __init__(
        self,
        model: str | Path = _PACKAGED,
        *,
        device: str = "auto",
        batch_size: int = 32,
        progress: Callable[[int, int], None] | None = None,
        encoder: Callable[[SentenceTransformer], EncodeTexts] | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        if not str(model).strip():
            raise ConfigError("embedding model is empty; pass 'minilm', a model id, or a folder")
        check_type("batch_size", batch_size, int, "a whole number >= 1")
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be >= 1")
        self.model = str(model)
        self.device = device
        self.batch_size = batch_size
        self._progress = progress
        self._cache_dir = cache_dir or default_cache_dir()
        self._encoder = encoder
        self._encode_many: EncodeTexts | None = None
        self._loaded: SentenceTransformer | None = None
        self._identity: str | None = None
        # One lock for loading and encoding: a transformers tokenizer fails if two threads set its padding.
        self._lock = threading.RLock()

    @property
    def identity(self) -> str:
        """Name, dimension and a hash of the weights; equal for equal copies of a model. Loads the model."""
        with self._lock:
            if self._identity is None:
                name = _PACKAGED_NAME if self.model == _PACKAGED else Path(self.model).name
                dimension = len(self.embed_query("dimension"))
                self._identity = f"{name}:{dimension}:{_weights_hash(self._load())}"
            return self._identity

    @property
    def max_tokens(self) -> int:
        """The number of tokens that the model reads of a text; what follows has no influence. Loads the model."""
        with self._lock:
            return int(self._load().max_seq_length)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without the model's own first and last ones. Loads the model."""
        with self._lock:
            tokenizer = self._load().tokenizer
            ids = tokenizer(clean_text(text), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
            return len(ids)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text, in order."""
        if self._encoder is not None and len(texts) > self.batch_size:
            with self._lock:
                if self._encode_many is None:
                    self._encode_many = self._encoder(self._load())
                beginnings = self._beginnings(texts)
            rows: list[list[float]] = self._encode_many(beginnings).tolist()
            if self._progress is not None:
                self._progress(len(texts), len(texts))
            return rows
        vectors: list[list[float]] = []
        step = self.batch_size * _BATCHES_PER_REPORT
        for start in range(0, len(texts), step):
            vectors += self._encode("encode_document", texts[start : start + step])
            if self._progress is not None:
                self._progress(len(vectors), len(texts))
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a question, with the model's query prompt if it has one."""
        return self._encode("encode_query", [text])[0]

    def _encode(self, method: str, texts: Sequence[str]) -> list[list[float]]:
        with self._lock:
            vectors = getattr(self._load(), method)(
                self._beginnings(texts),
                batch_size=self.batch_size,
                show_progress_bar=False,
                convert_to_numpy=True,
                normalize_embeddings=True,
            )
        result: list[list[float]] = vectors.astype("float32").tolist()
        return result

    def _beginnings(self, texts: Sequence[str]) -> list[str]:
        """Return the part of each text that the model can read."""
        limit = self._load().max_seq_length
        if limit is not None:
            texts = [text_beginning(text, limit, self.count_tokens) for text in texts]
        return [clean_text(text) for text in texts]

    def _load(self) -> SentenceTransformer:
        if self._loaded is None:
            location, prompts = _PRESETS.get(self.model, (self.model, None))
            if self.model == _PACKAGED:
                location = str(_packaged_folder(self._cache_dir))
            try:
                from sentence_transformers import SentenceTransformer
            except ImportError as error:
                raise missing_extra("sentence_transformers", "local") from error
            try:
                device = None if self.device == "auto" else self.device
                with quiet_loading():
                    loaded = SentenceTransformer(location, device=device, prompts=prompts)
                    check_encoder(location, loaded.transformers_model)
                self._loaded = loaded
            except Exception as error:
                # The hub, the files and the device raise many types of errors; the user gets one line.
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise RetrievalError(
                    f"embedding model {self.model!r} could not be loaded on device {self.device!r}: {reason}; "
                    "pass 'minilm', 'multilingual', a sentence-transformers model id, or a folder"
                ) from error
        return self._loaded


def embedding_identity(embeddings: Embeddings) -> str:
    """Return the identity of an embedding model: its ``identity`` if it has one, else class and model name."""
    identity = getattr(embeddings, "identity", None)
    if isinstance(identity, str):
        return identity
    names = (getattr(embeddings, attribute, None) for attribute in ("model", "model_name"))
    name = next((Path(name).name for name in names if isinstance(name, str)), "")
    return f"{type(embeddings).__name__}:{name}" if name else type(embeddings).__name__


def _packaged_folder(cache_dir: Path) -> Path:
    (weights,) = located(_PACKAGED, cache_dir)
    folder = weights.parent
    if not (folder / "modules.json").is_file():
        raise RetrievalError(
            f"no model in {folder}; fetch it again with: {fetch_command(_PACKAGED)} --again, or pass another "
            "embedding model"
        )
    return folder


def _weights_hash(model: Any) -> str:
    """Hash every tensor, without their names: these differ between releases of the library."""
    digests = []
    for tensor in model.state_dict().values():
        flat = tensor.detach().reshape(-1)
        digest = hashlib.blake2b(repr(tuple(tensor.shape)).encode())
        digest.update(flat.float().cpu().numpy().tobytes())
        digests.append(digest.digest())
    digest = hashlib.blake2b(str(model.max_seq_length).encode(), digest_size=8)
    for tensor_digest in sorted(digests):
        digest.update(tensor_digest)
    return digest.hexdigest()
