"""``rag-posfix train data``: training samples from pairs, templates or a teacher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.dataclass_options import with_options_of
from rag_posfix.cli.options import AsJson, ModelName, checked_output, settings_from
from rag_posfix.cli.output import emit_json, experiment_step, out, status, table
from rag_posfix.training.data.sample import DataSettings

if TYPE_CHECKING:
    from rag_posfix.contracts.generator import Generator
    from rag_posfix.evaluation.data.questions import PositionExample

Out = Annotated[
    Path, typer.Option("--out", callback=checked_output, help="Folder for samples.jsonl and its statistics.")
]
Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "--pairs",
        help="Question-answer pairs: Lost-in-the-Middle or HotpotQA rows, a file in SQuAD's format, or demo for the "
        "shipped questions; may be repeated.",
        show_default="none",
    ),
]
Templates = Annotated[
    str | None,
    typer.Option(
        "--templates", help="Generated pairs, comma-separated: key_value, function, database.", show_default="none"
    ),
]
Teacher = Annotated[
    str | None,
    typer.Option(
        "--teacher",
        help="Pairs that a model of an OpenAI-compatible server writes about --texts: openai:NAME@URL.",
        show_default="none",
    ),
]
Texts = Annotated[
    str | None,
    typer.Option(
        "--texts",
        help="What stands around the pairs: a file, a folder of texts, an index, or demo for the shipped corpus.",
        show_default="segments of the same source",
    ),
]
Against = Annotated[
    list[Path] | None,
    typer.Option("--against", help="Evaluation file whose content is kept out; may be repeated.", show_default="none"),
]
AgainstLimit = Annotated[
    int | None,
    typer.Option("--against-limit", min=1, help="Questions of each evaluation file that count.", show_default="all"),
]
Skip = Annotated[int, typer.Option("--skip", min=0, help="Pairs to leave out at the start of each file.")]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Maximum number of pairs of each file.", show_default="all")
]


@with_options_of(DataSettings, "settings")
def data(
    output: Out,
    *,
    pairs: Pairs = None,
    templates: Templates = None,
    teacher: Teacher = None,
    texts: Texts = None,
    against: Against = None,
    against_limit: AgainstLimit = None,
    skip: Skip = 0,
    limit: Limit = None,
    settings: DataSettings,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Make questions whose answers depend on short passages at uniform places among others.

    The same command continues after an interruption. Rows with one gold passage are read by rag-posfix eval too.
    """
    from rag_posfix.pipeline.build import build_tokenizer
    from rag_posfix.training.data.file_pairs import read_examples
    from rag_posfix.training.data.make_data import DataSources, make_training_data
    from rag_posfix.training.data.pair import read_segments

    kept_out: list[PositionExample] = []
    for path in against or []:
        kept_out += read_examples(str(path), 0, against_limit)
    sources = DataSources(
        templates,
        [read_examples(one, skip, limit) for one in pairs or ()],
        _teacher(teacher) if teacher else None,
        read_segments(texts, settings.segment_words) if texts else (),
        kept_out,
    )
    chosen = settings_from(model=model)
    with status("reading the tokenizer"):
        count = _counter(build_tokenizer(chosen).encode_text)
    record = make_training_data(
        sources, settings, count, output, tokenizer=chosen.model, progress=experiment_step
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_data(record.to_json())


def _counter(encode: Callable[[str], list[int]]) -> Callable[[str], int]:
    return functools.lru_cache(maxsize=65536)(lambda text: len(encode(text)))


def _teacher(model: str) -> Generator:
    from rag_posfix.errors import ConfigError
    from rag_posfix.generation.remote.address import is_remote
    from rag_posfix.pipeline.build import build_generator

    if not is_remote(model):
        raise ConfigError(f"--teacher {model!r} must be openai:NAME@URL, a model of an OpenAI-compatible server")
    return build_generator(settings_from(model=model))


def _show_data(found: dict[str, Any]) -> None:
    console = out()
    shown = table(
        "samples", "gold passages", "tokens", "passages", "refused draws", "pairs left out", title="training data"
    )
    tokens, passages = found["tokens"], found["passages"]
    shown.add_row(
        ", ".join(f"{name}: {count}" for name, count in found["sources"].items()),
        ", ".join(f"{count} with {size}" for size, count in found["gold_passages"].items()),
        f"{tokens['least']} to {tokens['most']}, median {tokens['median']}",
        f"{passages['least']} to {passages['most']}",
        str(found["rejected"]),
        str(found["removed_pairs"]),
    )
    console.print(shown)
    places = found["places"]
    console.print(
        f"places of gold passages: chi-square {places['chi_square']:.2f} with {places['degrees_of_freedom']} degrees "
        f"of freedom, p = {places['p_value']:.2f}; a small p, such as 0.01, would say that they are not uniform",
        soft_wrap=True,
    )
    for name in ("samples", "record", "svg"):
        if name in found and isinstance(found[name], str):
            console.print(f"{name}: {found[name]}", highlight=False, soft_wrap=True)
