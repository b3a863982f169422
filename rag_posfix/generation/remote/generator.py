"""A generator whose model is on a server with OpenAI's chat completions.

Methods on a server: those whose rows are plain prompts. Several rows vote on the answer.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Generated
from contextlib import closing
from dataclasses import replace
from math import inf
from typing import Any, Literal

import torch

from rag_posfix.contracts.generator import ChatMessage, Generator, TokenEncoder, sum_usage
from rag_posfix.contracts.request import (
    Chunk,
    FinishReason,
    Generation,
    GenerationRequest,
    MitigationChoice,
    MitigationInfo,
    Sampling,
    Usage,
    named_stop,
)
from rag_posfix.errors import ConfigError, GenerationError, PromptTooLongError, UnsupportedModelError, UpstreamError
from rag_posfix.generation.decode.answer_writer import StopMatcher
from rag_posfix.generation.remote.connection import (
    DONE,
    AnswerEnd,
    Connection,
    Event,
    RemoteModel,
    ServerLimits,
    content_of,
    end_of,
    first_choice,
    no_text,
    parse_remote,
    split_sound,
    unreadable_answer,
    withholds,
)
from rag_posfix.generation.remote.judge import ByteCache, Form, ServerFacts, ServerJudge, read_usage
from rag_posfix.mitigations import Mitigation, create
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowScores
from rag_posfix.text import clean_text, content_hash

_ON_SERVER = dict.fromkeys(Capability, "its weights are on a server")
SERVER_SHAPE = ModelShape(1, 1, 1, 1, 1, 1 << 31, frozenset(), _ON_SERVER)
"""What a method may know of a model on a server: nothing in it can be changed, and its sizes are not known."""

NEAREST = (
    "set mitigation='none' (--mitigation none, RAG_POSFIX_MITIGATION=none) with the reranker yes_no:top_n=5 and "
    "order='reverse': the model judges each passage in a request of its own and reads the best five in an order that "
    "follows from their scores, so that the order they are given in does not matter"
)
"""The arrangement that runs on every server."""


def _trial_layout(n_passages: int = 3) -> Layout:
    """Return a prompt of one token per segment, on which a method shows what its rows are."""
    spans = tuple(Span(index + 1, index + 2) for index in range(n_passages))
    suffix = Span(n_passages + 1, n_passages + 2)
    return Layout(
        token_ids=tuple(range(n_passages + 2)), prefix=Span(0, 1), passages=spans, texts=spans, suffix=suffix,
        question=suffix, keys=tuple(map(str, range(n_passages))),
        relevance=tuple(1 / (index + 1) for index in range(n_passages)),
    )  # fmt: skip


def remote_refusal(method: Mitigation) -> str | None:
    """Return why a method cannot run on a server, or None if it can. Nothing is sent.

    It can if its plan reads plain prompts: one, or several whose answers may vote (``Mitigation.supports_voting``).
    """
    reason = method.refusal(SERVER_SHAPE)
    if reason is not None:
        return reason
    plan = method.plan(_trial_layout(), SERVER_SHAPE)
    if not plan.reads_plain_prompts:
        return f"{method.name} changes how the model reads, and its weights are on a server"
    if len(plan.rows) > 1 and not method.supports_voting:
        return f"{method.name} pools the probabilities of {len(plan.rows)} prompts at every token, inside the engine"
    return None


def check_remote_mitigation(model_id: str, choice: MitigationChoice) -> MitigationInfo:
    """Return what caching needs to know of a mitigation of a remote generator; errors as those of ``create``.

    Raises:
        UnsupportedModelError: it needs the weights in this process; the message names an arrangement that runs.
    """
    method = create(choice.name, choice.parameters)
    reason = remote_refusal(method)
    if reason is not None:
        raise UnsupportedModelError(
            f"{model_id} is a remote generator, and mitigation={choice.name!r} needs the weights in this process: "
            f"{reason}; {NEAREST}"
        )
    return MitigationInfo(method.name, method.fingerprint(), method.is_order_invariant)


def plain_prompts(layout: Layout, choice: MitigationChoice) -> tuple[list[Layout], list[float]]:
    """Return the prompts of a checked mitigation's rows, and the weight of each row before any answer is known."""
    plan = create(choice.name, choice.parameters).plan(layout, SERVER_SHAPE)
    layout = plan.layout or layout
    prompts = [layout if row.passages is None else layout.select(row.passages) for row in plan.rows]
    return prompts, _prior_weights(plan)


