"""A Hugging Face fast tokenizer, as assembly and the engine need it: exact, thread-safe, and closed to injection.

The tokenizer is passed in; nothing here imports transformers or tokenizers.

Tools for chat templates that have none: as text of ordinary messages.
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.json_grammar import JsonGrammars
from rag_posfix.plan.layout import Span
from rag_posfix.text import clean_text

_INSTRUCTION = (
    'You may call these functions. To call one, answer with nothing but {"name": its name, "arguments": an object}.'
)


def chat_with_written_tools(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return the messages as a template without tools takes them.

    The tools are in the system message, a call is JSON in the assistant's message, and a result is a message of the
    user. Neighbours of one role are joined.
    """
    written: list[tuple[str, list[str]]] = []
    if tools:
        listed = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        written.append(("system", ["\n".join((_INSTRUCTION, *listed))]))
    for message in messages:
        role, contents = message["role"], [message["content"]]
        if "tool_calls" in message:
            contents = [text for text in contents if text]
            for call in json.loads(message["tool_calls"]):
                function = call["function"]
                contents.append(f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}')
        elif role == "tool":
            role, contents = "user", [f"{message['name']} returned: {message['content']}"]
        if written and written[-1][0] == role:
            written[-1][1].extend(contents)
        else:
            written.append((role, contents))
    return [{"role": role, "content": "\n\n".join(contents)} for role, contents in written]


