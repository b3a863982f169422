"""How the settings of passage_answers and context_experts were chosen: each prompt is read once, every rule compared.

    python -m benchmarks.expert_choice --out FOLDER litm=nq-open-20docs-gold-first.jsonl.gz:110:32 xquad=...:316:24

Each prompt is read once: every row writes its short answer, every row scores every answer and the right one; then all
rules are compared on what was written down. No rule knows which passage is right; that only tells what it believed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.expert_rules import RULES, Row, judge
from rag_posfix.assembly.assembler import Assembler
from rag_posfix.cli.options import parse_choice
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.evaluation.answers.answering import best_subspan_em, first_line
from rag_posfix.evaluation.data.datasets import load_examples
from rag_posfix.evaluation.data.position_example import PositionExample
from rag_posfix.evaluation.record import environment, file_digest, write_record
from rag_posfix.generation.decode.drafts import AnswerText
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import create
from rag_posfix.pipeline.build import build_embeddings, build_engine
from rag_posfix.plan.draft import Draft, Drafts
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan, RowScores
from rag_posfix.reranking.embedding import EmbeddingReranker
from rag_posfix.settings import Settings

DOCUMENTS, TOKENS, GOLD_POSITION = 10, 24, 4
EXPERTS = [  # scored
    f"context_experts:contrast={contrast}:relevance_weight={weight}:relevance={relevance}"
    for contrast, weight in itertools.product((0.0, 0.3, "divergence"), (2.5, 5.0, 10.0))
    for relevance in ("question", "both")
]
PUBLISHED = "context_experts:pool=max:hold=0:relevance=given:relevance_weight=2.5:contrast="
EXPERTS += [PUBLISHED + contrast for contrast in ("0", "0.3", "divergence")]
WRITTEN = [  # generated too
    "context_experts",
    "context_experts:relevance=both",
    "context_experts:contrast=divergence",
    "passage_answers:pool=mixture:relevance_weight=5",
]


def read(engine: Engine, reranker: EmbeddingReranker, example: PositionExample) -> Row:
    """Return what the rows of one question write and say."""
    scored = {str(d.id): d for d in reranker.compress_documents(example.documents(DOCUMENTS, 0), example.question)}
    documents = [scored[str(d.id)] for d in example.documents(DOCUMENTS, GOLD_POSITION)]
    assembler = Assembler(engine.encoder, engine.context_window)
    layout = assembler.assemble(example.question, documents, order="original", max_new_tokens=TOKENS).layout
    drafted: list[Drafts] = []
    steps: list[RowScores] = []

    def choose(drafts: Drafts) -> Tensor:
        drafted.append(drafts)
        return torch.ones(len(drafts.tokens)) / len(drafts.tokens)

    def combine(scores: RowScores) -> tuple[Tensor, Tensor]:
        steps.append(scores)
        return scores.log_probs[0], torch.ones(len(scores.answer))

    rows = _plan(MitigationChoice("context_experts"), layout, engine).rows
    plan = Plan(rows, combine, independent_passages=True, score_question=True, draft=Draft(TOKENS, choose))
    text = AnswerText(engine.encoder.eos_ids, engine.encoder.decode_answer)
    session, gold = Session(engine.loaded, layout, plan, text), engine.encoder.encode_text(example.answers[0])
    session.score(gold)
    drafts, order = drafted[0], [row.passages[0] for row in rows if row.passages]
    answers = [engine.encoder.decode_answer(tokens) for tokens in drafts.tokens]
    relevance = [(layout.relevance or (1.0,) * len(order))[i] for i in order]
    experts = {}
    for name in EXPERTS:
        merge = _plan(parse_choice(name), layout, engine).combine or combine
        experts[name] = sum(float(merge(s)[0][t]) for s, t in zip(steps, gold, strict=True)) / len(gold)
    texts = {name: written(engine, layout, session, drafts, parse_choice(name)) for name in WRITTEN}
    return {
        "id": example.id, "answers": answers, "gold_row": order.index(GOLD_POSITION), "gold_tokens": len(gold),
        "length": torch.tensor([max(1.0, len(tokens)) for tokens in drafts.tokens[:-1]]),
        "said": drafts.log_probs, "same": drafts.same, "question": drafts.question[:-1],
        "given": torch.tensor(relevance).clamp(min=0.01).log(),
        "gold": sum((s.log_probs[:, t] for s, t in zip(steps, gold, strict=True)), torch.zeros(len(rows)))[:-1],
        "right": torch.tensor([best_subspan_em(first_line(a.lstrip()), example.answers) for a in answers[:-1]]),
        "experts": experts, "written": texts,
        "written_right": {n: best_subspan_em(first_line(a), example.answers) for n, a in texts.items()},
    }  # fmt: skip


def _plan(choice: MitigationChoice, layout: Layout, engine: Engine) -> Plan:
    return create(choice.name, choice.parameters).checked_plan(layout, engine.loaded.spec.shape)


def written(engine: Engine, layout: Layout, read_once: Session, drafts: Drafts, choice: MitigationChoice) -> str:
    """Return the greedy answer under a mitigation with the same rows, without reading them again."""
    plan = _plan(choice, layout, engine)
    session = copy.copy(read_once)
    session._plan = plan
    session._weights = plan.draft.choose(drafts) if plan.draft else None
    session._batches = [batch.branch() for batch in read_once._batches]
    request = GenerationRequest(layout, choice, Sampling(max_tokens=TOKENS))
    return [chunk.generation for chunk in engine.resume(session, request) if chunk.generation][-1].text


def summary(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return the mean of every rule and of every variant of context_experts over the questions."""
    mean = {
        key: {n: sum(r[key][n] for r in rows) / len(rows) for n in rows[0][key]}
        for key in ("experts", "written_right")
    }
    oracle = judge(rows, lambda row: torch.nn.functional.one_hot(torch.tensor(row["gold_row"]), DOCUMENTS) * 1e6)
    return {
        "n": len(rows), "gold_only": oracle, "rules": {name: judge(rows, rule) for name, rule in RULES.items()},
        "context_experts_log_probability": mean["experts"], "accuracy_of_written_answers": mean["written_right"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("data", nargs="+", help="NAME=FILE:SKIP:LIMIT")
    options = parser.parse_args()
    settings = Settings()
    engine, reranker = build_engine(settings), EmbeddingReranker(embeddings=build_embeddings(settings))
    data: dict[str, Any] = {}
    summaries: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    for argument in options.data:
        name, _, source = argument.partition("=")
        path, skip, limit = source.rsplit(":", 2)
        rows = []
        for example in load_examples(Path(path), skip=int(skip), limit=int(limit)):
            rows.append(read(engine, reranker, example))
            print(name, len(rows), example.question, flush=True)
        lines += [
            {"set": name, **{k: v.tolist() if isinstance(v, Tensor) else v for k, v in row.items()}} for row in rows
        ]
        data[name] = {"name": Path(path).name, "sha256": file_digest(Path(path)), "skip": int(skip)}
        summaries[name] = summary(rows)
    head = {"kind": "expert-choice", **environment(), "model": engine.model_id, "data": data, "summary": summaries}
    write_record(options.out, "expert-choice", head, lines)


if __name__ == "__main__":
    main()
