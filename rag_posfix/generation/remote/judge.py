"""Asks a server about single passages: yes against no as the first word of an answer, and how likely a question is.

``ServerJudge.probe`` asks what the server gives: log-probabilities, its context window, and its prefix cache.

Rows are (constant prefix, passage, question): a server's own prefix cache serves a passage in any order and company.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from rag_posfix.contracts.generator import ChatMessage, spend, sum_usage
from rag_posfix.contracts.request import MIN_LOGPROB, Usage, tenant_tags
from rag_posfix.errors import UnsupportedModelError, UpstreamError
from rag_posfix.generation.remote.connection import Connection, Event, error_message, joined_texts
from rag_posfix.text import content_hash

_log = logging.getLogger(__name__)

TOP = (20, 5)
"""Alternatives that are asked for; servers that refuse the first number are asked for the next."""
SAMPLES = 5
"""Sampled answers per passage where a server gives no log-probabilities."""
_REJECTED = frozenset({400, 404, 422, 501})
"""Statuses with which servers reject ``logprobs`` and ``echo``."""
_SAMPLE_TOKENS = 4
_REMEMBERED = 4096
_NO_USAGE = Usage(0, 0)
_SPACES = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})  # how byte-level and SentencePiece vocabularies write them
_CHAT, _COMPLETIONS = "/chat/completions", "/completions"
_SENTENCE = "The harbour froze in 1901, and ships waited for weeks until the ice broke. "
_PASSAGE_SENTENCES = 10
"""Of a passage of 150 words, the size of an index."""
_PROBED_SENTENCES = (43, 71, 110)
"""Of long prompts, the longest of some 2,000 tokens: blocks of hybrid models have 528 to 784."""
_LIMITS = ("max_model_len", "context_length", "n_ctx", "n_ctx_train")
"""Where servers list the context window of a model: vLLM, hosted APIs, llama.cpp (in ``meta``)."""


class Form(StrEnum):
    """How a server says how likely an answer is, best first."""

    CHAT = "chat completions with log-probabilities"
    COMPLETIONS = "completions with log-probabilities"
    SAMPLES = f"the majority of {SAMPLES} sampled answers"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server gives.

    Attributes:
        judgements: How it says how likely an answer is.
        prompt_log_probs: Whether it gives the log-probabilities of a prompt.
        context_window: Token limit that it lists for the model; None if it lists none.
        cached_tokens: Tokens of a repeated prompt of some 2,000 that it took from its prefix cache; None if it does
            not say.
        cached_passage_tokens: Tokens that it took from there of a passage of 150 words under another question.
        passage_tokens: Tokens of that prompt.
        block_tokens: Tokens of a block of its prefix cache, which is shared as a whole: the largest number that
            divides what was taken of prompts of several lengths. None where nothing was.
    """

    judgements: Form
    prompt_log_probs: bool
    context_window: int | None
    cached_tokens: int | None
    cached_passage_tokens: int | None = None
    passage_tokens: int | None = None
    block_tokens: int | None = None

    @property
    def shares_passages(self) -> bool | None:
        """Whether its prefix cache serves a passage of 150 words under another question; None if it does not say."""
        return None if self.cached_passage_tokens is None else self.cached_passage_tokens > 0


class ByteCache(Protocol):
    """The methods of the answer cache that judgements need."""

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored object, or None."""
        ...

    def begin(self) -> AbstractContextManager[object]:
        """Open a computation, until the end of the block."""
        ...

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Store an object made from ``document_ids``, unless one was deleted since an open computation began."""
        ...