_REPLACEMENT = "\ufffd"
_MARK = "\ue000"
_LOOKS_LIKE_MARK = re.compile(r"^[<>\[{|\u2581]|[<>\]}|]$")
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer(TokenEncoder):
    """A ``TokenEncoder`` over a Hugging Face fast tokenizer.

    Control tokens are the special tokens, and the added ones that the chat template writes or that look like a mark
    (``<think>``, ``[INST]``): models mark turns, thoughts and tool calls with tokens that are not special. Text never
    encodes to one of them. Other added tokens are words.

    Text is encoded by a copy of the tokenizer in which each control token has a name that no text can contain: its own
    between two NUL characters, which ``clean_text`` removes from every text.

    Decoding an encoded text gives the text back, up to the tokenizer's own normaliser (Qwen's applies NFC) and apart
    from characters that a byte-level vocabulary has no tokens for (SmolLM2's lacks some control characters), which
    become U+FFFD instead of vanishing. Vocabularies that put a space before every text (Llama 2) lose a leading one.

    Args:
        tokenizer: The fast tokenizer. It is not changed, and later changes to it have no effect on encoding.
        eos_ids: Further tokens that end an answer (a model's generation config may list some).

    Attributes:
        control_ids: Tokens that no text encodes to.
        eos_ids: Tokens that end an answer: the tokenizer's, the chat template's end of a turn, and the given ones.
        json_grammars: The JSON texts that its tokens can write.

    Raises:
        ConfigError: ``tokenizer`` is not a fast one.
    """

    takes_tools = True

    def __init__(self, tokenizer: Any, *, eos_ids: Iterable[int] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no backend_tokenizer; load a fast tokenizer (AutoTokenizer does)"
            )
        eos_ids = frozenset(eos_ids)
        self._chat = tokenizer
        self._tools: Sequence[Mapping[str, Any]] | None = None
        self._opening = ""
        self._writes_tools = "tools" in str(getattr(tokenizer, "chat_template", None) or "")
        # Copies of the backend: truncation, padding and whether control tokens are recognised are state of a backend,
        # so that other users of a shared one would change the encoding.
        self._template, self._text, controls, self.control_ids = _backends(backend, _is_control(tokenizer, eos_ids))
        self._control_names = _alternation(controls)
        self._unwritable = _unwritable(self._text)
        self._bytes = byte_of_character() if is_byte_level(self._template) else None
        self._added: dict[int, str] = {
            id_: token.content for id_, token in self._template.get_added_tokens_decoder().items()
        }
        self.eos_ids = self._find_eos(eos_ids)
        self.json_grammars = JsonGrammars(self._all_bytes, self.encode_text, self.control_ids, self.eos_ids)

    @property
    def has_tools(self) -> bool:
        return self._tools is not None

    def with_tools(self, tools: Sequence[Mapping[str, Any]], opening: str = "") -> Tokenizer:
        """Return a tokenizer whose chats have tools; this one does not change.

        Args:
            tools: The tools in OpenAI's form; may be empty for a conversation that has used tools.
            opening: Text of the chat template that the answer begins with.

        Raises:
            ConfigError: a text of a tool contains a control token, which the template would write.
        """
        if (control := self._control_names.search(clean_text(json.dumps(tools, ensure_ascii=False)))) is not None:
            raise ConfigError(f"a tool contains the control token {control[0]!r}; take it out of name and description")
        tokenizer = copy.copy(self)
        tokenizer._tools, tokenizer._opening = tuple(tools), opening
        return tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self._template.get_vocab_size(with_added_tokens=True))

    def writable_from(self, first: int) -> list[tuple[str, int]]:
        """Return the tokens with ids from ``first`` on that a text or a prompt may hold, and their ids."""
        if self.vocab_size <= first and max(self._added, default=-1) < first:
            return []
        written = str(getattr(self._chat, "chat_template", None) or "")
        always = {self._chat.bos_token_id, self._chat.eos_token_id}
        vocabulary: Mapping[str, int] = self._template.get_vocab(with_added_tokens=True)
        return sorted(
            (
                (token, number)
                for token, number in vocabulary.items()
                if number >= first and (number not in self.control_ids or number in always or token in written)
            ),
            key=lambda entry: entry[1],
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template; base models have none."""
        return bool(getattr(self._chat, "chat_template", None))

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of ``text`` alone; control tokens written in it become ordinary text."""
        ids: list[int] = self._text.encode(self._writable(text), add_special_tokens=False).ids
        return ids

    def encode_answer(self, text: str) -> list[int]:
        """Return the tokens of an answer as it continues a prompt.

        Without a chat template the prompt ends in "Answer:", which a space follows; a chat template ends its opening
        of the answer itself.
        """
        if self.has_chat_template:
            return self.encode_text(text)
        opening, ids = self.encode_text(":"), self.encode_text(f": {text}")
        return ids[len(opening) :] if ids[: len(opening)] == opening else self.encode_text(f" {text}")

    def encode_parts(self, parts: Sequence[str]) -> tuple[list[int], list[Span]]:
        """Return the tokens of the joined text, as the model's own tokenizer encodes it, and the span of each part.

        A span holds every token with a character of the part: the token " who" belongs to a part "who" and to the
        part before it, which ends in the space. The span of an empty part is empty, or the token that it is inside of.

        Args:
            parts: Text of a chat template, whose control tokens are recognised, alternating with contents, in which
                they become ordinary text. The first and the last part are of the template.
        """
        texts = [
            self._writable(text) if index % 2 else self._control_names.sub("\0\\g<0>\0", clean_text(text))
            for index, text in enumerate(parts)
        ]
        encoding = self._text.encode("".join(texts), add_special_tokens=False)
        ids: list[int] = encoding.ids
        starts, stops = zip(*encoding.offsets, strict=True) if ids else ((), ())
        spans: list[Span] = []
        begin = 0
        for index, text in enumerate(texts):
            first, last = bisect_right(stops, begin), bisect_left(starts, begin + len(text))
            # Some control tokens hold the white space around them, where a content may begin or end.
            while index % 2 and first < last and ids[first] in self.control_ids:
                first += 1
            while index % 2 and first < last and ids[last - 1] in self.control_ids:
                last -= 1
            spans.append(Span(first, max(first, last)))
            begin += len(text)
        return ids, spans

    def encode_template(self, text: str) -> list[int]:
        """Return the tokens of a piece of chat template, control tokens included. Adds none of its own."""
        ids: list[int] = self._template.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a full prompt, as the model's own tokenizer encodes it.

        Control tokens written in it are recognised, and those that the tokenizer puts around a text are added. For
        prompts that their author controls; never for a document.

        """
        ids: list[int] = self._template.encode(clean_text(text), add_special_tokens=True).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text, not always full characters; none if the vocabulary lacks it."""
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._template.id_to_token(token_id)
        if name is None:
            return b""
        if self._bytes is not None:
            return bytes(self._bytes[character] for character in name)
        if (byte := _BYTE.fullmatch(name)) is not None:
            return bytes.fromhex(byte[1])
        # Some decoders strip the space before a text: after a first token, nothing is stripped.
        return self.decode([token_id, token_id])[len(self.decode([token_id])) :].encode()

    def _all_bytes(self) -> list[bytes]:
        """Return the bytes of every token."""
        return [self.token_bytes(token_id) for token_id in range(self.vocab_size)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the exact text of ``token_ids``, control tokens included."""
        return str(self._template.decode(list(token_ids), skip_special_tokens=False))

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens without special tokens."""
        text_ids = [token for token in token_ids if token not in self.eos_ids]
        return str(self._template.decode(text_ids, skip_special_tokens=True))

    def render_chat(self, messages: Sequence[ChatMessage], *, open_answer: bool = True) -> str:
        """Return the chat template filled with ``messages``; ``open_answer`` opens the assistant's turn.

        Without a chat template the contents are joined by blank lines, after the token that begins a text. Tools are
        text of the messages where the template has no place for them.

        Raises:
            ConfigError: the chat template rejects the messages.

        """
        if self._tools is not None and not self._writes_tools:
            messages = chat_with_written_tools(messages, self._tools)
        if not self.has_chat_template:
            return (self._chat.bos_token or "") + "\n\n".join(message["content"] for message in messages)
        chat: list[dict[str, Any]] = [dict(message) for message in messages]  # templates may change them
        for message in chat:
            if "tool_calls" in message:
                message["tool_calls"] = json.loads(message["tool_calls"])
        tools = {"tools": copy.deepcopy(list(self._tools))} if self._tools else {}
        try:
            rendered = self._chat.apply_chat_template(chat, tokenize=False, add_generation_prompt=open_answer, **tools)
        # Templates are programs that come with a model: they raise what they like.
        except Exception as error:
            roles = ", ".join(message["role"] for message in chat)
            raise ConfigError(
                f"the chat template refused messages with the roles {roles}: {error}; move the content of a role "
                "the model does not know into the user's message"
            ) from error
        return str(rendered) + (self._opening if open_answer else "")

    def save(self, folder: Path) -> None:
        self._chat.save_pretrained(folder)

    def _writable(self, text: str) -> str:
        """Return ``text`` with U+FFFD for each character that the vocabulary has no tokens for."""
        text = clean_text(text)
        return text if self._unwritable is None else self._unwritable.sub(_REPLACEMENT, text)

    def _find_eos(self, eos_ids: Iterable[int]) -> frozenset[int]:
        eos = {*eos_ids, self._chat.eos_token_id} - {None}
        if self.has_chat_template:
            try:
                chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}]
                after = self.encode_template(self.render_chat(chat, open_answer=False).rpartition(_MARK)[2])
            except ConfigError:
                after = []
            # What follows an answer ends it, unless it is mere text.
            eos |= {token for token in after[:1] if token in self.control_ids}
        return frozenset(eos)


