"""Probe of the attention heads that find a passage: how well each head's question attention ranks the gold passage.

Depends on loaded models, layouts and evaluation data, on no method.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.assembly.documents import checked_document
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import tokenize_passage, tokenize_prompt
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import PositionExample, data_facts, take_examples
from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column, whiskers, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, counted, environment, silent
from rag_posfix.generation.decode.question_scores import question_attention_by_head
from rag_posfix.generation.engine import Engine
from rag_posfix.lab.probing.base import PROBES, Probe, ProfileRecord, estimate, shown
from rag_posfix.lab.probing.subject import Subject, language_model
from rag_posfix.parameters import Integer
from rag_posfix.plan.layout import Layout
from rag_posfix.reranking.in_context import CONTENT_FREE, INSTRUCTION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CUT = 10
"""Ranks beyond this one count nothing."""


def probe_retrieval_heads(
    engine: Engine,
    data: Path | Sequence[PositionExample],
    *,
    documents: int = 10,
    limit: int | None = 40,
    skip: int = 0,
    keep: int = 8,
    seed: int = 0,
    out: Path | None = None,
    progress: Progress = silent,
) -> ProfileRecord:
    """Rank the heads of a model by how well their question-to-passage attention finds the gold passage.

    Source: QRHead (2025), section 3, https://arxiv.org/abs/2506.09944: heads are ranked by nDCG@10 of the gold passage
        among shuffled passages, and the best few are used for reranking.
    Formula: score of passage k in head h = the sum over its tokens i of A_h(question, i) - A_h("N/A", i), A_h averaged
        over the tokens of the query part; gain of h = mean over questions of 1 / log2(1 + rank of the gold passage), 0
        beyond rank 10. Of several gold passages the best one is ranked, among the passages that are not gold.
    Differs from the paper: the prompt is that of ``in_context``; the number of heads is ``keep``.
    Cost: each prompt is read once, and its query part twice; (L, Hq, T) numbers per prompt.

    Args:
        data: A file of Lost-in-the-Middle or HotpotQA rows or in SQuAD's format, or questions.

    Returns:
        The record, whose head holds the list that ``in_context`` reads.
    """
    examples = take_examples(data, limit, skip)
    if documents < 2 or len(examples) < 2:
        raise ConfigError(
            f"{len(examples)} questions with {documents} passages rank no heads; give two or more of each"
        )
    _check_passages(examples, documents)
    with progress("reading prompts") as report:
        scores, gold = passage_scores(engine, examples, documents, seed, report)
    heads, gains = best_heads(scores, gold, keep)
    by_question, held_out = gains_by_question(scores, gold), _held_out(scores, gold, keep)
    record = {
        "heads": [list(head) for head in heads],
        "gains": gains,
        "gains_ci95": [estimate(by_question[:, layer, head])["ci95"] for layer, head in heads],
        "held_out": {name: recall["value"] for name, recall in held_out.items()},
        "held_out_ci95": {name: recall["ci95"] for name, recall in held_out.items()},
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "data": data_facts(data),
        "settings": {"documents": documents, "limit": limit, "skip": skip, "keep": keep, "seed": seed},
        "n": len(examples),
        "environment": environment(),
    }
    printed = {name: name for name in ("heads", "gains", "held_out", "n")}
    return ProfileRecord(record, printed=printed).write_profile(out, "retrieval-heads")


@PROBES.register("retrieval-heads")
@dataclass(frozen=True)
class RetrievalHeads(Probe):
    """Rank attention heads; write a list for the reranker in_context.

    Source: QRHead (2025), section 3, https://arxiv.org/abs/2506.09944
    Formula: see ``probe_retrieval_heads``.

    Args:
        data: Read questions from this file; .gz or plain.
        documents: Number of passages per prompt.
        limit: Maximum number of questions.
        skip: Number of questions to leave out at the start.
        heads: Number of heads in the list.
        seed: Seed of the order of the passages.
    """

    name: ClassVar[str] = "retrieval-heads"
    caption: ClassVar[str] = (
        "How well the question's attention in each of the best heads ranks the gold passage; do not conclude that "
        "they are as good on other questions, which only the held-out recall tells."
    )
    reads_text: ClassVar[bool] = True

    data: Path
    documents: Annotated[int, Integer(2)] = 10
    limit: Annotated[int, Integer(2)] = 40
    skip: Annotated[int, Integer(0)] = 0
    heads: Annotated[int, Integer(1)] = 8
    seed: int = 0

    def check(self) -> None:
        """Check that the file has questions with so many passages."""
        _check_passages(take_examples(self.data, self.limit, self.skip), self.documents)

    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Return the record of ``probe_retrieval_heads``, with a figure."""
        engine = language_model(subject, self.name).engine
        profile = probe_retrieval_heads(
            engine, self.data, documents=self.documents, limit=self.limit, skip=self.skip, keep=self.heads,
            seed=self.seed, out=out, progress=progress,
        )  # fmt: skip
        return with_figure(profile, self.draw, self.caption)

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return a bar per head."""
        figure, (axes,) = new_column(1)
        names = [f"{layer}.{head_index}" for layer, head_index in head["heads"]]
        measured = [
            {"value": gain, "ci95": ci95} for gain, ci95 in zip(head["gains"], head["gains_ci95"], strict=True)
        ]
        axes.bar(range(len(names)), head["gains"], yerr=whiskers(measured), color=OTHER_COLORS[1], ecolor="#222222")
        axes.set_xticks(range(len(names)), names, fontsize=9)
        title = f"best heads of {head['n']} questions, 95 % interval"
        finish_axes(axes, title, "layer.head", "gain (nDCG@10)", legend=False)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per head."""
        rows = [
            (str(layer), str(head_index), shown({"value": gain, "ci95": ci95}))
            for (layer, head_index), gain, ci95 in zip(head["heads"], head["gains"], head["gains_ci95"], strict=True)
        ]
        return [("layer", "head", f"gain (nDCG@10), n = {head['n']}"), *rows]

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return the recall of the heads together, and how the list is used."""
        path, head = record.files["profile"], record.head
        recalls = [
            shown({"value": value, "ci95": head["held_out_ci95"][name]}) for name, value in head["held_out"].items()
        ]
        return [
            f"together, on questions that they were not chosen on: recall@1 {recalls[0]}, recall@3 {recalls[1]}, "
            f"n = {head['n']}",
            f"list: {path}",
            f"to use it: --reranker in_context:heads={path}",
        ]


def _check_passages(examples: Sequence[PositionExample], count: int) -> None:
    """Check that questions have so many passages, of which one at least is not gold: it is what others are among."""
    for example in examples:
        example.documents(count)
        if count <= len(example.gold):
            raise EvaluationError(
                f"question {example.id}: documents={count} leave no passage beside its {len(example.gold)} gold ones "
                "to rank them with; use more documents"
            )


def passage_scores(
    engine: Engine,
    examples: Sequence[PositionExample],
    count: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the score of each passage in each head, and which passages are gold.

    Args:
        count: Number of passages per prompt; they are shuffled.

    Returns:
        (Q, L, Hq, N) float32 and (Q, N) bool.
    """
    prompts = [_prompt(engine, example, count, seed) for example in examples]  # too long ones are told at once
    scores = []
    for layouts, _ in counted(prompts, progress):
        loaded = engine.loaded.reading(max(len(layout.token_ids) for layout in layouts))
        content_free, question = question_attention_by_head(loaded, layouts)
        spans = [
            slice(span.start, text.stop) for span, text in zip(layouts[0].passages, layouts[0].texts, strict=True)
        ]
        scores.append(torch.stack([(question[..., s] - content_free[..., s]).sum(dim=-1) for s in spans], dim=-1))
    return torch.stack(scores), torch.tensor([gold for _, gold in prompts])


