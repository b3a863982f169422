"""Embeddings with sentence-transformers, loaded on first use. Knows nothing of documents or indexes.

``embedding_identity`` names a model by its weights, the same on every machine, so that an index rejects searches with
another model than it was built with.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.embeddings import Embeddings

from rag_posfix.checked import check_type
from rag_posfix.checkpoints import check_encoder, fetch_command, located, quiet_loading
from rag_posfix.errors import ConfigError, RetrievalError, missing_extra
from rag_posfix.files import default_cache_dir
from rag_posfix.text import clean_text, text_beginning

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

__all__ = ["EncodeTexts", "SentenceEmbeddings", "embedding_identity"]

MAX_TEXT_TOKENS = 8192
"""Most tokens of a text that are embedded; OpenAI's embedding models read as many."""

MAX_QUESTION_TOKENS = 256
"""Most tokens of a question that are embedded: anybody may send a long one, and every window costs a pass."""

_log = logging.getLogger(__name__)

EncodeTexts: TypeAlias = Callable[[Sequence[str]], "NDArray[np.float32]"]
"""Returns one unit vector per text."""

_PACKAGED = "minilm"
_PACKAGED_NAME = "all-MiniLM-L6-v2"
_PRESETS = {"multilingual": ("intfloat/multilingual-e5-small", {"query": "query: ", "document": "passage: "})}
"""Model id, and the texts that it needs before a question and before a document, which its files do not state."""

_BATCHES_PER_REPORT = 4


class SentenceEmbeddings(Embeddings):
    """Embeddings of a sentence-transformers model, each vector of length one.

    A text longer than the model reads (``max_tokens``) is embedded in windows of equal length: its vector is the mean
    of theirs, weighted by their tokens. Of a text of more than 8,192 tokens the first window alone is embedded, with
    a warning; of a question, and of a passage that is ranked, of more than 256 tokens too, without one.

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
        """The number of tokens that the model reads at a time. Loads the model."""
        with self._lock:
            return int(self._load().max_seq_length)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without the model's own first and last ones. Loads the model."""
        with self._lock:
            tokenizer = self._load().tokenizer
            ids = tokenizer(clean_text(text), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
            return len(ids)

    def embedded_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, or a number above ``MAX_TEXT_TOKENS`` for a longer one."""
        return self.count_tokens(text_beginning(text, MAX_TEXT_TOKENS, self.count_tokens))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text, in order."""
        vectors: list[list[float]] = []
        at_once = self._encoder is not None and len(texts) > self.batch_size
        step = len(texts) if at_once else self.batch_size * _BATCHES_PER_REPORT
        for start in range(0, len(texts), step or 1):
            vectors += self._embed("encode_document", texts[start : start + step], at_once=at_once)
            if self._progress is not None:
                self._progress(len(vectors), len(texts))
        return vectors

    def embed_beginnings(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the vector of the first window of each text: anybody may send long ones, at a bounded cost."""
        return self._embed("encode_document", texts, most=MAX_QUESTION_TOKENS)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a question, with the model's query prompt if it has one."""
        return self._embed("encode_query", [text], most=MAX_QUESTION_TOKENS)[0]

    def _embed(
        self, method: str, texts: Sequence[str], *, at_once: bool = False, most: int = MAX_TEXT_TOKENS
    ) -> list[list[float]]:
        """Return the vector of each text: of its only window, or the mean of its windows' vectors."""
        with self._lock:
            model = self._load()
            windows = [self._windows(text, most) for text in texts]
            parts = [part for each in windows for part, _ in each]
            if not (at_once and self._encoder is not None):
                options = {"show_progress_bar": False, "convert_to_numpy": True, "normalize_embeddings": True}
                vectors = getattr(model, method)(parts, batch_size=self.batch_size, **options)
                return _mean_vectors(vectors.astype("float32"), windows)
            self._encode_many = self._encode_many or self._encoder(model)
        return _mean_vectors(self._encode_many(parts), windows)

    def _windows(self, text: str, most: int) -> list[tuple[str, int]]:
        """Return the windows of the first tokens of a text, read one by one, and the tokens of each."""
        model = self._load()
        if model.max_seq_length in (None, math.inf):
            return [(clean_text(text), 1)]
        # A tokenizer reads all characters, also those that are then cut off.
        beginning = text_beginning(text, most, self.count_tokens)
        options = {"add_special_tokens": False, "truncation": False, "return_offsets_mapping": True, "verbose": False}
        cleaned = clean_text(beginning)
        starts: list[int] = [start for start, _ in model.tokenizer(cleaned, **options)["offset_mapping"]]
        size = max(1, model.max_seq_length - self._added_tokens())
        if len(beginning) < len(text) or len(starts) > most:  # such texts cost no more than short ones
            if most == MAX_TEXT_TOKENS:
                _log.warning("a text has more than %d tokens; only its first %d are embedded", most, size)
            starts = starts[: size + 1]
            cleaned, starts = cleaned[: starts[size]] if len(starts) > size else cleaned, starts[:size]
        return split_windows(cleaned, starts, size)

    def _added_tokens(self) -> int:
        """Return how many tokens the model adds to a text: the special ones, and its longest prompt."""
        model = self._load()
        prompts = (self.count_tokens(prompt) for prompt in (model.prompts or {}).values() if prompt)
        return int(model.tokenizer.num_special_tokens_to_add()) + max(prompts, default=0)

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


def split_windows(text: str, starts: Sequence[int], size: int) -> list[tuple[str, int]]:
    """Return the parts of a text of at most ``size`` tokens, and their tokens; they begin at words where they can.

    ``starts`` are the first characters of its tokens.
    """
    windows: list[tuple[str, int]] = []
    first = 0
    while len(starts) - first > size:
        words = (i for i in range(first + size, first + size // 2, -1) if text[starts[i] - 1].isspace())
        stop = next(words, first + size)
        windows.append((text[starts[first] : starts[stop]], stop - first))
        first = stop
    return [*windows, (text[starts[first] :] if first else text, len(starts) - first)]


def _mean_vectors(vectors: NDArray[np.float32], windows: Sequence[Sequence[tuple[str, int]]]) -> list[list[float]]:
    """Return a vector of length one for each text: its window's, or the mean of its windows' by their tokens."""
    import numpy as np

    means: list[list[float]] = []
    start = 0
    for parts in windows:
        some, start = vectors[start : start + len(parts)], start + len(parts)
        if len(parts) > 1:
            mean = np.average(some.astype("float64"), axis=0, weights=[tokens for _, tokens in parts])
            some = (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype("float32")[None]
        means.append(some[0].tolist())
    return means


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