def _prior_weights(plan: Plan) -> list[float]:
    rows = len(plan.rows)
    if plan.combine is None:
        return [1.0] * rows
    none = torch.zeros(rows)
    _, weights = plan.combine(RowScores(torch.zeros(rows, 1), none, none, none))
    return [float(weight) for weight in weights]


def most_agreed(answers: Sequence[str], weights: Sequence[float]) -> int:
    """Return the index of the answer that agrees most with all; of equal ones the first.

    With short answers this is the majority, with long ones the answer that has most words in common with the others:
    universal self-consistency, Chen et al. (2023), https://arxiv.org/abs/2311.17311, with word overlap as the judge.

    Formula: argmax_k sum_j weight_j F1(words of answer k, words of answer j).
    """
    words = [Counter(re.findall(r"\w+", answer.casefold())) for answer in answers]
    support = [
        math.fsum(weight * _overlap(own, other) for weight, other in zip(weights, words, strict=True)) for own in words
    ]
    return max(range(len(answers)), key=lambda index: (round(support[index], 9), -index))


def _overlap(own: Counter[str], other: Counter[str]) -> float:
    total = own.total() + other.total()
    return 1.0 if own == other else 2 * (own & other).total() / total


_PIECE = re.compile(r" ?[A-Za-z]{1,6}|[0-9]| {1,4}|\n{1,2}|[\s\S]")
_MARK = b"\x01"  # before the bytes of a piece, so that leading zero bytes survive


