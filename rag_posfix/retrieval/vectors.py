"""Lists of floats from any embedding model as unit rows, and similarity as relevance. numpy only, on call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rag_posfix.errors import RetrievalError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["cosine_relevance", "unit_rows"]


def cosine_relevance(cosine: float) -> float:
    """Return a cosine in [-1, 1] as relevance in [0, 1]: negative becomes 0, the rest is kept.

    Not ``(cosine + 1) / 2``: later stages take the logarithm of the relevance, and that map would call an
    unrelated passage (cosine 0) half relevant and squeeze all logarithms together.
    """
    return min(max(float(cosine), 0.0), 1.0)


def unit_rows(vectors: ArrayLike) -> NDArray[np.float32]:
    """Return ``vectors`` as rows of length one; a zero vector stays zero, so that it is similar to nothing.

    Raises:
        RetrievalError: rows differ in length, are empty, or hold a value that is not finite.
    """
    import numpy as np

    try:
        rows = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RetrievalError(f"the embedding model returned vectors of unequal length ({error})") from error
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise RetrievalError(f"the embedding model returned an array of shape {rows.shape}; need one vector per text")
    if not np.isfinite(rows).all():
        raise RetrievalError("the embedding model returned a value that is not finite; check its weights and dtype")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths > 0, lengths, 1.0), dtype=np.float32)