def _is_control(tokenizer: Any, eos_ids: frozenset[int]) -> Callable[[Mapping[str, Any]], bool]:
    """Return whether an added token, as it is serialised, is a control token."""
    special, written = {*tokenizer.all_special_ids, *eos_ids}, str(getattr(tokenizer, "chat_template", None) or "")

    def is_control(token: Mapping[str, Any]) -> bool:
        name = token["content"].strip()
        if not name:  # whitespace is in the list for speed; documents contain it
            return False
        if token["special"] or token["id"] in special or _LOOKS_LIKE_MARK.search(name):
            return True
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", written) is not None

    return is_control


def _backends(
    backend: Any, is_control: Callable[[Mapping[str, Any]], bool]
) -> tuple[Any, Any, Mapping[str, int], frozenset[int]]:
    """Return a backend, one with renamed control tokens, their former names, and the ids that no text encodes to."""
    serialised = backend.to_str()
    template = type(backend).from_str(serialised)
    state = json.loads(serialised)
    tokens = [token for token in state.get("added_tokens", ()) if is_control(token)]
    controls = {token["content"]: token["id"] for token in tokens}
    keeps_nul = backend.normalizer is None or "\0" in backend.normalizer.normalize_str("\0")
    for token in tokens:
        token["content"] = f"\0{token['content']}\0"
        token["normalized"] = token["normalized"] and keeps_nul
    # What a vocabulary writes for text that it lacks is listed as special too.
    unknown = {state["model"].get("unk_id"), controls.get(state["model"].get("unk_token"))}
    _rename(state["model"], {name: f"\0{name}\0" for name in controls})
    # Byte-level post-processors take the space before a word out of its offsets.
    text = type(backend).from_str(json.dumps({**state, "post_processor": None}))
    template.encode_special_tokens = False
    for each in (template, text):
        each.no_truncation()
        each.no_padding()
    return template, text, controls, frozenset(controls.values()) - unknown


