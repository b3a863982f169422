"""Reranking: one scorer per file, each a langchain ``BaseDocumentCompressor``.

Importing ``RERANKERS`` from here registers every built-in reranker; none of them loads a model on import.
"""

from rag_posfix.reranking.attention_sorting import AttentionSortingReranker
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.calibrated_attention import CalibratedAttentionReranker
from rag_posfix.reranking.cross_encoder import CrossEncoderReranker
from rag_posfix.reranking.deadline import GuardedReranker
from rag_posfix.reranking.embedding import EmbeddingReranker
from rag_posfix.reranking.endpoint import EndpointReranker
from rag_posfix.reranking.fused import FusedReranker
from rag_posfix.reranking.in_context import InContextReranker
from rag_posfix.reranking.last_but_not_late import LastButNotLateReranker
from rag_posfix.reranking.likelihood import LikelihoodReranker
from rag_posfix.reranking.listwise import ListwiseReranker
from rag_posfix.reranking.yes_no import YesNoReranker

__all__ = [
    "RERANKERS",
    "AttentionSortingReranker",
    "CalibratedAttentionReranker",
    "CrossEncoderReranker",
    "EmbeddingReranker",
    "EndpointReranker",
    "FusedReranker",
    "GuardedReranker",
    "InContextReranker",
    "LastButNotLateReranker",
    "LikelihoodReranker",
    "ListwiseReranker",
    "YesNoReranker",
]