class PieceEncoder(TokenEncoder):
    """Encodes text into pieces that hold their own characters. Decoding gives exactly the cleaned text back.

    A piece is up to six ASCII letters with the space before them, a digit, up to four spaces, up to two line breaks,
    or one other character. English prose has about as many pieces as a vocabulary of 32,000 to 128,000 entries has
    tokens for it; the number is an estimate. There are no control tokens: text of a document cannot forge a
    turn, because messages are sent as messages. Each part is encoded alone, so that decoding it gives the message.
    """

    def encode_text(self, text: str) -> list[int]:
        return self.encode_template(clean_text(text))

    def encode_template(self, text: str) -> list[int]:
        pieces = _PIECE.findall(text)
        return [int.from_bytes(_MARK + piece.encode("utf-8", "replace"), "big") for piece in pieces]

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = (number.to_bytes((number.bit_length() + 7) // 8, "big")[1:] for number in token_ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[ChatMessage], *, open_answer: bool = True) -> str:
        """Return the messages as ChatML, whose marks represent the server's own."""
        turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        return "".join(turns) + ("<|im_start|>assistant\n" if open_answer else "")


DEFAULT_CONTEXT_WINDOW = 8192
_ROUTE = "/chat/completions"
TokenLimitField = Literal["max_tokens", "max_completion_tokens"]

Events = Generated[Event, None, None]
"""The JSON objects of one answer."""


class RemoteGenerator(Generator):
    """Answers with a model of an OpenAI-compatible server.

    The server gets the messages of the prompt and applies its own chat template. Mitigations run whose rows are plain
    prompts; several rows are answered alone and vote. ``log_odds`` and ``question_likelihood`` serve rerankers.
    What needs the weights in this process is refused. Token counts of prompts are estimates (``PieceEncoder``);
    ``usage`` of an answer is the server's where it sends one.

    Args:
        judgements: Where judgements of passages are kept; None keeps none.
        token_limit_field: The field of the request that bounds the answer. OpenAI's newer models take
            ``max_completion_tokens`` alone, other servers know ``max_tokens``.

    Attributes:
        fingerprint: Identity for cache keys: first URL and name. What servers change under that name is not seen.
        context_window: Token limit of prompt and answer together.
        encoder: Exact text, estimated tokens.
    """

    capabilities = frozenset({"likelihood", "odds"})

    def __init__(
        self,
        model: RemoteModel,
        connection: Connection,
        *,
        context_window: int = DEFAULT_CONTEXT_WINDOW,
        token_limit_field: TokenLimitField = "max_tokens",
        judgements: ByteCache | None = None,
    ) -> None:
        self.model_id = model.name
        self.fingerprint = content_hash("remote", model.urls[0], model.name)
        self.context_window = context_window
        self.encoder = PieceEncoder()
        self._connection = connection
        self._token_limit_field = token_limit_field
        self._judge = ServerJudge(connection, model.name, token_limit_field, judgements)

    def close(self) -> None:
        """Close the connections; later requests raise ``GenerationError``."""
        self._connection.close()

    def probe(self) -> ServerFacts:
        """Return what the server gives, from about six short requests; errors as those of ``generate``."""
        return self._judge.probe()

    def gives_log_probs(self) -> bool:
        """Return whether the server gives log-probabilities of answers; asks it once, with up to four requests."""
        return (
            self._judge.form([{"role": "user", "content": "Is water wet? Answer with yes or no."}]) is not Form.SAMPLES
        )

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Return what caching needs to know of a mitigation; errors as those of ``check_remote_mitigation``."""
        return check_remote_mitigation(self.model_id, choice)

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer, from requests without streaming. Errors as those of ``stream``."""
        rows, weights = self._rows(request)
        return self._whole(rows[0]) if len(rows) == 1 else self._voted(rows, weights)

    def _whole(self, request: GenerationRequest) -> Generation:
        started = time.perf_counter()
        body = self._body(request, stream=False)
        (answer,) = self._connection.post(_ROUTE, body, request.sampling.max_tokens, _server_key(request))
        return self._read(request, answer, started)

    def _voted(self, rows: Sequence[GenerationRequest], weights: Sequence[float]) -> Generation:
        """Return the answer that agrees most with those of the other rows, which are sent together."""
        started = time.perf_counter()
        bodies = [self._body(row, stream=False) for row in rows]
        answers = self._connection.post_all(
            _ROUTE, bodies, rows[0].sampling.max_tokens, keys=[_server_key(row) for row in rows]
        )
        read = [self._read(row, answer, started) for row, answer in zip(rows, answers, strict=True)]
        chosen = read[most_agreed([generation.text for generation in read], weights)]
        return replace(chosen, usage=sum_usage([generation.usage for generation in read]))

    def _vote_chunks(self, rows: Sequence[GenerationRequest], weights: Sequence[float]) -> Iterator[Chunk]:
        voted = self._voted(rows, weights)
        yield Chunk(voted.text, voted)

    def log_odds(
        self,
        layout: Layout,
        yes: Sequence[str],
        no: Sequence[str],
        salt: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> tuple[float, ...]:
        """Return log p(yes) - log p(no) as the beginning of the answer after each passage alone, and without any.

        One short request per passage, all sent together. Where the server gives no log-probabilities, the share of yes
        among sampled answers takes their place.
        """
        rows = self._passages_alone(layout, bare=True)
        return tuple(self._judge.log_odds(rows, (*layout.keys, ""), (tuple(yes), tuple(no)), salt, check))

    def question_likelihood(self, layout: Layout, salt: str = "", *, bare: bool = False) -> tuple[float, ...]:
        """Return for each passage the mean log-probability of the question's tokens after that passage alone.

        By completions that echo their prompt, without chat template. ``salt`` is not used: nothing is kept.

        Raises:
            UnsupportedModelError: the server gives no log-probabilities of prompts.
        """
        question = len(self.encoder.decode(layout.tokens(layout.question)))
        keys = (*layout.keys, *[""] * bare)
        return tuple(self._judge.likelihood(self._passages_alone(layout, bare=bare), question, keys))

    def _passages_alone(self, layout: Layout, *, bare: bool) -> list[list[ChatMessage]]:
        selections = [(index,) for index in range(layout.n_passages)] + [()] * bare
        return [messages_of(layout.select(passages), self.encoder) for passages in selections]

    def _read(self, request: GenerationRequest, answer: Event, started: float) -> Generation:
        url = self._connection.url
        choice = first_choice(answer, url)
        if choice is None:
            raise unreadable_answer(url, "an answer without a choice")
        end = end_of(choice, url) or AnswerEnd("stop")  # it is complete: some servers name no reason
        timings = {"decode": time.perf_counter() - started}
        message = choice.get("message")
        content = content_of(message, url)
        if content is None or (not content and withholds(message)):
            raise no_text(message)
        text, _half = split_sound(content)  # max_tokens cut a character
        start = StopMatcher(request.cues).push(text)
        if start is not None:  # the server did not stop there
            text, end = text[:start], AnswerEnd("stop")
        self._check_json(text, end.reason, request)
        return self._generation(request, text, end, answer.get("usage"), timings, choice.get("stop_reason"))

    def check_json_schema(self, schema: str) -> None:
        """Do nothing: the server says whether it can follow a schema. An answer that is no JSON is an error."""

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces, as the server sends them; the last chunk has the complete ``generation``.

        Closing the iterator closes the connection, which stops servers that notice. ``timings["prefill"]`` is the time
        to the first piece. An answer that several prompts vote on is one piece.

        Raises:
            UnsupportedModelError: the mitigation needs the weights in this process.
            PromptTooLongError: prompt and answer exceed the context window.
            GenerationError: the layout has no messages.
            UpstreamError: the server failed, or sent what cannot be read.
            NoAnswerError: the model called a tool, refused, or sent no content.
            UpstreamTimeoutError: the server was silent for too long.
            OverloadedError: the server has no capacity, also after retries.
        """
        rows, weights = self._rows(request)
        if len(rows) > 1:
            return self._vote_chunks(rows, weights)
        body = self._body(rows[0], stream=True)
        events = self._connection.post(_ROUTE, body, request.sampling.max_tokens, _server_key(rows[0]))
        return self._chunks(rows[0], events)

    def _chunks(self, request: GenerationRequest, events: Events) -> Iterator[Chunk]:
        started, url = time.perf_counter(), self._connection.url
        first: float | None = None
        texts: list[str] = []
        half = ""  # the beginning of a character, which max_tokens may cut
        end: AnswerEnd | None = None
        choice: Event | None = None
        usage, stop_reason, withheld = None, None, None
        matcher, held_back, sent = StopMatcher(request.cues), "", 0
        with closing(events):
            for event in events:
                if event is DONE:
                    end = end or AnswerEnd("stop")
                    break
                usage = event.get("usage") or usage
                current = first_choice(event, url, is_part=True)
                if current is None:
                    continue
                choice = current
                delta, now = choice.get("delta"), end_of(choice, url)
                if delta is None and not any(texts) and choice.get("message") is not None:  # it did not stream
                    delta, now = choice["message"], now or AnswerEnd("stop")
                content = content_of(delta, url)
                withheld = delta if withholds(delta) else withheld
                end = now or end
                stop_reason = choice.get("stop_reason") or stop_reason
                if content is None:
                    continue
                text, half = split_sound(half + content)
                start, text = matcher.push(text), held_back + text
                certain = len(text) - matcher.undecided if start is None else start - sent
                held_back = text[certain:] if start is None else ""
                texts.append(text[:certain])
                sent += certain
                if texts[-1]:
                    first = first or time.perf_counter()
                    yield Chunk(texts[-1])
                if start is not None:  # the server did not stop there; closing the stream stops it
                    end, withheld = AnswerEnd("stop"), None
                    break
        if held_back:
            texts.append(held_back)
            yield Chunk(held_back)
        if end is None and choice is None:
            raise unreadable_answer(url, "a stream without choices")
        if end is None:
            raise UpstreamError(f"{url} ended its stream in the middle of the answer; try again")
        if not texts or (withheld is not None and not any(texts)):
            raise no_text(withheld)
        self._check_json("".join(texts), end.reason, request)
        stopped = time.perf_counter()
        timings = {"prefill": (first or stopped) - started, "decode": stopped - (first or stopped)}
        yield Chunk("", self._generation(request, "".join(texts), end, usage, timings, stop_reason))

    def _rows(self, request: GenerationRequest) -> tuple[list[GenerationRequest], list[float]]:
        """Check a request, and return a request for each prompt of its mitigation, with weights; nothing is sent."""
        check_remote_mitigation(self.model_id, request.mitigation)
        prompts, weights = plain_prompts(request.layout, request.mitigation)
        return [replace(request, layout=prompt) for prompt in prompts], weights

    def _body(self, request: GenerationRequest, *, stream: bool) -> dict[str, Any]:
        """Return the body of a request for one prompt, after a check of its length."""
        needed = len(request.layout.token_ids) + request.sampling.max_tokens
        if needed > self.context_window:
            raise PromptTooLongError(
                f"the prompt takes about {len(request.layout.token_ids)} tokens and "
                f"max_tokens={request.sampling.max_tokens} more, but the context window is {self.context_window}; use "
                "fewer or shorter passages, or set RAG_POSFIX_REMOTE_CONTEXT_WINDOW to the server's limit"
            )
        body: dict[str, Any] = {
            "model": self.model_id,
            "messages": messages_of(request.layout, self.encoder),
            **_sampling_fields(request.sampling, self._token_limit_field, request.cues),
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        return body

    def _check_json(self, text: str, finish: FinishReason, request: GenerationRequest) -> None:
        """Raise if the server took a schema and did not follow it; an answer that was cut is no whole JSON."""
        if request.sampling.json_schema is None or finish == "length":
            return
        try:
            json.loads(text)
        except ValueError as error:
            raise UpstreamError(
                f"{self._connection.url} answered with a text that is no JSON, although response_format asked for it; "
                "its model or version may not support schemas"
            ) from error

    def _generation(
        self,
        request: GenerationRequest,
        text: str,
        end: AnswerEnd,
        usage: object,
        timings: Mapping[str, float],
        stop_reason: object,
    ) -> Generation:
        """Return the whole answer; ``stop_reason`` is vLLM's field: the stop string that ended it."""
        estimate = Usage(len(request.layout.token_ids), len(self.encoder.encode_text(text)))
        return Generation(
            text=text,
            token_ids=(),  # the server keeps them
            finish_reason=end.reason,
            is_known_end=end.is_known,
            usage=read_usage(usage, estimate),
            timings=timings,
            stop_string=named_stop(stop_reason, request.sampling),
        )


def _server_key(request: GenerationRequest) -> str:
    """Return the key of the first passage, behind which prompts differ; of the whole prompt if it has no passage."""
    layout = request.layout
    return layout.keys[0] if layout.keys else content_hash(repr(layout.token_ids))


def messages_of(layout: Layout, encoder: TokenEncoder) -> list[ChatMessage]:
    """Return the messages of a prompt, decoded by the encoder that made it; GenerationError if it has no turns."""
    if not layout.turns:
        raise GenerationError(
            "the layout has no turns, so its messages are not known; make it with Assembler or tokenize_prompt"
        )
    return [{"role": turn.role, "content": encoder.decode(layout.tokens(turn.content))} for turn in layout.turns]


_MAX_STOPS = 4
"""Stop strings that OpenAI's API takes."""


def _sampling_fields(sampling: Sampling, token_limit_field: TokenLimitField, cues: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a request, without those at their neutral value: not all servers know them.

    Models that take ``max_completion_tokens`` refuse stop strings, so they get no cues; nor is there a fifth string.
    """
    stop = list(sampling.stop)
    if token_limit_field == "max_tokens":
        stop += cues[: max(0, _MAX_STOPS - len(stop))]
    fields: dict[str, Any] = {token_limit_field: sampling.max_tokens, "temperature": sampling.temperature}
    if sampling.top_p < 1.0:
        fields["top_p"] = sampling.top_p
    if sampling.top_k:
        fields["top_k"] = sampling.top_k  # no field of OpenAI's; llama.cpp, vLLM and others know it
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if stop:
        fields["stop"] = stop
    if sampling.json_schema is not None:
        schema = json.loads(sampling.json_schema)
        # OpenAI enforces a schema only as "strict", and takes only closed objects for it.
        strict = {"strict": True} if schema.get("additionalProperties") is False else {}
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **strict}}
        fields["response_format"] = {"type": "json_object"} if schema == {"type": "object"} else wanted
    return fields


def open_remote(
    model: str,
    *,
    api_key: str | None = None,
    context_window: int = DEFAULT_CONTEXT_WINDOW,
    limits: ServerLimits | None = None,
    token_limit_field: TokenLimitField = "max_tokens",
    check_cancelled: Callable[[], None] = lambda: None,
    remaining_seconds: Callable[[], float] = lambda: inf,
    judgements: ByteCache | None = None,
) -> RemoteGenerator:
    """Return a generator that asks an OpenAI-compatible server. Nothing is sent before the first answer.

    Args:
        model: ``openai:NAME@URL``; several servers of the model: ``openai:NAME@URL,URL``.
        api_key: Sent as ``Authorization: Bearer`` to that server alone; None sends none.
        context_window: Token limit of prompt and answer together, on the server.
        token_limit_field: The field of the request that bounds the answer.
        check_cancelled: Called while an answer is awaited; what it raises ends the request.
        remaining_seconds: Returns the seconds that the request of the running thread has left.
        judgements: Where judgements of passages are kept; None keeps none.

    Raises:
        ConfigError: the model has another form, the key cannot be sent, or httpx2 is not installed.
    """
    address = parse_remote(model)
    if api_key is not None and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", api_key):
        raise ConfigError(
            "RAG_POSFIX_REMOTE_API_KEY must be printable ASCII without line breaks or outer spaces; check what sets it"
        )
    connection = Connection(address.url, api_key, limits, check_cancelled, remaining_seconds)
    return RemoteGenerator(
        address, connection,
        context_window=context_window, token_limit_field=token_limit_field, judgements=judgements,
    )  # fmt: skip
