"""The spline transformer's trajectory of control tokens: an auto-encoder on short sequences, not a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions
from rag_posfix.parameters import Integer


def spline_basis(n_points: int, degree: int, positions: Tensor) -> Tensor:
    """Return the B-spline basis with a clamped uniform knot vector: the weight of each control point at each position.

    Source: de Boor (1978), A Practical Guide to Splines (recursion of Cox and de Boor)
    Formula: N_i,0(t) = 1 for u_i <= t < u_(i+1), else 0; N_i,k(t) = (t - u_i) / (u_(i+k) - u_i) N_i,k-1(t)
        + (u_(i+k+1) - t) / (u_(i+k+1) - u_(i+1)) N_(i+1),k-1(t); a quotient with denominator 0 is 0. The curve starts
        at the first control point and ends at the last one.

    Shapes:
        positions: (T,). returns: (T, n_points) float64; each row sums to 1.
    """
    inside = torch.linspace(0, 1, n_points - degree + 1, dtype=torch.float64)
    knots = torch.cat((inside.new_zeros(degree), inside, inside.new_ones(degree)))
    position = positions.double().clamp(0, 1)[:, None]
    last = position >= 1  # the last interval is closed
    basis = ((knots[:-1] <= position) & (position < knots[1:])).double()
    basis[:, n_points - 1] = torch.where(last[:, 0], 1.0, basis[:, n_points - 1])
    for k in range(1, degree + 1):
        left_width, right_width = knots[k:-1] - knots[: -k - 1], knots[k + 1 :] - knots[1:-k]
        left_term = torch.where(left_width > 0, (position - knots[: -k - 1]) / left_width.clamp(min=1e-12), 0.0)
        right_term = torch.where(right_width > 0, (knots[k + 1 :] - position) / right_width.clamp(min=1e-12), 0.0)
        basis = left_term * basis[:, :-1] + right_term * basis[:, 1:]
    return basis


@ENCODINGS.register("spline")
@dataclass(frozen=True)
class Spline(Encoding):
    """Encode a sequence as a smooth curve through latent space; the place on the curve is the position.

    This is an auto-encoder (``SplineAutoencoder``): its encoder reads the whole sequence at once, so it cannot predict
    the next token, and no decoder uses it. The encoder has no positions. What it reconstructs must therefore have an
    order that follows from its elements, as points of a curve or frames of a motion do; two orders of the same tokens
    have the same curve.

    Source: Spline-based Transformers (ECCV 2024), https://arxiv.org/abs/2504.02797
    Formula: p_1 ... p_n = the encoder's outputs at n learned control tokens; s(t) = sum_i N_i,k(t) p_i
        (``spline_basis``); element j of T is decoded from s(j / (T - 1)).
    Differs from the paper: tokens instead of continuous elements, and two small layers; for short sequences.
    Limits: the authors applied for a patent (US20250284934A1).

    Args:
        control_points: Number of control tokens, n; above ``degree``.
        degree: Of the curve's polynomials, 1 or more.

    Raises:
        ConfigError: there are too few control points.
    """

    name = "spline"
    causal = False

    control_points: Annotated[int, Integer(2)] = 8
    degree: Annotated[int, Integer(1)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.control_points <= self.degree:
            raise ConfigError(
                f"spline: control_points={self.control_points} must be above degree={self.degree}; give more points"
            )

    def build(self, shape: DecoderShape) -> Positions:
        """Refuse: the encoding belongs to an auto-encoder.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("spline is an auto-encoder and no encoding of decoders; use SplineAutoencoder")


class SplineAutoencoder(nn.Module):
    """An auto-encoder of short token sequences whose positions are places on a spline (``Spline``).

    Args:
        spline: Number of control points and degree.
        shape: Vocabulary and width; half of the layers encode and as many decode, at least one each.
    """

    def __init__(self, spline: Spline, shape: DecoderShape) -> None:
        super().__init__()
        self.spline = spline
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.control = nn.Parameter(torch.randn(spline.control_points, shape.width))
        depth = max(1, shape.layers // 2)
        self.encoder, self.decoder = (self._stack(shape, depth) for _ in range(2))
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def control_points(self, ids: Tensor) -> Tensor:
        """Return the control points of sequences; they do not depend on the order of the tokens.

        Shapes:
            ids: (B, T). returns: (B, n, width).
        """
        control = self.control.expand(ids.shape[0], -1, -1)
        states: Tensor = self.encoder(torch.cat((control, self.embedding(ids)), dim=1))
        return states[:, : self.spline.control_points]

    def trajectory(self, points: Tensor, length: int) -> Tensor:
        """Return the curve at ``length`` positions, evenly spaced from its start to its end.

        Shapes:
            points: (B, n, width). returns: (B, length, width).
        """
        positions = torch.linspace(0, 1, length, dtype=torch.float64)
        basis = spline_basis(self.spline.control_points, self.spline.degree, positions)
        return basis.to(points) @ points

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the reconstruction.

        Shapes:
            ids: (B, T). returns: (B, T, vocabulary).
        """
        curve = self.trajectory(self.control_points(ids), ids.shape[1])
        logits: Tensor = self.head(self.decoder(curve))
        return logits

    @staticmethod
    def _stack(shape: DecoderShape, depth: int) -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, shape.inner, shape.dropout, batch_first=True, norm_first=True, activation="gelu"
        )
        return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
