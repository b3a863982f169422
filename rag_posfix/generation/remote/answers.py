"""Reading answers of OpenAI's chat completions, as OpenAI's own client reads them, from servers of any kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rag_posfix.contracts.request import FinishReason
from rag_posfix.errors import NoAnswerError, UpstreamError
from rag_posfix.generation.remote.connection import Event
from rag_posfix.generation.remote.failures import error_message
from rag_posfix.text import REPLACEMENT, clean_text

_log = logging.getLogger(__name__)

_REASONS = {
    "stop": "stop eos eos_token end_turn stop_sequence complete completed done end finished tool_calls function_call",
    "length": "length max_tokens max_output_tokens max_completion_tokens max_length model_length model_max_length "
    "context_length context_length_exceeded model_context_window_exceeded",
    "filter": "content_filter content_filtered sensitive safety recitation blocklist prohibited_content spii refusal "
    "guardrail_intervened error_toxic",
    "interruption": "abort aborted cancel canceled cancelled error error_limit failed incomplete interrupted "
    "insufficient_system_resource malformed_function_call network_error repetition_truncation server_error "
    "time_limit timeout user_cancelled",
}
_KINDS = {reason: kind for kind, reasons in _REASONS.items() for reason in reasons.split()}
"""What a ``finish_reason`` means, of OpenAI, vLLM, SGLang, Mistral, DeepSeek, Zhipu, Gemini, Cohere and Anthropic."""


@dataclass(frozen=True, slots=True)
class End:
    """How an answer ended. A reason that is not known counts as ``stop``, and such an answer is not cached."""

    reason: FinishReason
    is_known: bool = True


def unreadable(url: str, what: str) -> UpstreamError:
    """Return the error for an answer of another form."""
    return UpstreamError(f"{url} sent {what}; is it an OpenAI-compatible server?")


def first_choice(event: Event, url: str, *, is_part: bool = False) -> Event | None:
    """Return the first choice of an object; None if it has none, as the last one of a stream, with the usage.

    Args:
        is_part: It is an object of a stream; some servers send usage there without ``choices``, or with null.
    """
    if event.get("error"):
        reason = error_message(event)
        raise UpstreamError(f"{url} failed while it generated the answer{f': {reason}' if reason else ''}")
    choices = event.get("choices")
    if choices is None and is_part and "usage" in event:
        return None
    if not isinstance(choices, list) or (choices and not isinstance(choices[0], dict)):
        raise unreadable(url, "an object without choices")
    return choices[0] if choices else None


def end_of(choice: Event, url: str) -> End | None:
    """Return how the answer of a choice ended, None if it has not ended: servers without null send "".

    Raises:
        UpstreamError: the server broke the answer off, or its content filter did.
    """
    said = choice.get("finish_reason")
    if said is None or said == "":
        return None
    kind = _KINDS.get(str(said).lower().replace("-", "_"))
    if kind == "filter":
        raise UpstreamError(f"{url} withheld the answer: its content filter stopped it (finish_reason {said!r:.60})")
    if kind == "interruption":
        raise UpstreamError(
            f"{url} gave up in the middle of the answer (finish_reason {said!r:.60}); try again, or see its log"
        )
    if kind is not None:
        return End("length" if kind == "length" else "stop")
    _log.warning(
        "the server at %s ended an answer with finish_reason %.60r, which is not known: not cached", url, said
    )
    return End("stop", is_known=False)


def content_of(message: object, url: str) -> str | None:
    """Return the content of a message or of a part of one, as sent; None for no content.

    Content may be a list of parts: texts are joined, thoughts are withheld.
    """
    fields = message if isinstance(message, Mapping) else {}
    if fields.get("tool_calls") or fields.get("function_call"):
        raise NoAnswerError("the remote model called a tool instead of answering; turn off its tools")
    content = fields.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content if part.get("type") in ("text", "output_text")]
        content = "".join(text for text in texts if isinstance(text, str))
    if content is not None and not isinstance(content, str):
        raise unreadable(url, "a message whose content is no text")
    return content


def split_sound(content: str) -> tuple[str, str]:
    """Return the text without the half of a character at its end, and that half: the next part may complete it.

    A character beyond U+FFFF may come as two surrogates in two parts; a token may end within a character.
    """
    joined = content.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    end = len(joined)
    while end and (joined[end - 1] == REPLACEMENT or "\ud800" <= joined[end - 1] < "\udc00"):
        end -= 1
    return clean_text(joined[:end]), joined[end:]


def withholds(message: object) -> bool:
    """Return whether a message, or a part of one, holds a refusal or reasoning beside its content."""
    fields: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
    return bool(isinstance(fields.get("content"), list) and fields["content"]) or any(
        fields.get(name) for name in ("refusal", "reasoning_content", "reasoning")
    )


def no_text(message: object) -> NoAnswerError:
    """Return the error for an answer without content: refused, or all tokens went into reasoning."""
    if isinstance(message, Mapping) and message.get("refusal"):
        return NoAnswerError("the remote model refused to answer; ask differently")
    return NoAnswerError("the remote model ended its answer without any content; raise max_tokens, or ask differently")
