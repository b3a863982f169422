"""``rag-posfix ask`` and ``prompt``: a question over an index or a store, and what the model will read for it.

``rag-posfix ask --questions FILE --out FILE``: many questions at once, one JSON line each, resumable.
"""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from rag_posfix.cli.options import (
    AsJson,
    Filter,
    Index,
    check_answer_fits,
    check_searchable,
    emit,
    emit_json,
    err,
    filter_of,
    follows,
    progress_with_text,
    say,
    status,
    unknown_filter_fields,
    with_settings,
)
from rag_posfix.contracts.retrieval import combine_filters
from rag_posfix.errors import ConfigError, GenerationError, RagPosfixError
from rag_posfix.files import replace_durably
from rag_posfix.parameters import shown
from rag_posfix.settings import Settings
from rag_posfix.text import checked_question, visible

if TYPE_CHECKING:
    from rag_posfix.contracts.answer import Answer, AnswerDocument, Question
    from rag_posfix.contracts.generator import ChatMessage
    from rag_posfix.pipeline.pipeline import Pipeline
    from rag_posfix.pipeline.preview import PromptPreview


_FIELDS = ("id", "question", "history", "filter")


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """A line of the questions: ``id`` is its number, from 1, if the line has none."""

    id: str
    question: Question


def read_questions(path: Path, filter: Any, use_cache: bool) -> list[QuestionRow]:
    """Return the questions of a file of JSON lines, or one per line of a .txt file.

    ``filter`` applies to all, next to that of a line.

    Raises:
        ConfigError: the file cannot be read, a line is no question, or two have one id. Names the line.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"--questions {str(path)!r} cannot be read: {error.strerror}") from error
    is_plain = path.suffix == ".txt"
    rows: dict[str, QuestionRow] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _read_row(orjson.dumps(line.decode()) if is_plain else line, number, filter, use_cache)
            if row.id in rows:
                raise ConfigError(f"the id {shown(row.id)} is that of an earlier line; give each question its own")
        except (RagPosfixError, UnicodeDecodeError) as error:
            raise ConfigError(f"--questions {str(path)!r}, line {number}: {error}") from error
        rows[row.id] = row
    if not rows:
        raise ConfigError(f'--questions {str(path)!r} holds no question; write one {{"question": "..."}} per line')
    return list(rows.values())


def _read_row(line: bytes, number: int, filter: Any, use_cache: bool) -> QuestionRow:
    from rag_posfix.contracts.answer import Question

    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"no JSON: {error}") from error
    if isinstance(fields, str):
        fields = {"question": fields}
    if not isinstance(fields, dict) or not isinstance(fields.get("question"), str):
        raise ConfigError('must be a text or an object with the text "question"')
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"unknown field {shown(unknown[0])}; a question has {', '.join(_FIELDS)}")
    identity = fields.get("id", number)
    if not isinstance(identity, str | int):
        raise ConfigError(f"the id is {type(identity).__name__}, must be a text or a whole number")
    checked_question(fields["question"])
    question = Question(
        fields["question"],
        history=fields.get("history") or (),
        filter=combine_filters(filter, fields.get("filter")),
        use_cache=use_cache,
    )
    return QuestionRow(str(identity), question)


class AnswerFile:
    """The file of answers, one JSON line each; each is written whole before the next one.

    A last line without an end, which a killed run left, is removed; so are the lines of questions that failed, which
    are asked again.

    Raises:
        ConfigError: the file cannot be written, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.questions: dict[str, str] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes() if path.exists() else b""
            lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
            answered = b"".join(line for number, line in enumerate(lines, 1) if self._is_answer(line, number))
            if answered != data:
                replace_durably(path, answered)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--out {str(path)!r} cannot be written: {error.strerror}") from error

    def _is_answer(self, line: bytes, number: int) -> bool:
        """Note the question of a line; return whether it was answered."""
        try:
            row = orjson.loads(line)
            identity, question = row["id"], row["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--out {str(self._path)!r}, line {number} is no answer of an earlier run; choose another file"
            ) from error
        if "error" in row:
            return False
        self.questions[identity] = question
        return True

    def missing(self, rows: Sequence[QuestionRow]) -> list[QuestionRow]:
        """Return the questions without a line; ConfigError if one has the line of another question."""
        for row in rows:
            if self.questions.get(row.id, row.question.text) != row.question.text:
                raise ConfigError(
                    f"--out {str(self._path)!r} has another question under the id {shown(row.id)}; choose another file"
                )
        return [row for row in rows if row.id not in self.questions]

    def add(self, row: QuestionRow, result: Answer | Exception) -> None:
        """Write the line of a question: the fields of ``ask --json``, or ``error`` and its ``type``."""
        fields: dict[str, Any] = {"id": row.id, "question": row.question.text}
        if isinstance(result, Exception):
            fields |= {"error": str(result), "type": type(result).__name__}
        else:
            fields |= result.to_dict()
        self._file.write(orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS) + b"\n")

    def close(self) -> None:
        """Write everything to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def answer_all(pipeline: Pipeline, rows: Sequence[QuestionRow], answers: AnswerFile) -> int:
    """Answer the questions together, and write each answer as soon as it is there; return how many failed."""
    n_failed, started = 0, time.monotonic()
    with progress_with_text() as move, closing(pipeline.batch_as_completed([row.question for row in rows])) as results:
        for done, (index, result) in enumerate(results, 1):
            if isinstance(result, Exception) and not isinstance(result, RagPosfixError):
                raise result  # a fault of the program, not of the question
            answers.add(rows[index], result)
            n_failed += isinstance(result, Exception)
            left = (time.monotonic() - started) / done * (len(rows) - done)
            move(done, len(rows), f"answered, {left:.0f} s left")
    return n_failed


NO_PASSAGE = 3
"""Exit code if no passage was found."""
_SHOWN_SOURCES = 5
_CHAT_MESSAGES = 12
"""Messages before a question of ``--chat`` that the model reads."""
_SENTENCE_CHARACTERS = 240


@with_settings(
    "mitigation", "reranker", "order", "k", "retriever", "query", "writer", "min_relevance", "allow_ungrounded",
    "allow_unsupported", "max_tokens", "template", "model", "adapter", "device", "tp", "profile",
)  # fmt: skip
def ask(
    settings: Settings,
    index: Index = None,
    question: Annotated[str | None, typer.Argument(help="Ask it; none with --chat or --questions.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Use the answer cache, in memory by default.")
    ] = True,
    filters: Filter = None,
    chat: Annotated[bool, typer.Option("--chat", help="Read questions from the terminal, one per line.")] = False,
    questions: Annotated[
        Path | None,
        typer.Option("--questions", help="Ask the questions of this file of JSON lines.", show_default="none"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Write the answers of --questions here, and resume there.", show_default="none"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question from an index or a store, with sources.

    A chat ends with an empty line; each question continues the conversation. A file of questions is answered together,
    and the same command continues after an interruption. The exit code is 3 if no passage is found, and 1 if some
    questions of a file failed.

    Answers and passages are kept in memory only; RAG_POSFIX_KEEP_ON_DISK=true keeps them in the cache folder.
    """
    _check_usage(question, chat=chat, stream=stream, as_json=as_json, questions=questions, output=output)
    metadata_filter = filter_of(filters)
    check_searchable(index, settings)
    check_answer_fits(settings)
    if questions is not None and output is not None:
        _ask_many(settings, index, read_questions(questions, metadata_filter, cache), AnswerFile(output), as_json)
        return
    from rag_posfix.pipeline.pipeline import Question

    pipeline = _open(settings, index)
    if pipeline is None:
        return
    with closing(pipeline):
        history: list[ChatMessage] = []
        for text in _questions(question, chat):
            request = Question(text, history=tuple(history), use_cache=cache, filter=metadata_filter)
            answer = _print_stream(pipeline, request) if stream else pipeline.ask(request)
            if as_json:
                emit_json(answer.to_dict())
                continue
            if not stream:
                say(answer.text)
            if answer.query != text:
                say(f"searched for: {' / '.join(answer.query.splitlines())}")
            if answer.second_query:
                say(f"then searched for: {' / '.join(answer.second_query.splitlines())}")
            _show_sources(answer, settings)
            if not answer.documents:
                say(*unknown_filter_fields(index, metadata_filter))
            if answer.grounded or settings.allow_ungrounded:
                history = [*history, {"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]
                history = history[-_CHAT_MESSAGES:]
    if not (chat or answer.grounded or settings.allow_ungrounded):
        raise typer.Exit(NO_PASSAGE)


def _open(settings: Settings, index: Path | None) -> Pipeline | None:
    """Return the pipeline, whose model is loaded for the first answer; None in a follower rank, which is done."""
    from rag_posfix.pipeline.build import build_pipeline, resolve_methods

    methods = resolve_methods(settings)
    if follows(settings):
        return None
    with status("loading the embeddings and the tokenizer"):
        return build_pipeline(settings, index=index, deferred=True, methods=methods)


def _ask_many(
    settings: Settings, index: Path | None, rows: Sequence[QuestionRow], answers: AnswerFile, as_json: bool
) -> None:
    with closing(answers):
        missing, n_failed = answers.missing(rows), 0
        if missing:
            pipeline = _open(settings, index)
            if pipeline is None:
                return
            with closing(pipeline):
                n_failed = answer_all(pipeline, missing, answers)
    counts = {"questions": len(rows), "skipped": len(rows) - len(missing), "failed": n_failed}
    emit(counts, as_json, lambda _: say(", ".join(f"{count} {name}" for name, count in counts.items())))
    if n_failed:
        raise typer.Exit(1)


def _check_usage(
    question: str | None, *, chat: bool, stream: bool, as_json: bool, questions: Path | None, output: Path | None
) -> None:
    """Raise for options that exclude each other, and for a question that is missing or empty."""
    if (questions is None) != (output is None):
        raise ConfigError("--questions and --out belong together; give both, or neither")
    if questions is not None:
        if question is not None or chat or stream:
            raise ConfigError("--questions asks the questions of a file; leave out QUESTION, --chat and --stream")
        return
    if chat and as_json:
        raise ConfigError("--chat and --json cannot be combined; --json prints one object at the end")
    if question is None and not chat:
        raise typer.BadParameter("give a question, or --chat", param_hint="QUESTION")
    if stream and as_json:
        raise ConfigError("--stream and --json cannot be combined; --json prints one object at the end")
    if question is not None:
        checked_question(question)


def _questions(first: str | None, chat: bool) -> Iterator[str]:
    """Yield the question of the command line, and with ``chat`` the lines of stdin until an empty line or its end."""
    if first is not None:
        yield first
    while chat:
        if sys.stdin.isatty():
            err().print("question (an empty line ends): ", end="", highlight=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _print_stream(pipeline: Pipeline, question: Question) -> Answer:
    answer = None
    for chunk in pipeline.stream(question):
        typer.echo(visible(chunk.text), nl=False)
        answer = chunk.answer or answer
    typer.echo()
    if answer is None:
        raise GenerationError("the stream ended without an answer; please report this")
    return answer


def _show_omissions(answer: Answer) -> None:
    """Say which passages the model read in part, and how many not at all for want of room."""
    names = [_source_name(document) for document in answer.documents if document.id in answer.truncated]
    if names:
        say(f"cut to fit: {'; '.join(names)}")
    left_out = sum(reason == "budget" for _, reason in answer.dropped)
    if left_out:
        say(f"left out, because the prompt is full: {left_out} of the passages; --json lists them")


def _source_name(document: AnswerDocument) -> str:
    """Return file, title and page of a passage; its id if it has neither file nor title."""
    page = None if document.page is None else f"page {document.page}"
    return ", ".join(filter(None, (document.source, document.title, page))) or document.id


def _shorten(text: str) -> str:
    return text if len(text) <= _SENTENCE_CHARACTERS else text[: _SENTENCE_CHARACTERS - 1].rstrip() + "…"


def _show_support(answer: Answer) -> None:
    """Say whether the passages support the answer, where somebody judged that."""
    numbers = {document.id: document.position + 1 for document in answer.documents}
    supporting = ", ".join(f"[{numbers[identity]}]" for identity in answer.supported_by if identity in numbers)
    if answer.support == "no":
        say("support: no passage supports this answer")
    elif answer.support != "unknown":
        say(f"support: {answer.support}, by {supporting}")
    if answer.disagreements:
        say("the passages disagree:")
        for side in answer.disagreements:
            places = ", ".join(f"[{numbers[identity]}]" for identity in side.document_ids)
            say(f"    {places} {side.text}" + (f" ({side.date})" if side.date else ""))


def _show_sources(answer: Answer, settings: Settings) -> None:
    from rag_posfix.pipeline.citations import source_span

    _show_omissions(answer)
    if not answer.documents:
        for warning in answer.warnings:
            say(warning)
        if any(reason == "unsupported" for _, reason in answer.dropped):
            say("no passage answers the question: the model was not asked")
            return
        say(
            ("no retrieved passage is about the question: " if answer.dropped else "no passage was found: ")
            + (
                "the answer is from the model's memory"
                if settings.allow_ungrounded
                else "the model was not asked; --allow-ungrounded answers from its memory"
            )
        )
        return
    quotes = [citation for citation in answer.citations if citation.origin == "quote"]
    for document in answer.documents[:_SHOWN_SOURCES]:
        quoted = [citation.text for citation in quotes if document.id in citation.document_ids]
        start, end = source_span(document.text, answer.text, quoted)
        sentence = " ".join(document.text[start:end].split())
        name = _source_name(replace(document, page=document.page_at(start)))
        say(f"[{document.position + 1}] {name}", f"    {_shorten(sentence)}")
    n_hidden = len(answer.documents) - _SHOWN_SOURCES
    if n_hidden > 0:
        say(f"and {n_hidden} more; --json lists all")
    _show_support(answer)
    usage, seconds = answer.usage, sum(answer.timings.values())
    note = ", from the answer cache" if answer.cached else ""
    note += f"; kept in {settings.cache_dir}" if settings.cache.enabled and settings.cache.disk_bytes else ""
    say(
        f"{answer.mitigation}, order {answer.order}: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} "
        f"completion tokens, {seconds:.1f} s{note}"
    )


@with_settings(
    "mitigation", "reranker", "order", "k", "retriever", "min_relevance", "max_tokens", "template", "model", "adapter",
    "device",
)  # fmt: skip
def prompt(
    question: Annotated[str, typer.Argument(help="Show the prompt of this question.")],
    settings: Settings,
    index: Index = None,
    filters: Filter = None,
    as_json: AsJson = False,
) -> None:
    """Print the prompt of a question, without answering it.

    Prints the prompt on stdout; on stderr the tokens of each segment, and those that the passage KV store has on disk
    or in Redis. The weights are loaded only if there is such a store.
    """
    checked_question(question)
    metadata_filter = filter_of(filters)
    check_searchable(index, settings)
    from rag_posfix.pipeline.build import build_pipeline, resolve_methods
    from rag_posfix.pipeline.pipeline import Question

    methods = resolve_methods(settings)
    deferred = not settings.passages.is_persistent(settings.cache_dir)
    with status("loading the embeddings and the tokenizer" if deferred else "loading the model"):
        pipeline = build_pipeline(settings, index=index, deferred=deferred, methods=methods)
    with closing(pipeline):
        preview = pipeline.preview(Question(question, filter=metadata_filter))
    emit(preview.to_dict(), as_json, lambda _: _show_prompt(preview))
    if not any(segment.kind == "passage" for segment in preview.segments):
        for line in unknown_filter_fields(index, metadata_filter):
            err().print(line, markup=False, highlight=False, soft_wrap=True)


def _show_prompt(preview: PromptPreview) -> None:
    say(preview.text)
    lines = []
    for segment in preview.segments:
        name = f"passage {segment.id}" if segment.id is not None else segment.kind
        lines.append(f"{name}: {segment.tokens} tokens{', cached' if segment.cached else ''}")
    lines += [f"left out: {identity} ({reason})" for identity, reason in preview.dropped]
    lines += preview.warnings
    note = "; the answer is in the answer cache" if preview.answer_cached else ""
    lines.append(
        f"{preview.tokens} prompt tokens, {preview.cached_tokens} of them cached ({preview.mitigation}, order "
        f"{preview.order}){note}"
    )
    for line in lines:
        err().print(line, markup=False, highlight=False, soft_wrap=True)
