"""``rag-posfix train``: training data, fine-tuning against position bias, and the forgetting it causes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import (
    AsJson,
    checked_choice,
    emit,
    experiment_step,
    open_engine,
    out,
    out_option,
    say,
    say_figure,
    say_files,
    settings_from,
    status,
    table,
    with_options_of,
    with_settings,
)
from rag_posfix.errors import ConfigError
from rag_posfix.lab.training.data.settings import DataSettings, TrainSettings
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from rag_posfix.contracts.generator import Generator
    from rag_posfix.evaluation.data.questions import PositionExample
    from rag_posfix.lab.training.objectives import Objective
    from rag_posfix.mitigations.base import Mitigation

SEGMENT_WORDS = 300

Pairs = Annotated[
    list[str] | None,
    typer.Option("--pairs", help="Read pairs from this file, or demo; may be repeated.", show_default="none"),
]
Texts = Annotated[
    str | None,
    typer.Option(
        "--texts",
        help="Put pairs among these: a file, folder, index or demo.",
        show_default="segments of the same source",
    ),
]

app = typer.Typer(help="Make training data, and fine-tune models with it.", no_args_is_help=True)


@app.command()
@with_options_of(DataSettings, "samples")
@with_settings("model")
def data(
    output: Annotated[Path, out_option("Write samples.jsonl and its statistics here.")],
    *,
    pairs: Pairs = None,
    templates: Annotated[
        str | None,
        typer.Option("--templates", help="Generate pairs: key_value, function, database.", show_default="none"),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option("--teacher", help="Let openai:NAME@URL write pairs about --texts.", show_default="none"),
    ] = None,
    texts: Texts = None,
    decontaminate: Annotated[
        list[Path] | None,
        typer.Option("--decontaminate", help="Leave out content of this file; may be repeated.", show_default="none"),
    ] = None,
    decontaminate_limit: Annotated[
        int | None,
        typer.Option(
            "--decontaminate-limit", min=1, help="Use this many questions of each such file.", show_default="all"
        ),
    ] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Leave out this many pairs at the start of files.")] = 0,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Use at most this many pairs of each file.", show_default="all"),
    ] = None,
    samples: DataSettings,
    settings: Settings,
    as_json: AsJson = False,
) -> None:
    """Make questions whose answers depend on short passages.

    The passages are at uniform positions among others. Pairs are Lost-in-the-Middle or HotpotQA rows, a file in the
    format of SQuAD, or demo for the shipped questions. The same command continues after an interruption.
    """
    from rag_posfix.lab.training.data.make_data import DataSources, make_training_data
    from rag_posfix.lab.training.data.pairs import read_examples, read_segments
    from rag_posfix.pipeline.build import build_tokenizer

    excluded: list[PositionExample] = []
    for path in decontaminate or []:
        excluded += read_examples(str(path), 0, decontaminate_limit)
    sources = DataSources(
        templates,
        [read_examples(file, skip, limit) for file in pairs or ()],
        _teacher(teacher) if teacher else None,
        read_segments(texts, samples.segment_words) if texts else (),
        excluded,
    )
    with status("reading the tokenizer"):
        encode = build_tokenizer(settings).encode_text
    count = functools.lru_cache(maxsize=65536)(lambda text: len(encode(text)))
    record = make_training_data(
        sources, samples, count, output, tokenizer=settings.model, progress=experiment_step
    )  # fmt: skip
    emit(record.to_json(), as_json, _show_data)


def _teacher(model: str) -> Generator:
    from rag_posfix.generation.remote.connection import is_remote
    from rag_posfix.pipeline.build import build_generator

    if not is_remote(model):
        raise ConfigError(f"--teacher {model!r} must be openai:NAME@URL, a model of an OpenAI-compatible server")
    return build_generator(settings_from(model=model))


def _show_data(summary: dict[str, Any]) -> None:
    from rag_posfix.lab.training.data.make_data import CAPTION

    rows = table(
        "samples", "gold passages", "tokens", "passages", "rejected draws", "pairs left out", title="training data"
    )
    tokens, passages, positions = summary["tokens"], summary["passages"], summary["places"]
    rows.add_row(
        ", ".join(f"{name}: {count}" for name, count in summary["sources"].items()),
        ", ".join(f"{count} with {size}" for size, count in summary["gold_passages"].items()),
        f"{tokens['least']} to {tokens['most']}, median {tokens['median']}",
        f"{passages['least']} to {passages['most']}",
        str(summary["rejected"]),
        str(summary["removed_pairs"]),
    )
    out().print(rows)
    say(
        f"positions of gold passages: chi-square {positions['chi_square']:.2f} with {positions['degrees_of_freedom']} "
        f"degrees of freedom, p = {positions['p_value']:.2f}; a small p, such as 0.01, means that they are not uniform"
    )
    say_figure(summary, CAPTION)
    say_files(summary, *(name for name in ("samples", "record", "svg") if isinstance(summary.get(name), str)))


Data = Annotated[Path, typer.Option("--data", help="Read samples that rag-posfix train data wrote.")]
Out = Annotated[Path, out_option("Write checkpoint, record and adapter or model here.")]
Method = Annotated[str, typer.Option("--mitigation", help="Train the model under this method.")]

_training_options = with_options_of(TrainSettings, "training", {"places": "--positions"})


@app.command()
@_training_options
@with_settings("model", "device")
def in2(
    data: Data,
    output: Out,
    training: TrainSettings,
    settings: Settings,
    mitigation: Method = "none",
    as_json: AsJson = False,
) -> None:
    """Train on answers from short passages anywhere (IN2).

    The same command continues after an interruption.
    """
    from rag_posfix.lab.training.objectives import InformationIntensive

    _run(InformationIntensive(_method(mitigation)), data, output, training, settings, as_json)


@app.command()
@_training_options
@with_settings("model", "device")
def block(
    data: Data,
    output: Out,
    training: TrainSettings,
    settings: Settings,
    mitigation: Annotated[
        str, typer.Option("--mitigation", help="Train under this method with independent passages.")
    ] = "parallel_windows",
    as_json: AsJson = False,
) -> None:
    """Train each sample under the causal and a block mask.

    The block mask has independent passages and a final block. The same command continues after an interruption.
    """
    from rag_posfix.lab.training.objectives import Block

    _run(Block(_method("none"), _method(mitigation)), data, output, training, settings, as_json)


@app.command()
@_training_options
@with_settings("model", "device")
def distill(
    data: Data,
    output: Out,
    training: TrainSettings,
    settings: Settings,
    mitigation: Method = "none",
    anchor: Annotated[float, typer.Option("--anchor", min=0, help="Weigh the divergence at the best position.")] = 1.0,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.1, help="Divide the logits of both models by this.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Distil the answers at the best position into all.

    The teacher is the untrained model with the gold passage at its best position. The same command continues after an
    interruption.
    """
    from rag_posfix.lab.training.objectives import Distill

    _run(Distill(_method(mitigation), anchor, temperature), data, output, training, settings, as_json)


