"""Reads documents from files and folders: text is split into passages, and so are long records.

The result depends only on the files' names and content and the order of the paths: folders are read in sorted order,
and ids are given in the file or hashed from the content. Knows nothing of embeddings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from langchain_core.documents import Document

from rag_posfix.checked import check_type, checked_list
from rag_posfix.errors import ConfigError, NotTextError, RetrievalError
from rag_posfix.retrieval.index.documents import IndexEntry
from rag_posfix.retrieval.index.storage import holds_index
from rag_posfix.retrieval.ingest.passages import PassageSize, split_document, split_text
from rag_posfix.retrieval.ingest.readers import READERS, TEXT_SUFFIXES, read_text
from rag_posfix.retrieval.ingest.records import RECORD_SUFFIXES, FieldRoles, parse_fields, read_records
from rag_posfix.retrieval.ingest.structure import passage_title, title_from_path
from rag_posfix.text import clean_text, content_hash

if TYPE_CHECKING:
    from langchain_core.documents import BaseDocumentTransformer

__all__ = ["read_documents"]

logger = logging.getLogger(__name__)


def readable_suffixes() -> tuple[str, ...]:
    """Return the suffixes of files that can be read, in lower case, those of plug-ins too."""
    return tuple(sorted({*RECORD_SUFFIXES, *TEXT_SUFFIXES, *(f".{name}" for name in READERS.names())}))


_BEIR_CORPORA = ("corpus.jsonl", "corpus.jsonl.gz")
_BEIR_QUESTIONS = ("queries.jsonl", "queries.jsonl.gz", "qrels")

SkippedKind: TypeAlias = Literal["unsupported", "empty", "binary", "duplicate", "unreadable"]
"""Why a file gave no document of its own: type, no text, no text file, content of another file, or an error."""

NoteKind: TypeAlias = Literal["fields", "encoding", "lost", "rows", "cut"]
"""What is said about a file that was read: fields of its records, a guessed encoding, pages, words or values that are
not in its text, rows left out, cut sentences."""

Paths: TypeAlias = str | Path | Iterable[str | Path]
"""A path, or several."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that gave no document of its own, by its path, and the reason on one line."""

    file: str
    kind: SkippedKind
    reason: str


@dataclass(frozen=True, slots=True)
class FileNote:
    """What is worth knowing about how a file was read, on one line."""

    file: str
    kind: NoteKind
    message: str


@dataclass(frozen=True, slots=True)
class _ReadDocument:
    """A document, its first position for error messages, and all files that contain it.

    Attributes:
        copy_key: Equal for the same passage in copies of a file, whose names may differ; None for records.
    """

    document: Document
    position: str
    files: tuple[str, ...]
    copy_key: str | None = None


@dataclass(frozen=True, slots=True)
class FilesRead:
    """The documents of files, each with all files that contain it, and what is said about the files."""

    entries: tuple[IndexEntry, ...]
    skipped: tuple[SkippedFile, ...]
    notes: tuple[FileNote, ...] = ()


def read_documents(
    paths: Paths,
    *,
    size: PassageSize | None = None,
    splitter: BaseDocumentTransformer | None = None,
    fields: Iterable[str] = (),
    strict: bool = True,
) -> list[Document]:
    """Return the documents of files and folders, each with an id and ``metadata["source"]``.

    Text files (``readers.TEXT_SUFFIXES``) are split into passages: at headings, then between paragraphs, list items
    and rows of tables, then between sentences. ``metadata["title"]`` is the title of the file and the headings above
    the passage, joined with " > "; the passage is ``readers.read_text(file).text[start:end]``, after the lead sentence
    or the header row where a list or table continues. Passages of PDF files have the ``page`` on which they begin.

    A row of a table (``.csv``, ``.tsv``) and an object of ``.jsonl``, ``.jsonl.gz`` and ``.json`` files is one
    document, which is split if it is longer than a passage. Its text, title and id are found by the names and the
    content of the fields; other fields are metadata. In a folder in BEIR's layout only the
    corpus is read. A document without an id gets a hash of its title and text. A document that occurs several times
    with the same id and content is returned once. What is worth knowing (guessed encodings, documents without text,
    cut sentences) is logged as a warning.

    Args:
        paths: Files, or folders that are searched for such files; hidden files are skipped.
        size: Limits of a passage; the defaults of PassageSize if None.
        splitter: A langchain text splitter, in place of ``size``: splits what is between two headings.
        fields: Fields of records: ``NAME`` or ``text=NAME``, ``title=NAME``, ``id=NAME``.
        strict: Raise at the first file or record that cannot be read; otherwise leave it out with a warning.

    Raises:
        RetrievalError: a path is missing or unreadable, a suffix is not supported, a file is binary, a record is
            malformed, one id belongs to different contents, or there is no document at all.
        ConfigError: the extra that a file needs is not installed, or an argument is wrong.
    """
    files = path_list(paths)
    read = read_files(files, size=size, splitter=splitter, fields=fields, strict=strict)
    for skipped in read.skipped if not strict else ():
        logger.warning("%s: left out: %s", skipped.file, skipped.reason)
    for note in read.notes:
        logger.log(logging.INFO if note.kind == "fields" else logging.WARNING, "%s: %s", note.file, note.message)
    if not read.entries:
        raise no_documents(files, read.skipped)
    return [entry.document for entry in read.entries]


