"""Position encodings: one per file, found by name in ``ENCODINGS``, and the small decoder that trains with any.

Importing this package registers every encoding. A new encoding is one file and one line here.
"""

from rag_posfix.lab.encodings import (  # noqa: F401
    alibi,
    cope,
    cope_rope,
    drope,
    learned,
    nope,
    rope,
    rope_nope,
    shaw,
    sinusoidal,
    spline,
    stable_mask,
    t5,
)
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions, create_encoding
from rag_posfix.lab.encodings.decoder import Decoder, load_decoder

__all__ = ["ENCODINGS", "Decoder", "DecoderShape", "Encoding", "Positions", "create_encoding", "load_decoder"]