class ServerJudge:
    """Judgements of a server. Which form of request it answers is seen at the first judgement.

    Args:
        model: The server's name of the model.
        token_limit_field: The field of a chat request that bounds the answer.
        cache: Where judgements are kept; None keeps none.
    """

    def __init__(self, connection: Connection, model: str, token_limit_field: str, cache: ByteCache | None) -> None:
        self._connection = connection
        self._model = model
        self._token_limit_field = token_limit_field
        self._cache = cache
        self._form: tuple[Form, int] | None = None
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._numbers = itertools.count()

    def log_odds(
        self,
        prompts: Sequence[Sequence[ChatMessage]],
        keys: Sequence[str],
        spellings: tuple[Sequence[str], Sequence[str]],
        salt: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Return log p(yes) - log p(no) as the beginning of the answer to each prompt.

        A spelling that is not among the alternatives counts as the least likely of them, which bounds it from above.

        Args:
            prompts: The messages of each prompt.
            keys: Content key of each prompt's passage, "" without one. Keys that were seen before are sent first, in
                the order they were first seen: new passages then do not push them out of the server's cache. Of
                several servers, one gets all requests of a key.
            spellings: Those of yes and those of no.
            salt: Judgements are shared within a salt.
            check: Called while answers are awaited; what it raises ends the judgement.

        Raises:
            UnsupportedModelError: all answers begin with thoughts, or all sampled ones are empty.
        """
        server = self._connection.servers.urls[0]
        names = [content_hash("judgement-1", server, self._model, salt, repr((prompt, spellings)))
                 for prompt in prompts]  # fmt: skip
        odds = {name: self._stored(name) for name in names}
        missing = [index for index in self._first_seen_first(keys) if odds[names[index]] is None]
        if missing:
            with nullcontext() if self._cache is None else self._cache.begin():
                self.form(prompts[missing[0]], check)
                servers = [keys[index] or names[index] for index in missing]
                values = self._ask([prompts[index] for index in missing], servers, spellings, check)
                for index, value in zip(missing, values, strict=True):
                    odds[names[index]] = value
                    if self._cache is not None:
                        self._cache.put(names[index], {"log_odds": value}, _tags(keys[index], salt))
        return [odds[name] or 0.0 for name in names]

    def form(self, prompt: Sequence[ChatMessage], check: Callable[[], None] = lambda: None) -> Form:
        """Return how the server says how likely an answer is; ``prompt`` is sent until that is known."""
        self._form = self._form or self._detect(prompt, check)
        return self._form[0]

    def _stored(self, name: str) -> float | None:
        stored = None if self._cache is None else self._cache.get(name)
        value = None if stored is None else stored.get("log_odds")
        return value if isinstance(value, float) and math.isfinite(value) else None

    def _first_seen_first(self, keys: Sequence[str]) -> list[int]:
        order = sorted(range(len(keys)), key=lambda index: (self._seen.get(keys[index], math.inf), keys[index]))
        for index in order:
            self._seen.setdefault(keys[index], next(self._numbers))
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return order

    def _detect(self, prompt: Sequence[ChatMessage], check: Callable[[], None]) -> tuple[Form, int]:
        """Return the first form that the server answers with log-probabilities, and how many alternatives it gives."""
        for form in (Form.CHAT, Form.COMPLETIONS):
            for top in TOP:
                try:
                    (answer,) = self._send(form, [self._body(form, prompt, top)], 1, check)
                except UpstreamError as error:
                    if error.status not in _REJECTED | {403}:  # OpenAI's reasoning models forbid log-probabilities
                        raise
                    continue
                if _alternatives(form, answer):
                    return form, top
                break  # the server ignored the field
        _log.warning("%s gives no log-probabilities: passages are judged by sampled answers", self._connection.url)
        return Form.SAMPLES, 0

    def _ask(
        self,
        prompts: Sequence[Sequence[ChatMessage]],
        keys: Sequence[str],
        spellings: tuple[Sequence[str], Sequence[str]],
        check: Callable[[], None],
    ) -> list[float]:
        form, top = self._form or (Form.SAMPLES, 0)
        if form is not Form.SAMPLES:
            answers = self._send(form, [self._body(form, prompt, top) for prompt in prompts], 1, check, keys)
            listed = [_alternatives(form, answer) for answer in answers]
            if not any(text in each for each in listed for text in itertools.chain(*spellings)):
                self._check_said([max(each, key=each.__getitem__, default="") for each in listed], is_sampled=False)
            return [_odds(each, spellings) for each in listed]
        bodies = [
            {**self._body(Form.CHAT, prompt, None), self._token_limit_field: _SAMPLE_TOKENS, "temperature": 1.0,
             "seed": seed}
            for prompt in prompts
            for seed in range(SAMPLES)
        ]  # fmt: skip
        repeated = [key for key in keys for _ in range(SAMPLES)]
        texts = [_text(answer) for answer in self._send(Form.CHAT, bodies, _SAMPLE_TOKENS, check, repeated)]
        self._check_said(texts, is_sampled=True)
        return [_majority(texts[at : at + SAMPLES], spellings) for at in range(0, len(texts), SAMPLES)]

    def _check_said(self, beginnings: Sequence[str], *, is_sampled: bool) -> None:
        """Raise if a model that thinks first says nothing of any passage: all would have the same score."""
        said = [text.strip() for text in beginnings]
        if all(text.startswith("<think") or (is_sampled and not text) for text in said):
            raise UnsupportedModelError(_NO_WORDS.format(self._model, len(said)))

    def _send(
        self,
        form: Form,
        bodies: Sequence[Event],
        max_tokens: int,
        check: Callable[[], None],
        keys: Sequence[str] | None = None,
    ) -> Sequence[Event]:
        route = _COMPLETIONS if form is Form.COMPLETIONS else _CHAT
        answers = self._connection.post_all(route, bodies, max_tokens, check, keys)
        for answer in answers:
            if answer.get("error"):
                raise UpstreamError(
                    f"{self._connection.url} failed while it judged a passage: {error_message(answer)}"
                )
        spend(sum_usage([read_usage(answer.get("usage")) for answer in answers]))
        return answers

    def _body(self, form: Form, prompt: Sequence[ChatMessage], top: int | None) -> dict[str, Any]:
        shared: dict[str, Any] = {"model": self._model, "temperature": 0.0, "stream": False}
        if form is Form.COMPLETIONS:
            return {**shared, "prompt": _as_text(prompt), "max_tokens": 1, "logprobs": top}
        body = {**shared, "messages": list(prompt), self._token_limit_field: 1}
        return body if top is None else {**body, "logprobs": True, "top_logprobs": top}

    def likelihood(
        self, prompts: Sequence[Sequence[ChatMessage]], length: int, keys: Sequence[str] | None = None
    ) -> list[float]:
        """Return the mean log-probability of the end of each prompt, by completions that echo their prompt.

        vLLM may return wrong values for tokens that it took from its prefix cache: an end that begins in cached tokens
        is an error, not a number.

        Args:
            length: Characters of the end.
            keys: As for ``log_odds``.

        Raises:
            UnsupportedModelError: the server gives no log-probabilities of prompts.
        """
        bodies = [{**self._body(Form.COMPLETIONS, prompt, 1), "echo": True} for prompt in prompts]
        sizes = [len(body["prompt"]) for body in bodies]
        try:
            answers = self._send(Form.COMPLETIONS, bodies, sum(sizes), lambda: None, keys)
        except UpstreamError as error:
            if error.status not in _REJECTED:
                raise
            raise UnsupportedModelError(_NO_PROMPT_SCORES) from error
        return [_mean_log_prob(answer, size - length, size) for answer, size in zip(answers, sizes, strict=True)]

    def probe(self) -> ServerFacts:
        """Return what the server gives, from about ten requests, four of them of up to 2,000 tokens.

        Raises:
            UpstreamError: the server cannot be reached, or refuses a plain request.
        """
        window = self._context_window()
        passage = [
            self._probe(_PASSAGE_SENTENCES, question) for question in ("Did the harbour freeze", "Did ships wait")
        ]
        # Of a window the prompt may take half; a sentence has some 18 tokens.
        longest = min(_PROBED_SENTENCES[-1], (window or 2**20) // 40)
        sizes = sorted({min(size, longest) for size in _PROBED_SENTENCES})
        self._probe(longest, "Did the ice break")
        seen = [self._probe(size, "Was it in 1901").cached_tokens for size in sizes]
        cached = seen[-1]
        block = math.gcd(*(count for count in seen if count > 0))
        try:
            self.likelihood([[{"role": "user", "content": "The harbour froze in 1901."}]], len("froze in 1901."))
            prompt_log_probs = True
        except UnsupportedModelError:
            prompt_log_probs = False
        return ServerFacts(
            self.form([_probe_message(1, "Did the harbour freeze")]),
            prompt_log_probs,
            window,
            None if cached < 0 else cached,
            None if passage[1].cached_tokens < 0 else passage[1].cached_tokens,
            passage[1].prompt_tokens or None,
            block or None,
        )

    def _probe(self, sentences: int, question: str) -> Usage:
        """Return the token counts of a question about a passage; -1 cached tokens if the server does not say."""
        message = _probe_message(sentences, question)
        (answer,) = self._send(Form.CHAT, [self._body(Form.CHAT, [message], None)], 1, lambda: None)
        return read_usage(answer.get("usage"), Usage(0, 0, -1))

    def _context_window(self) -> int | None:
        try:
            listed = self._connection.get("/models").get("data")
        except UpstreamError:
            return None
        entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
        own = [entry for entry in entries if entry.get("id") == self._model] or entries[:1]
        for entry in own:
            meta = entry.get("meta")
            for fields in (entry, meta if isinstance(meta, Mapping) else {}):
                for name in _LIMITS:
                    if type(fields.get(name)) is int:
                        return int(fields[name])
        return None


def _probe_message(sentences: int, question: str) -> ChatMessage:
    return {
        "role": "user",
        "content": f"{_SENTENCE * sentences}\n\n{question}? Reply with Yes or No.\nReply:",
    }


_NO_WORDS = (
    "{} cannot judge passages: all beginnings of its {} answers are empty or thoughts, as those of models that think "
    "first; turn its thinking off on the server, or use the reranker embedding or cross_encoder"
)
_NO_PROMPT_SCORES = (
    "the server gives no log-probabilities of prompts (completions with echo and logprobs), which likelihood needs; "
    "use the reranker yes_no"
)


def _tags(key: str, salt: str) -> tuple[str, ...]:
    """Return the tags by which a removed document drops its judgements."""
    return (key, *tenant_tags(salt, (key,))) if key else ()


def read_usage(usage: object, otherwise: Usage = _NO_USAGE) -> Usage:
    """Return the token counts of an answer's ``usage``; those of ``otherwise`` that the server did not send."""
    counted = usage if isinstance(usage, Mapping) else {}
    details = counted.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    counts = (counted.get("prompt_tokens"), counted.get("completion_tokens"), cached)
    defaults = (otherwise.prompt_tokens, otherwise.completion_tokens, otherwise.cached_tokens)
    pairs = zip(counts, defaults, strict=True)
    return Usage(*(count if type(count) is int and count >= 0 else default for count, default in pairs))


def _choice(answer: Event) -> Mapping[str, Any]:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, Mapping) else {}


