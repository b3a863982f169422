"""Calibrates an index: how similar its passages are to questions that have nothing to do with them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.retrieval import SimilarityRange
from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.storage import write_similarity

FOREIGN_QUESTIONS = (
    "good evening", "What time is it?", "How are you today?", "Can you help me with my homework?", "ok great",
    "Who discovered America?", "What is the tallest mountain in the world?", "How do I bake a chocolate cake?",
    "What is the currency of Mexico?", "How many bones does a human body have?", "When did the second world war end?",
    "What is the fastest animal on land?", "Who wrote Don Quixote?", "How do I tie a tie?", "What causes earthquakes?",
    "What is the meaning of life?", "Recommend me a film for tonight.", "How do I learn to play the guitar?",
    "What is the boiling point of water?", "Who was the first person in space?", "Write a short story about a dragon.",
    "How do I remove a coffee stain?", "What is a black hole?", "Which language is spoken in Egypt?",
    "How do I sort a list in Java?", "What is seven times eight?", "Who invented the telephone?",
    "What should I name my cat?", "How do plants drink?", "What is the largest ocean?",
    "Is it going to rain tomorrow?", "How long do elephants live?", "Was ist die Hauptstadt von Kanada?",
    "Wie koche ich Reis?",
    "Quelle est la distance de la terre au soleil ?", "Raconte-moi une blague.", "¿Quién pintó el Guernica?",
    "¿Cómo se hace una tortilla?",
)  # fmt: skip
"""Questions of general knowledge, requests and greetings: few indexes answer more than a few of them.

In scripts of spaced words: to embedding models that cannot read a script, all texts in it are alike.
"""


def calibrate_index(
    folder: str | Path, embeddings: Embeddings, questions: Sequence[str] = FOREIGN_QUESTIONS
) -> SimilarityRange:
    """Measure the best similarities of foreign questions in an index, and keep a range of them in its manifest.

    Formula: b_i is the similarity of question i to its best passage. low is the 25 % quantile of b; clear =
        2 q - median(b), at most 1, where q is the 95 % quantile. If the index answers more than a twentieth of the
        questions, ``clear`` rises, and more is left to the judge.

    Args:
        embeddings: The model that the index was built with.
        questions: At least ten questions that the index does not answer.

    Raises:
        ConfigError: fewer than ten questions.
        RetrievalError: the index is missing, damaged or of another model, or cannot be written.
    """
    if len(questions) < 10:
        raise ConfigError(f"{len(questions)} foreign questions are given; at least 10 are needed")
    store = FaissVectorStore.load(folder, embeddings)
    best = [
        max((score for _, score in store.similarity_search_with_score(text, k=1)), default=0.0) for text in questions
    ]
    twentieths = statistics.quantiles(best, n=20, method="inclusive")  # 5 %, 10 %, ...
    low = round(min(max(twentieths[4], 0.0), 1.0), 3)
    clear = round(min(max(2 * twentieths[18] - twentieths[9], low), 1.0), 3)
    similarity = SimilarityRange(low, clear)
    write_similarity(Path(folder), similarity)
    return similarity