def _method(text: str) -> Mitigation:
    from rag_posfix.mitigations import create

    choice = checked_choice(text)
    return create(choice.name, choice.parameters)


def _run(
    objective: Objective, data: Path, output: Path, training: TrainSettings, settings: Settings, as_json: bool
) -> None:
    from rag_posfix.generation.load import source_of
    from rag_posfix.lab.training.loop import tune

    if settings.adapter is not None:
        raise ConfigError(
            f"adapter={str(settings.adapter)!r} is set, and training adds an adapter; unset RAG_POSFIX_ADAPTER"
        )
    settings = settings.model_copy(update={"dtype": training.dtype if training.rank else "float32"})
    engine = open_engine(settings)
    teacher = open_engine(settings).loaded if objective.needs_teacher and not training.rank else None
    base = source_of(settings.model, settings.cache_dir)
    record = tune(
        engine, objective, data, training, output, base=base, teacher=teacher, progress=experiment_step
    )  # fmt: skip
    emit(record.to_json(), as_json, show_training)


def show_training(summary: dict[str, Any]) -> None:
    from rag_posfix.lab.training.loop import CAPTION

    title = (
        f"{summary['objective']}: log-probability per token on held-out samples, step {summary['best_step']} was best"
    )
    rows = table("method", "", "by position, from first to last", "worst", title=title)
    for name in summary["before"]["log_probability"]:
        for phase in ("before", "after"):
            curve = summary[phase]["log_probability"][name]
            rows.add_row(name, phase, " ".join(f"{value:.2f}" for value in curve), f"{min(curve):.2f}")
    out().print(rows)
    say_figure(summary, CAPTION)
    say_files(summary, "adapter", "model", "record", "svg")


@app.command()
@with_settings("model", "device")
def forgetting(
    tuned: Annotated[
        list[Path], typer.Option("--tuned", help="Measure this adapter or model folder; may be repeated.")
    ],
    texts: Annotated[str, typer.Option("--texts", help="Read a file, a folder of texts, an index, or demo.")],
    output: Annotated[Path, out_option("Write the record here.")],
    settings: Settings,
    limit: Annotated[int, typer.Option("--limit", min=2, help="Use at most this many texts.")] = 100,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Use at most this many tokens of a text.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Compare perplexity before and after training.

    Shows what a model forgot. Give texts that have nothing to do with the training data. A text is at most 300 words
    of a document.
    """
    from rag_posfix.lab.training.data.pairs import read_segments
    from rag_posfix.lab.training.objectives import BASE, compare_perplexity

    segments = [segment.text for segment in read_segments(texts, SEGMENT_WORDS)][:limit]
    engines = {BASE: open_engine(settings.model_copy(update={"adapter": None}))}
    for folder in tuned:
        is_adapter = (folder / "adapter_config.json").exists()
        change = {"adapter": folder} if is_adapter else {"adapter": None, "model": str(folder)}
        name = f"./{folder}" if str(folder) == BASE else str(folder)  # else it would stand for the model before
        engines[name] = open_engine(settings.model_copy(update=change))
    record = compare_perplexity(engines, segments, tokens, output, experiment_step)

    def show(summary: dict[str, Any]) -> None:
        rows = table(
            "model", "perplexity", "log-probability per token, less base", "95 % interval", title="forgetting"
        )
        for name, scores in record.summary.items():
            low, high = scores["difference_ci95"]
            interval = f"{low:+.3f} to {high:+.3f}"
            rows.add_row(name, f"{scores['perplexity']:.2f}", f"{scores['difference']:+.3f}", interval)
        out().print(rows)
        say_files(summary, "record")

    emit(record.to_json(), as_json, show)