def _text(answer: Event) -> str:
    message = _choice(answer).get("message")
    content = joined_texts(message.get("content")) if isinstance(message, Mapping) else None
    return content if isinstance(content, str) else ""


def _alternatives(form: Form, answer: Event) -> dict[str, float]:
    """Return the log-probabilities of the likeliest first tokens by their text; none if the server gave none."""
    scored = _choice(answer).get("logprobs")
    if not isinstance(scored, Mapping):
        return {}
    key = "top_logprobs" if form is Form.COMPLETIONS else "content"
    tokens = scored.get(key)
    first = tokens[0] if isinstance(tokens, list) and tokens else None
    if not isinstance(first, Mapping):
        return {}
    if form is Form.COMPLETIONS:
        pairs = list(first.items())
    else:
        listed = first.get("top_logprobs")
        entries = listed if isinstance(listed, list) else []
        pairs = [(entry.get("token"), entry.get("logprob")) for entry in entries if isinstance(entry, Mapping)]
    found: dict[str, float] = {}
    for token, value in pairs:
        if isinstance(token, str) and isinstance(value, int | float) and not math.isnan(value):
            text = token.translate(_SPACES)
            found[text] = max(found.get(text, MIN_LOGPROB), float(value))  # minus infinity less itself is no number
    return found


