"""Names of spans, attributes and metrics: OpenTelemetry's conventions for generative AI, and our own.

Source: https://github.com/open-telemetry/semantic-conventions-genai (status "development"; read in November 2026). The
constants of ``opentelemetry.semconv`` are deprecated in favour of that repository, which publishes no package, so the
names are literals.
"""

from __future__ import annotations

PROVIDER_NAME = "rag_posfix"

ERROR_TYPE = "error.type"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
SEED = "gen_ai.request.seed"
STREAM = "gen_ai.request.stream"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# Content: recorded only if asked for.
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
QUERY_TEXT = "gen_ai.retrieval.query.text"
RETRIEVED = "gen_ai.retrieval.documents"

# What the conventions have no name for.
MITIGATION = "rag_posfix.mitigation"
ORDER = "rag_posfix.order"
CACHE = "rag_posfix.cache"
DOCUMENTS = "rag_posfix.documents"
DROPPED = "rag_posfix.documents.dropped"
QUEUE_SECONDS = "rag_posfix.queue.seconds"
CLOSED_EARLY = "rag_posfix.closed_early"

DURATION = "gen_ai.server.request.duration"
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
PER_TOKEN = "gen_ai.server.time_per_output_token"
