"""The metrics of questions, as OpenTelemetry's conventions for model servers define them."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.metrics import MeterProvider

from rag_posfix.contracts.answer import Answer
from rag_posfix.telemetry import names

# The bounds that the conventions recommend for each metric.
_DURATION_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Instruments:
    """Histograms of durations in seconds."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter("rag_posfix")
        self._duration = meter.create_histogram(
            names.DURATION,
            "s",
            "Time of one answer, cached ones included.",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS,
        )
        self._first_token = meter.create_histogram(
            names.FIRST_TOKEN,
            "s",
            "Time from the question to the first token that the model chose.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN_BOUNDS,
        )
        self._per_token = meter.create_histogram(
            names.PER_TOKEN,
            "s",
            "Time for each token of an answer after its first.",
            explicit_bucket_boundaries_advisory=_PER_TOKEN_BOUNDS,
        )

    def answered(
        self, answer: Answer, seconds: float, first_token: float | None, attributes: Mapping[str, str]
    ) -> None:
        """Record a complete answer.

        Args:
            first_token: From the question to the first token, or None for a cached answer.
            attributes: Operation, provider and model.
        """
        self._duration.record(seconds, attributes)
        if first_token is None:
            return
        self._first_token.record(first_token, attributes)
        further, decode = answer.usage.completion_tokens - 1, answer.timings.get("decode")
        if further > 0 and decode is not None:
            self._per_token.record(decode / further, attributes)

    def failed(self, error_type: str, seconds: float, attributes: Mapping[str, str]) -> None:
        """Record a question without an answer."""
        self._duration.record(seconds, {**attributes, names.ERROR_TYPE: error_type})