def _odds(alternatives: Mapping[str, float], spellings: tuple[Sequence[str], Sequence[str]]) -> float:
    """Return the log-odds of two sets of spellings; 0 if none of them is among the alternatives."""
    if not alternatives:
        raise UpstreamError("the server gave log-probabilities before and gives none for this passage; try again")
    least = min(alternatives.values())
    listed = [[alternatives[text] for text in dict.fromkeys(each) if text in alternatives] for each in spellings]
    yes, no = (max(_log_sum(values), least) for values in listed)
    return yes - no


def _log_sum(values: Sequence[float]) -> float:
    largest = max(values, default=-math.inf)
    if largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))


def _majority(texts: Sequence[str], spellings: tuple[Sequence[str], Sequence[str]]) -> float:
    """Return the log-odds of the answers that begin with yes and with no, half an answer added to each."""
    words = [word[0].strip(".,:;!*\"'").casefold() for text in texts if (word := text.split())]
    yes, no = (sum(word in {text.strip().casefold() for text in each} for word in words) for each in spellings)
    return math.log((yes + 0.5) / (no + 0.5))


def _as_text(prompt: Sequence[ChatMessage]) -> str:
    """Return messages as the text that a completion continues."""
    return "\n\n".join(message["content"] for message in prompt)


def _mean_log_prob(answer: Event, start: int, stop: int) -> float:
    scored = _choice(answer).get("logprobs")
    fields = scored if isinstance(scored, Mapping) else {}
    values, offsets = fields.get("token_logprobs"), fields.get("text_offset")
    if not isinstance(values, list) or not isinstance(offsets, list) or len(values) != len(offsets) or not values:
        raise UnsupportedModelError(_NO_PROMPT_SCORES)
    ends = [*offsets[1:], offsets[-1] + 1]
    # A token counts where its text begins before the end of the stretch and ends behind its start.
    within = [i for i, (a, b) in enumerate(zip(offsets, ends, strict=True)) if a < stop and b > start]
    if not within or any(type(values[i]) is not float for i in within) or offsets[-1] < stop - 1:
        raise UnsupportedModelError(_NO_PROMPT_SCORES)
    cached = read_usage(answer.get("usage")).cached_tokens
    if cached and within[0] <= cached:
        raise UpstreamError(
            "the server took tokens of the question from its prefix cache, whose log-probabilities may be wrong "
            "(vllm#42019); use the reranker yes_no"
        )
    return math.fsum(max(values[i], MIN_LOGPROB) for i in within) / len(within)
