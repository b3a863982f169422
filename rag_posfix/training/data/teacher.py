"""Pairs from a teacher: a model that reads one segment, or two, and writes a question that they answer."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from random import Random

from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.assembly.tokenization import tokenize_prompt
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError
from rag_posfix.training.data.pair import Pair, Segment

_log = logging.getLogger(__name__)
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_TASK = (
    "Write one question about the text below, and its answer. The question must be understandable without the text, "
    "and nothing but the text may be needed for the answer. The answer must be short and copied from the text. "
)
_TWO = "There are two texts: the answer must need both. "
_FORM = 'Return one JSON object: {"question": "...", "answer": "..."}'
MOST_TOKENS = 256


class TeacherPairs:
    """Pairs that a teacher writes about segments that are drawn at random.

    An answer that is no JSON object of this form, or is not in the segments, gives no pair.

    Source: An et al. (2024), IN2/FILM, section 3.1, https://arxiv.org/abs/2404.16811

    Args:
        teacher: The model, for example a remote generator.
        segments: What questions are asked about.

    Raises:
        ConfigError: there are fewer than two segments.
    """

    name = "teacher"

    def __init__(self, teacher: Generator, segments: Sequence[Segment]) -> None:
        if len(segments) < 2:
            raise ConfigError(f"a teacher needs two segments of text or more, got {len(segments)}; give more --texts")
        self._teacher = teacher
        self._segments = segments

    def pair(self, index: int, random: Random, segments: int) -> Pair | None:
        """Ask the teacher about ``segments`` neighbouring segments; None if its answer cannot be used."""
        count = min(segments, len(self._segments))
        first = random.randrange(len(self._segments) - count + 1)
        excerpt = tuple(self._segments[first : first + count])
        texts = "\n\n".join(f"Text {number}:\n{segment.text}" for number, segment in enumerate(excerpt, start=1))
        prompt = f"{_TASK}{_TWO if count > 1 else ''}{_FORM}\n\n{texts}"
        layout = tokenize_prompt(self._teacher.encoder, PromptTemplate(), prompt, has_passages=False).with_passages(())
        request = GenerationRequest(layout, MitigationChoice("none"), Sampling(max_tokens=MOST_TOKENS))
        pair = read_answer(self._teacher.generate(request).text, excerpt)
        if pair is None:
            _log.info("the teacher's answer about segment %d cannot be used", first)
        return pair

    def filler(self, random: Random) -> Segment:
        """Return another segment."""
        return random.choice(self._segments)


def read_answer(text: str, segments: tuple[Segment, ...]) -> Pair | None:
    """Return the pair of a teacher's answer, or None if it has another form or an answer of its own."""
    match = _OBJECT.search(text)
    try:
        payload = json.loads(match[0]) if match else None
    except ValueError:
        return None
    if not isinstance(payload, dict):
        return None
    question, answer = payload.get("question"), payload.get("answer")
    if not (isinstance(question, str) and isinstance(answer, str) and question.strip() and answer.strip()):
        return None
    if len(segments) == 1 and answer.strip().lower() not in segments[0].text.lower():
        return None
    return Pair(question.strip(), (answer.strip(),), segments)
