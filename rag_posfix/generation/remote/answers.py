"""Reading answers of OpenAI's chat completions, as OpenAI's own client reads them, from servers of any kind."""

from __future__ import annotations

import logging
import re
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
    "stop": "stop eos eos_token end_turn stop_sequence stop_token complete completed done end finished tool_call "
    "tool_calls function_call",
    "length": "length max_tokens token_limit",
    "filter": "content_filter sensitive safety recitation blocklist prohibited_content spii refusal error_toxic",
    "interruption": "incomplete",
}
_KINDS = {reason: kind for kind, reasons in _REASONS.items() for reason in reasons.split()}
"""What a ``finish_reason`` means, of OpenAI, vLLM, SGLang, Mistral, DeepSeek, Zhipu, Gemini, Cohere and Anthropic."""
_WORDS = {
    "filter": "filter|safety|guardrail|block|prohibit|moderat",
    "interruption": "error|abort|cancel|fail|interrupt|timeout|timed_out|time_limit|insufficient|repetition|malformed"
    "|preempt|overload|disconnect|not_finished|unfinished|killed|exception",
    "length": "length|token_limit|max(imum)?_.*token|max_len|context_(window|size|limit)",
    "stop": "^(stop|eos|end)_",
}
"""Words in further reasons of these servers, and of others that name a reason in the same way."""
_NO_REASON = ("", "null", "none")


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
        is_part: It is an object of a stream; some servers send usage and signs of life there without ``choices``, or
            with null.
    """
    choices = event.get("choices")
    says_more = is_part and not choices  # an error may have a form of its own
    reason = error_message(event) if says_more or event.get("error") else ""
    if event.get("error") or reason or (says_more and "error" in (event.get("object"), event.get("type"))):
        raise UpstreamError(f"{url} failed while it generated the answer{f': {reason}' if reason else ''}")
    if choices is None and is_part:
        return None
    if not isinstance(choices, list) or (choices and not isinstance(choices[0], dict)):
        raise unreadable(url, "an object without choices")
    if choices and choices[0].get("error"):
        return first_choice({"error": choices[0]["error"]}, url)
    return choices[0] if choices else None


def end_of(choice: Event, url: str) -> End | None:
    """Return how the answer of a choice ended, None if it has not ended: servers without null send "" or "null".

    Raises:
        UpstreamError: the server broke the answer off, or its content filter did.
    """
    said = choice.get("finish_reason")
    if isinstance(said, Mapping):  # SGLang's own form
        said = said.get("type")
    name = re.sub(r"[^a-z0-9]+", "_", str(said or "").lower()).removeprefix("finish_reason_")
    if name in _NO_REASON:
        return None
    kind = _KINDS.get(name) or next((kind for kind, words in _WORDS.items() if re.search(words, name)), None)
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
    content = joined_texts(fields.get("content"))
    if content is not None and not isinstance(content, str):
        raise unreadable(url, "a message whose content is no text")
    return content


def joined_texts(content: Any) -> Any:
    """Return a content of parts as the text of those that hold text; another content as it is."""
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list) or not all(isinstance(part, str | Mapping) for part in parts):
        return content
    return "".join(map(_text_of, parts))


def _text_of(part: str | Mapping[str, Any]) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if part.get("type") in (None, "text", "output_text") else None
    if isinstance(text, Mapping):  # OpenAI's assistants
        text = text.get("value")
    return text if isinstance(text, str) else ""


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
    return bool(isinstance(fields.get("content"), list | Mapping) and fields["content"]) or any(
        fields.get(name) for name in ("refusal", "reasoning_content", "reasoning")
    )


def no_text(message: object) -> NoAnswerError:
    """Return the error for an answer without content: refused, or all tokens went into reasoning."""
    if isinstance(message, Mapping) and message.get("refusal"):
        return NoAnswerError("the remote model refused to answer; ask differently")
    return NoAnswerError("the remote model ended its answer without any content; raise max_tokens, or ask differently")
