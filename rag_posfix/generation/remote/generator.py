"""A generator whose model is on a server with OpenAI's chat completions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Generated
from contextlib import closing
from typing import Any, Literal

from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.contracts.request import (
    Chunk,
    FinishReason,
    Generation,
    GenerationRequest,
    MitigationChoice,
    MitigationInfo,
    Sampling,
    Usage,
)
from rag_posfix.errors import ConfigError, GenerationError, PromptTooLongError, UnsupportedModelError, UpstreamError
from rag_posfix.generation.remote.address import RemoteModel, parse_remote
from rag_posfix.generation.remote.connection import Connection, Event, ServerLimits, error_message
from rag_posfix.mitigations import create
from rag_posfix.plan.layout import Layout
from rag_posfix.text import clean_text, content_hash

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
TokenLimitField = Literal["max_tokens", "max_completion_tokens"]

Events = Generated[Event, None, None]
"""The JSON objects of one answer."""


class RemoteGenerator:
    """Answers with a model of an OpenAI-compatible server. Implements ``contracts.generator.Generator``.

    The server gets the messages of the prompt and applies its own chat template. What needs the weights in this
    process cannot run: every mitigation but ``none``, and rerankers that read passages with the model. Token counts of
    prompts are estimates (``PieceEncoder``); ``usage`` of an answer is the server's where it sends one.

    Args:
        token_limit_field: The field of the request that bounds the answer. OpenAI's newer models take
            ``max_completion_tokens`` alone, other servers know ``max_tokens``.

    Attributes:
        fingerprint: Identity for cache keys: URL and name. What the server changes under that name is not seen.
        context_window: Token limit of prompt and answer together.
        encoder: Exact text, estimated tokens.
    """

    def __init__(
        self,
        model: RemoteModel,
        connection: Connection,
        *,
        context_window: int = DEFAULT_CONTEXT_WINDOW,
        token_limit_field: TokenLimitField = "max_tokens",
    ) -> None:
        self.model_id = model.name
        self.fingerprint = content_hash("remote", model.url, model.name)
        self.context_window = context_window
        self.encoder = PieceEncoder()
        self._connection = connection
        self._token_limit_field = token_limit_field

    def close(self) -> None:
        """Close the connections; later requests raise ``GenerationError``."""
        self._connection.close()

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Return what caching needs to know of a mitigation; errors as those of ``check_remote_mitigation``."""
        return check_remote_mitigation(self.model_id, choice)

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer, from a request without streaming. Errors as those of ``stream``."""
        started = time.perf_counter()
        (answer,) = self._post(request, stream=False)
        choice = self._choice(answer)
        finish = None if choice is None else self._finish(choice)
        if choice is None or finish is None:
            raise self._unreadable("an answer without a choice or its finish_reason")
        timings = {"decode": time.perf_counter() - started}
        return self._generation(request, self._text(choice.get("message")), finish, answer.get("usage"), timings)

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces, as the server sends them; the last chunk has the complete ``generation``.

        Closing the iterator closes the connection, which stops servers that notice. ``timings["prefill"]`` is the time
        to the first piece.

        Raises:
            UnsupportedModelError: the mitigation is not ``none``.
            PromptTooLongError: prompt and answer exceed the context window.
            GenerationError: the layout has no messages.
            UpstreamError: the server failed, or sent what cannot be read.
            UpstreamTimeoutError: the server was silent for too long.
            OverloadedError: the server has no capacity, also after retries.
        """
        return self._chunks(request, self._post(request, stream=True))

    def _chunks(self, request: GenerationRequest, events: Events) -> Iterator[Chunk]:
        started = time.perf_counter()
        first: float | None = None
        texts: list[str] = []
        finish: FinishReason | None = None
        usage: object = None
        with closing(events):
            for event in events:
                usage = event.get("usage") or usage
                choice = self._choice(event)
                if choice is None:
                    continue
                text = self._text(choice.get("delta"))
                finish = self._finish(choice) or finish
                if text:
                    first = first or time.perf_counter()
                    texts.append(text)
                    yield Chunk(text)
        if finish is None:
            raise UpstreamError(f"{self._connection.url} ended its stream in the middle of the answer; try again")
        ended = time.perf_counter()
        timings = {"prefill": (first or ended) - started, "decode": ended - (first or ended)}
        yield Chunk("", self._generation(request, "".join(texts), finish, usage, timings))

    def _post(self, request: GenerationRequest, *, stream: bool) -> Events:
        """Check a request, and return the objects of its answer; nothing is sent yet."""
        check_remote_mitigation(self.model_id, request.mitigation)
        needed = len(request.layout.token_ids) + request.sampling.max_tokens
        if needed > self.context_window:
            raise PromptTooLongError(
                f"the prompt takes about {len(request.layout.token_ids)} tokens and "
                f"max_tokens={request.sampling.max_tokens} more, but the context window is {self.context_window}; use "
                "fewer or shorter passages, or set RAG_POSFIX_REMOTE_CONTEXT_WINDOW to the server's limit"
            )
        body = {
            "model": self.model_id,
            "messages": messages_of(request.layout, self.encoder),
            **_sampling_fields(request.sampling, self._token_limit_field),
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        return self._connection.post("/chat/completions", body, request.sampling.max_tokens)

    def _choice(self, event: Event) -> Event | None:
        """Return the first choice of an object; None if it has none, as the last one of a stream, with the usage."""
        if event.get("error"):
            reason = error_message(event)
            said = f": {reason}" if reason else ""
            raise UpstreamError(f"{self._connection.url} failed while it generated the answer{said}")
        choices = event.get("choices")
        if not isinstance(choices, list) or (choices and not isinstance(choices[0], dict)):
            raise self._unreadable("an object without choices")
        return choices[0] if choices else None

    def _finish(self, choice: Event) -> FinishReason | None:
        """Return why the answer ended, None if it has not ended. Reasons of single servers count as ``stop``."""
        reason = choice.get("finish_reason")
        if reason == "content_filter":
            raise UpstreamError(f"{self._connection.url} withheld the answer: its content filter stopped it")
        if reason is None:
            return None
        return "length" if reason == "length" else "stop"

    def _text(self, message: object) -> str:
        """Return the content of a message or of a part of one; no content is no text."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if content is not None and not isinstance(content, str):
            raise self._unreadable("a message whose content is no text")
        return clean_text(content or "")

    def _unreadable(self, what: str) -> UpstreamError:
        return UpstreamError(f"{self._connection.url} sent {what}; is it an OpenAI-compatible server?")

    def _generation(
        self,
        request: GenerationRequest,
        text: str,
        finish: FinishReason,
        usage: object,
        timings: Mapping[str, float],
    ) -> Generation:
        counted = usage if isinstance(usage, Mapping) else {}
        details = counted.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return Generation(
            text=text,
            token_ids=(),  # the server keeps them
            finish_reason=finish,
            usage=Usage(
                prompt_tokens=_count(counted.get("prompt_tokens"), len(request.layout.token_ids)),
                completion_tokens=_count(counted.get("completion_tokens"), len(self.encoder.encode_text(text))),
                cached_tokens=_count(cached, 0),
            ),
            timings=timings,
        )


def check_remote_mitigation(model_id: str, choice: MitigationChoice) -> MitigationInfo:
    """Return what caching needs to know of a mitigation of a remote generator; errors as those of ``create``.

    Raises:
        UnsupportedModelError: it is not ``none``: it needs the weights in this process.
    """
    method = create(choice.name, choice.parameters)
    if method.name != "none":
        raise UnsupportedModelError(
            f"{model_id} is a remote generator, and mitigation={choice.name!r} needs the weights in this process; "
            "set mitigation='none' (--mitigation none, RAG_POSFIX_MITIGATION=none), for example with order='reverse': "
            "passages are then ordered by the scores of a reranker (embedding, cross_encoder, listwise), so that the "
            "order they are given in does not matter"
        )
    return MitigationInfo(method.name, method.fingerprint(), method.is_order_invariant)


def messages_of(layout: Layout, encoder: TokenEncoder) -> list[ChatMessage]:
    """Return the messages of a prompt, decoded by the encoder that made it; GenerationError if it has no turns."""
    if not layout.turns:
        raise GenerationError(
            "the layout has no turns, so its messages are not known; make it with Assembler or tokenize_prompt"
        )
    return [{"role": turn.role, "content": encoder.decode(layout.tokens(turn.content))} for turn in layout.turns]


def _sampling_fields(sampling: Sampling, token_limit_field: str) -> dict[str, Any]:
    """Return the fields of a request, without those at their neutral value: not all servers know them."""
    fields: dict[str, Any] = {token_limit_field: sampling.max_tokens, "temperature": sampling.temperature}
    if sampling.top_p < 1.0:
        fields["top_p"] = sampling.top_p
    if sampling.top_k:
        fields["top_k"] = sampling.top_k  # no field of OpenAI's; llama.cpp, vLLM and others know it
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    return fields


def _count(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def open_remote(
    model: str,
    *,
    api_key: str | None = None,
    context_window: int = DEFAULT_CONTEXT_WINDOW,
    limits: ServerLimits | None = None,
    token_limit_field: TokenLimitField = "max_tokens",
    check_cancelled: Callable[[], None] = lambda: None,
) -> RemoteGenerator:
    """Return a generator that asks an OpenAI-compatible server. Nothing is sent before the first answer.

    Args:
        model: ``openai:NAME@URL``.
        api_key: Sent as ``Authorization: Bearer`` to that server alone; None sends none.
        context_window: Token limit of prompt and answer together, on the server.
        token_limit_field: The field of the request that bounds the answer.
        check_cancelled: Called while an answer is awaited; what it raises ends the request.

    Raises:
        ConfigError: the model has another form, the key cannot be sent, or httpx2 is not installed.
    """
    address = parse_remote(model)
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise ConfigError("RAG_POSFIX_REMOTE_API_KEY must be printable ASCII without line breaks; check how it is set")
    connection = Connection(address.url, api_key, limits, check_cancelled)
    return RemoteGenerator(address, connection, context_window=context_window, token_limit_field=token_limit_field)
