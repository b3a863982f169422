"""Scores passages by the model's answer to "does this passage contain the answer?": yes against no."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rag_posfix.assembly.documents import CheckedDocument
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, TokenizedPrompt, cut_passage, tokenize_prompt, truncate
from rag_posfix.contracts.request import current_salt
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.bias_profile import FileReader
from rag_posfix.reranking.base import RERANKERS, DocumentScore, log_sum, sigmoid
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.language_model import FEWEST_TOKENS, SeparatePassageReranker, document_without_copies


@dataclass(frozen=True, slots=True)
class JudgeTemplate:
    """The prompt in which the model judges one passage, as data.

    Attributes:
        before: Text of the user's turn before the passage; ``{question}`` is replaced. With the text of an answer's
            prompt the keys and values of passages serve judgement and answer.
        after: Text of the user's turn after the passage; ``{question}`` is replaced.
        heading: Text before a passage with a title, as in ``PromptTemplate``.
        separator: Text after the passage.
        system: A system message; none if empty.
        answer_start: Text that the assistant's turn begins with; it may contain control tokens.
        yes: Spellings of yes; those that are one token of the model count, or the first tokens if none is.
        no: Spellings of no.
    """

    before: str = PromptTemplate().opening
    after: str = (
        "Question: {question}\nDoes the passage above contain the answer to this question? "
        "Reply with Yes or No.\nReply:"
    )
    heading: str = PromptTemplate().heading
    separator: str = PromptTemplate().separator
    system: str = ""
    answer_start: str = ""
    yes: tuple[str, ...] = ("Yes", "yes", " Yes", " yes", "YES")
    no: tuple[str, ...] = ("No", "no", " No", " no", "NO")

    def __post_init__(self) -> None:
        if "{question}" not in self.before + self.after:
            raise ConfigError("judge template: neither before nor after contains '{question}'; add it to one of them")


TEMPLATES: Mapping[str, JudgeTemplate] = MappingProxyType(
    {
        "answer": JudgeTemplate(),
        # The model card of Qwen3-Reranker (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
        "qwen3_reranker": JudgeTemplate(
            system=(
                "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
                'Note that the answer can only be "yes" or "no".'
            ),
            before=(
                "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
                "<Query>: {question}\n<Document>: "
            ),
            after="",
            separator="",
            answer_start="<think>\n\n</think>\n\n",
            yes=("yes",),
            no=("no",),
        ),
    }
)


def read_template(path: str) -> Mapping[str, Any]:
    """Read the ``template`` of a TOML file whose keys are fields of ``JudgeTemplate``, or the name of a shipped one.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or has the wrong type.
    """
    if path in TEMPLATES:
        return {"template": path}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"template={path!r} is neither a shipped template ({', '.join(TEMPLATES)}) nor a TOML file: {error}"
        ) from error
    return {"template": content}


class _JudgePrompt(PromptTemplate):
    """A prompt template whose opening ends without a blank line of its own."""

    @property
    def opening(self) -> str:
        return self.instruction


@RERANKERS.register("yes_no")
class YesNoReranker(SeparatePassageReranker):
    """Ask the model for each passage whether it contains the answer, and compare the probabilities of yes and no.

    Source: pointwise relevance generation, Liang et al. (2022), HELM, https://arxiv.org/abs/2211.09110; as log-odds in
        Nogueira et al. (2020), monoT5, https://arxiv.org/abs/2003.06713, and in Qwen3-Reranker.
    Formula: o_k = log sum_{t in yes} p(t | passage k, question) - log sum_{t in no} p(t | passage k, question);
        raw_score = o_k - o_0, where o_0 is that of the prompt without a passage; relevance_score = sigmoid(raw_score).
    Differs from the paper: calibrated by the prompt without a passage, so that a model that says yes to everything
        has scores around 0.5; a document longer than ``window_tokens`` has the score of its best window; see
        ``question_copies``.
    Cost: tokens read: prefix once, each passage once, the question once per passage and once more. Keys and values of
        passages are those of answers (``template="answer"``): what the passage KV store has is not read again. On a
        server: one request of one token per passage, all together, and judgements are kept in the answer cache.
        ``model`` takes memory beside the served model, and shares its passage KV store, or has one of its own where
        the served model has none.
    Limits: a property of the reader: small models say yes to nearly every passage. A passage that speaks to the judge
        ("this document contains the answer") may be believed. A server lists its likeliest tokens only: a spelling
        that is not listed counts as the last of them. A server without log-probabilities answers five times. A server
        writes the start of the assistant's turn itself: ``answer_start`` of a template is not sent.

    Attributes:
        generator: The model that judges; an ``Engine``, a ``BatchingGenerator`` around one, or a ``RemoteGenerator``.
        model: A model that judges in place of the served one, for rerankers made by name: a name, a folder or an
            ``openai:NAME@URL`` in double quotes, as for ``--model``; checked at once, loaded by its first question.
            Clients of the service cannot name it.
        top_n: Number of passages to return, all if None.
        template: ``answer``, ``qwen3_reranker``, or fields of ``JudgeTemplate``; on the command line also a TOML file.
        batch_size: Maximum number of passages per batch.
        window_tokens: A longer document is read in windows of this many tokens that overlap by a quarter.
        calibrate: Subtract the log-odds without a passage.
        question_copies: Whether sentences that copy the question are read. Without, they are left out of the passage
            (``question_copies: "left out"``): a passage that repeats the question is judged by what else it says.
        mass: Return the fewest of these passages whose scores sum to this share of all their scores; all if None.
        all_from: Return all further passages with this score or more too, beyond ``top_n``; none if None.
    """

    name: ClassVar[str] = "yes_no"
    selection: ClassVar[tuple[str, ...]] = ("top_n", "mass", "all_from")
    file_parameters: ClassVar[Mapping[str, FileReader]] = MappingProxyType({"template": read_template})

    reads = frozenset({"first_token", "odds"})

    model: str | None = Field(default=None, min_length=1)
    template: Literal["answer", "qwen3_reranker"] | JudgeTemplate = "answer"
    window_tokens: Annotated[int, Integer(4 * FEWEST_TOKENS)] = 1024
    calibrate: bool = True
    question_copies: bool = False
    mass: Annotated[float | None, Number(0, 1, exclusive_min=True)] = None
    all_from: Annotated[float | None, Number(0, 1)] = None

    @property
    def _judge(self) -> JudgeTemplate:
        return TEMPLATES[self.template] if isinstance(self.template, str) else self.template

    @property
    def _template(self) -> PromptTemplate:
        judge = self._judge
        return _JudgePrompt(heading=judge.heading, separator=judge.separator, system=judge.system)

    def _prompt(self, question: str) -> TokenizedPrompt:
        judge, encoder = self._judge, self.generator.encoder
        after, _, cue = judge.after.partition("{question}")
        template = _JudgePrompt(
            judge.before.replace("{question}", question), judge.heading, judge.separator, after, cue, judge.system
        )
        prompt = tokenize_prompt(encoder, template, question if "{question}" in judge.after else "")
        return replace(prompt, suffix=(*prompt.suffix, *encoder.encode_template(judge.answer_start)))

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        prompt = self._prompt(question)
        limit = min(self.window_tokens, self.generator.context_window - len(prompt))
        read = documents if self.question_copies else [document_without_copies(one, question) for one in documents]
        windows = [(index, window) for index, document in enumerate(read) for window in self._windows(document, limit)]
        odds: dict[int, float] = {}
        values = self._log_odds(prompt, [passage for _, passage in windows])
        for (document, _), value in zip(windows, values, strict=True):
            odds[document] = max(odds.get(document, -math.inf), value)
        count = Counter(document for document, _ in windows)
        details: list[dict[str, Any]] = [{"windows": count[index]} if count[index] > 1 else {} for index in odds]
        for detail, given, judged in zip(details, documents, read, strict=True):
            if judged is not given:
                detail["question_copies"] = "left out"
        return [DocumentScore(sigmoid(odds[index]), odds[index], details[index]) for index in range(len(documents))]

    def _log_odds(self, prompt: TokenizedPrompt, passages: Sequence[TokenizedPassage]) -> list[float]:
        """Return the log-odds of each passage, calibrated: those of a server together, of an engine in batches."""
        if "odds" in self.generator.capabilities:
            layout = prompt.with_passages(passages)
            judge = self._judge
            *judged, neutral = self.generator.log_odds(layout, judge.yes, judge.no, current_salt(), check_deadline)
            return [value - (neutral if self.calibrate else 0.0) for value in judged]
        yes, no = self._answer_tokens()
        odds: dict[int, float] = {}
        for batch in self._batches(passages, len(prompt.suffix)):
            check_deadline()
            layout = prompt.with_passages([passages[index] for index in batch])
            rows = self.generator.first_token_log_probs(layout, (*yes, *no), current_salt())
            *judged, neutral = (log_sum(row[: len(yes)]) - log_sum(row[len(yes) :]) for row in rows)
            odds |= {index: value - (neutral if self.calibrate else 0.0)
                     for index, value in zip(batch, judged, strict=True)}  # fmt: skip
        return [odds[index] for index in range(len(passages))]

    def kept(self, scores: Sequence[float]) -> int:
        """Return the fewest of the best ``top_n`` passages whose scores sum to ``mass`` of all their scores.

        With ``all_from`` at least as many as have that score.
        """
        best = scores[: super().kept(scores)]
        count = len(best)
        if self.mass is not None:
            wanted = self.mass * math.fsum(best)
            count = next((n for n in range(1, count) if math.fsum(best[:n]) >= wanted), count)
        return count if self.all_from is None else max(count, sum(score >= self.all_from for score in scores))

    def _answer_tokens(self) -> tuple[list[int], list[int]]:
        """Return the tokens of yes and no: spellings of one token, or else first tokens that differ."""
        encode = self.generator.encoder.encode_text
        encoded = [[ids for text in texts if (ids := encode(text))] for texts in (self._judge.yes, self._judge.no)]
        single = [list(dict.fromkeys(ids[0] for ids in each if len(ids) == 1)) for each in encoded]
        if all(single):
            return single[0], single[1]
        first = [dict.fromkeys(ids[0] for ids in each) for each in encoded]
        yes, no = ([token for token in a if token not in b] for a, b in (first, first[::-1]))
        if not yes or not no:
            raise ConfigError(
                f"yes_no: yes={self._judge.yes} and no={self._judge.no} begin with the same tokens of "
                f"{self.generator.model_id}; give other spellings in a template of your own"
            )
        return yes, no

    def _windows(self, document: CheckedDocument, limit: int) -> Iterator[TokenizedPassage]:
        """Yield the document, or windows of at most ``limit`` tokens with its heading that overlap by a quarter."""
        passage = self._fitted(document, 10**9).passage
        if len(passage) <= limit:
            yield passage
            return
        encoder = self.generator.encoder
        text = len(passage.text)
        start = 0
        while True:
            check_deadline()

            def shorten(ids: Sequence[int], allowed: int, decode: Any, start: int = start) -> tuple[int, ...]:
                return truncate(ids[start:], allowed, decode)

            window = cut_passage(encoder, passage, limit, shorten, heading_limit=limit // 2)
            yield window
            if start + len(window.text) >= text:
                return
            start += max(len(window.text) * 3 // 4, 1)