def _prompt(engine: Engine, example: PositionExample, count: int, seed: int) -> tuple[list[Layout], list[bool]]:
    """Return a prompt of shuffled passages, without and with its question, and which of the passages are gold."""
    template = PromptTemplate(question_prefix=INSTRUCTION, answer_cue="")
    documents, order = example.documents(count), list(range(count))
    random.Random(f"{seed}:{example.id}").shuffle(order)
    checked = [checked_document(documents[index], with_relevance=False) for index in order]
    passages = [
        tokenize_passage(engine.encoder, template, document.text, title=document.title) for document in checked
    ]
    prompts = [tokenize_prompt(engine.encoder, template, query) for query in (CONTENT_FREE, example.question)]
    layouts = [prompt.with_passages(passages) for prompt in prompts]
    tokens = max(len(layout.token_ids) for layout in layouts)
    if tokens > engine.context_window:
        raise EvaluationError(
            f"question {example.id}: {count} passages make a prompt of {tokens} tokens, the context of this model has "
            f"{engine.context_window}; use fewer documents"
        )
    return layouts, [index < len(example.gold) for index in order]


def gold_ranks(scores: Tensor, gold: Tensor) -> Tensor:
    """Return the rank of the best gold passage among those that are not gold, from 1; it comes after equal scores.

    Shapes:
        scores: (Q, ..., N). gold: (Q, N) bool, one or more of each row. returns: (Q, ...).
    """
    is_gold = gold.view(len(gold), *[1] * (scores.ndim - 2), -1)
    best = scores.masked_fill(~is_gold, -torch.inf).amax(dim=-1, keepdim=True)
    return 1 + ((scores >= best) & ~is_gold).sum(dim=-1)


def best_heads(scores: Tensor, gold: Tensor, keep: int) -> tuple[list[tuple[int, int]], list[float]]:
    """Return the ``keep`` heads with the largest gain as (layer, head), and their gains.

    Shapes:
        scores: (Q, L, Hq, N). gold: (Q, N) bool.
    """
    gains = gains_by_question(scores, gold).mean(dim=0)  # (L, Hq)
    order = gains.flatten().argsort(descending=True, stable=True)[:keep].tolist()
    heads = [divmod(index, gains.shape[1]) for index in order]
    return heads, [float(gains[head]) for head in heads]


def gains_by_question(scores: Tensor, gold: Tensor) -> Tensor:
    """Return 1 / log2(1 + the rank of ``gold_ranks``) of each question and head, 0 beyond ``CUT``, (Q, L, Hq)."""
    ranks = gold_ranks(scores, gold)
    return torch.where(ranks <= CUT, 1 / torch.log2(1 + ranks.float()), 0.0)


def _held_out(scores: Tensor, gold: Tensor, keep: int) -> dict[str, dict[str, Any]]:
    """Return the recall of the summed heads, each half of the questions with the heads chosen on the other half."""
    ranks = []
    for chosen, reported in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        heads, _ = best_heads(scores[chosen], gold[chosen], keep)
        together = torch.stack([scores[reported, layer, head] for layer, head in heads]).sum(dim=0)  # (Q, N)
        ranks.append(gold_ranks(together, gold[reported]))
    all_ranks = torch.cat(ranks)
    return {f"recall_at_{k}": estimate((all_ranks <= k).double()) for k in (1, 3)}