def path_list(paths: Paths) -> list[Path]:
    """Return one path, or several, as a list; raise ``ConfigError`` for anything else."""
    if isinstance(paths, str | os.PathLike):
        return [Path(paths)]
    return [Path(path) for path in checked_list("paths", paths, str | os.PathLike, "paths")]


def read_files(
    paths: Paths,
    *,
    size: PassageSize | None = None,
    splitter: BaseDocumentTransformer | None = None,
    fields: Iterable[str] = (),
    strict: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> FilesRead:
    """Return the documents of files and folders, each with all files that contain it; otherwise as ``read_documents``.

    Args:
        strict: Raise at the first file or record that cannot be read. Otherwise it is left out, and the others are
            read.
        progress: Called with (files read, files to read).

    Raises:
        RetrievalError: a path is missing; with ``strict``, as ``read_documents``. Without any document, the result is
            empty.
        ConfigError: with ``strict``, as ``read_documents``.
    """
    if size is not None and splitter is not None:
        raise ConfigError("size and splitter cannot be combined; the splitter has its own limits")
    if splitter is not None:
        from langchain_core.documents import BaseDocumentTransformer  # imports the whole of runnables

        if not isinstance(splitter, BaseDocumentTransformer):
            raise ConfigError(
                f"splitter={splitter!r} must be a langchain text splitter, such as RecursiveCharacterTextSplitter"
            )
    check_type("size", size, PassageSize | None, "a PassageSize, such as PassageSize(words=100)")
    names = [fields] if isinstance(fields, str) else checked_list("fields", fields, str, "texts, such as 'text=body'")
    reader = _FileReader(size or PassageSize(), splitter, parse_fields(names), strict)
    files = [file for path in path_list(paths) for file in _files_of(path, reader.skipped.append, strict=strict)]
    for number, file in enumerate(files, start=1):
        reader.read(file)
        if progress is not None:
            progress(number, len(files))
    entries = tuple(IndexEntry(item.document, item.files) for item in reader.documents.values())
    return FilesRead(entries, tuple(reader.skipped), tuple(reader.notes))


def has_readable_files(paths: Iterable[Path]) -> bool:
    """Return whether a path is a file, or a folder with a file whose suffix can be read, without reading any."""
    return any(path.is_file() or any(_files_of(path, lambda _: None, strict=False)) for path in paths)


def no_documents(paths: Iterable[Path], skipped: Sequence[SkippedFile] = ()) -> RetrievalError:
    """Return the error for paths without any document; it names the first of the skipped files."""
    names = ", ".join(repr(str(path)) for path in paths) or "no path"
    first = f" ({len(skipped)} skipped, the first: {skipped[0].file!r}: {skipped[0].reason})" if skipped else ""
    return RetrievalError(
        f"no documents in {names}{first}; give files with text, ending in {', '.join(readable_suffixes())}"
    )


def _files_of(path: Path, skip: Callable[[SkippedFile], None], *, strict: bool) -> Iterator[Path]:
    """Yield the files of a path that can be read; hidden files are left out silently, others go to ``skip``."""
    if path.is_dir():
        yield from _walk(path, skip, strict)
    elif not path.exists():
        raise RetrievalError(f"no such file or folder: {str(path)!r}")
    elif not path.is_file():
        raise RetrievalError(
            f"{str(path)!r} is neither a file nor a folder; give files ending in {', '.join(readable_suffixes())}"
        )
    elif path.name.lower().endswith(readable_suffixes()):
        yield path
    elif strict:
        raise RetrievalError(f"cannot read {str(path)!r}: {_unsupported(path)}")
    else:
        skip(SkippedFile(clean_text(str(path)), "unsupported", _unsupported(path)))


def _unsupported(path: Path) -> str:
    return f"suffix {path.suffix!r} is not one of {', '.join(readable_suffixes())}"


def _walk(folder: Path, skip: Callable[[SkippedFile], None], strict: bool) -> Iterator[Path]:
    def leave_out(path: str | Path, kind: SkippedKind, reason: str) -> None:
        skip(SkippedFile(clean_text(str(path)), kind, reason))  # names need not be UTF-8

    def fail(error: OSError) -> None:
        if strict:
            raise RetrievalError(f"cannot read {str(error.filename)!r}: {error.strerror}") from error
        leave_out(error.filename, "unreadable", str(error.strerror or error))

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        if "manifest.json" in names and holds_index(Path(parent)):
            folders[:] = []
            continue
        corpus = next((name for name in _BEIR_CORPORA if name in names), None)
        if corpus is not None and any(name in names or name in folders for name in _BEIR_QUESTIONS):
            folders[:], names = [], [corpus]  # leave out queries and judgements
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for link in (Path(parent, name) for name in folders if os.path.islink(Path(parent, name))):
            leave_out(link, "unreadable", "a link to a folder, which is not followed; name it too")
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    root = os.path.realpath(folder)
    for file in sorted(files, key=lambda file: file.relative_to(folder).parts):
        if not file.name.lower().endswith(readable_suffixes()):
            leave_out(file, "unsupported", _unsupported(file))
        elif not file.is_file():
            leave_out(file, "unreadable", "not a regular file, or a link to a file that is missing")
        elif file.is_symlink() and os.path.commonpath([root, os.path.realpath(file)]) != root:
            leave_out(file, "unreadable", "a link out of the folder, which is not followed; name it too")
        else:
            yield file


@dataclass(slots=True)
class _FileReader:
    """Reads one file after the other, and collects documents by their ids."""

    size: PassageSize
    splitter: BaseDocumentTransformer | None
    roles: FieldRoles
    strict: bool
    documents: dict[str, _ReadDocument] = field(default_factory=dict)
    skipped: list[SkippedFile] = field(default_factory=list)
    notes: list[FileNote] = field(default_factory=list)
    _copies: dict[str, str] = field(default_factory=dict)  # ids by copy_key

    def read(self, file: Path) -> None:
        """Add the documents of a file, and what is said about it."""
        name = clean_text(str(file))
        problems: list[str] = []

        def report(problem: str) -> None:
            if self.strict:
                raise RetrievalError(problem)
            problems.append(problem)

        try:
            is_record_file = file.name.lower().endswith(RECORD_SUFFIXES)
            items = self._record_items(file, name, report) if is_record_file else self._text_items(file, name)
            originals = [original for item in list(items) if (original := self._add(item, report)) is not None]
        except (OSError, RetrievalError, ConfigError) as error:
            if isinstance(error, OSError):
                error = RetrievalError(f"cannot read {str(file)!r}: {error.strerror or error}")
            if self.strict:
                raise error
            kind: SkippedKind = "binary" if isinstance(error, NotTextError) else "unreadable"
            self.skipped.append(SkippedFile(name, kind, str(error)))
            return
        if not originals:
            reason = SkippedFile(name, "unreadable", problems[0]) if problems else None
            self.skipped.append(reason or SkippedFile(name, "empty", "no text in it"))
            return
        self.notes += [FileNote(name, "rows", problem) for problem in problems]
        other_files = set(originals) - {""}
        if "" not in originals and other_files != {name}:
            duplicate = f"duplicate of {', '.join(sorted(other_files))}"
            self.skipped.append(SkippedFile(name, "duplicate", duplicate))

    def _add(self, item: _ReadDocument, report: Callable[[str], None]) -> str | None:
        """Add a document, or the file to a document that is there.

        Returns:
            The first file of the document that was there; an empty string if it is new; None if its id belongs to
            another document, which is reported.
        """
        document_id = self._copies.get(item.copy_key or "", str(item.document.id))
        first = self.documents.get(document_id)
        if first is None:
            self.documents[document_id] = item
            if item.copy_key is not None:
                self._copies[item.copy_key] = document_id
            return ""
        contents = {(str(d.metadata.get("title", "")), d.page_content) for d in (first.document, item.document)}
        if len(contents) > 1 and (item.copy_key is None or item.copy_key != first.copy_key):
            report(
                f"id {document_id!r} belongs to different documents in {first.position} and {item.position}; make the "
                "ids distinct"
            )
            return None
        if item.files[0] not in first.files:
            self.documents[document_id] = replace(first, files=first.files + item.files)
        return first.files[0]

    def _text_items(self, file: Path, name: str) -> Iterator[_ReadDocument]:
        read = read_text(file)
        self._note_encoding(name, read.encoding_note)
        self.notes += [FileNote(name, "lost", loss) for loss in read.losses]
        title = read.title or title_from_path(name)
        cut, text_hash = 0, content_hash(read.text)
        for passage, full_title in split_text(read, title, self.size, self.splitter):
            metadata: dict[str, Any] = {**read.metadata, "source": name, "start": passage.start, "end": passage.end}
            if full_title:
                metadata["title"] = full_title
            metadata |= read.pages_of(passage.start, passage.end, len(passage.text))
            cut += passage.cut
            document = Document(
                id=content_hash(full_title, passage.text), page_content=passage.text, metadata=metadata
            )
            position = f"{name} (characters {passage.start} to {passage.end})"
            stated = passage_title(read.title, passage.headings)
            yield _ReadDocument(document, position, (name,), content_hash(text_hash, stated, passage.text))
        if cut:
            self.notes.append(FileNote(name, "cut", self.size.describe_cut(cut)))

    def _record_items(self, file: Path, name: str, report: Callable[[str], None]) -> Iterator[_ReadDocument]:
        read = read_records(file, self.roles, report)
        self._note_encoding(name, read.encoding_note)
        if read.documents:
            self.notes.append(FileNote(name, "fields", read.roles.describe()))
        if read.without_text:
            self.notes.append(FileNote(name, "rows", f"left out {read.without_text} records without text"))
        for document, position in read.documents:
            for passage in split_document(document, self.size, self.splitter):
                yield _ReadDocument(passage, position, (name,))

    def _note_encoding(self, name: str, note: str | None) -> None:
        if note is not None:
            self.notes.append(FileNote(name, "encoding", note))