def _rename(model: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Rename entries of a vocabulary: Unigram and SentencePiece BPE write ordinary text with any of them."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [[renamed.get(name, name), score] for name, score in vocabulary]
    elif not renamed.keys().isdisjoint(vocabulary):
        model["vocab"] = {renamed.get(name, name): number for name, number in vocabulary.items()}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if renamed.keys().isdisjoint((*pair, "".join(pair)))]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]


def _alternation(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def _unwritable(backend: Any) -> re.Pattern[str] | None:
    """Return a pattern of the characters that a byte-level vocabulary lacks a byte of, or None if it has all."""
    if type(backend.decoder).__name__ != "ByteLevel":
        return None

    def is_lost(character: str) -> bool:
        ids = backend.encode(character, add_special_tokens=False).ids
        return character not in str(backend.decode(ids, skip_special_tokens=False))

    ranges = [(code, code) for code in range(0x80) if is_lost(chr(code))]
    # All characters with the same leading byte in UTF-8 share its fate; each such range is tried at both ends, since
    # a normaliser may change one of them.
    leading = [(low, low + 0x3F) for low in range(0x80, 0x800, 0x40)]
    leading += [(0x800, 0xFFF), *((low, low + 0xFFF) for low in range(0x1000, 0xD000, 0x1000)), (0xD000, 0xD7FF)]
    leading += [(0xE000, 0xEFFF), (0xF000, 0xFFFF), (0x10000, 0x3FFFF), (0x40000, 0x7FFFF), (0x80000, 0xBFFFF)]
    leading += [(0xC0000, 0xFFFFF), (0x100000, 0x10FFFF)]
    ranges += [(low, high) for low, high in leading if is_lost(chr(low)) and is_lost(chr(high))]
    body = "".join(f"{re.escape(chr(low))}-{re.escape(chr(high))}" for low, high in ranges)
    return re.compile(f"[{body}]") if body else None


def byte_of_character() -> dict[str, int]:
    """Return the byte of each character of the alphabet.

    Printable bytes of Latin-1 map to themselves, all other bytes to the characters from 256 on, in order. Source:
    Radford et al. (2019), https://github.com/openai/gpt-2, and the ``ByteLevel`` decoder of tokenizers.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


def is_byte_level(backend: Any) -> bool:
    """Return whether a tokenizer's tokens are written in the alphabet: its decoder has a step ``ByteLevel``."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    steps = [decoder, *decoder.get("decoders", ())]
    return any(step.get("type") == "ByteLevel" for step in steps)
