"""Common parts of the answer experiments: arrangements, loaded models, and the head of the record."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_posfix.assembly.orders import ORDERS, create_order
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import PROMPT_VERSION
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import GIVEN_ORDER, MethodSpec, parse_method, read_arrangement
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.questions import PositionExample, data_facts
from rag_posfix.evaluation.record import Progress, environment, model_facts
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.reranking import RERANKERS
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from rag_posfix.generation.engine import Engine

__all__ = ["Arrangement", "check_arrangements", "parse_arrangement"]

OWN_SCORER = ""
"""Label of the experiment's own scorer, for arrangements that name none."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Reranker, order and method together, as a user runs them.

    Attributes:
        mitigation: The method that reads the prompt.
        order: The order of the passages in the prompt; ``original`` leaves them as the experiment puts them.
        reranker: What scores the passages; None is the experiment's own scorer. ``top_n`` keeps the best few.
    """

    mitigation: MethodSpec
    order: str = GIVEN_ORDER
    reranker: MethodSpec | None = None

    @property
    def scorer(self) -> str:
        """Label of what scores the passages; empty for the experiment's own scorer."""
        return OWN_SCORER if self.reranker is None else self.reranker.label

    @property
    def label(self) -> str:
        """Text that ``parse_arrangement`` reads back; the label of the method for a bare method."""
        if self.reranker is None and self.order == GIVEN_ORDER:
            return self.mitigation.label
        scorer = "" if self.reranker is None else _reranker_label(self.reranker)
        return f"{scorer}/{self.order}/{self.mitigation.label}"

    @property
    def order_free(self) -> bool:
        """Whether the answer does not depend on the order in which the passages were given.

        Either the method does not depend on the order, or the order in the prompt follows from scores and content.
        Scores do not depend on the given order where a reranker reads all passages (``window``).
        """
        if create(self.mitigation.name, self.mitigation.parameters).is_order_invariant:
            return True
        return ORDERS.get(parse_method(self.order, "order", "slots=[0.4,0.2,0.4]").name).by_content


def parse_arrangement(text: str) -> Arrangement:
    """Read ``reranker/order/method``, each ``name`` or ``name:parameter=value``.

    A bare method keeps the default reranker and order. An empty reranker is the experiment's own scorer, an empty
    order ``original``. ``likelihood+embedding`` fuses. Nothing is looked up, and no file is read.

    Raises:
        ConfigError: two parts or more than three, or a part that cannot be read.
    """
    reranker, order, mitigation = read_arrangement(text)
    return Arrangement(mitigation, order, reranker)


def with_baselines(arrangements: Sequence[Arrangement]) -> list[Arrangement]:
    """Return the arrangements, and for each of their scorers the plain prompts that a method has to beat.

    All passages best first, best last and with the best at both ends; the best 1, 3 and 5 alone; all passages twice,
    and the best once more at the end. The experiment's own scorer is ``embedding`` where passages are selected. A
    scorer that selects, such as ``yes_no:top_n=3``, sorts all passages here.
    """
    result, plain = list(arrangements), MethodSpec("none")
    scorers = [_without_selection(arrangement.reranker) for arrangement in arrangements]
    for scorer in {"" if scorer is None else scorer.label: scorer for scorer in scorers}.values():
        selecting = scorer or MethodSpec("embedding")
        result += [
            *(Arrangement(plain, order, scorer) for order in ("relevance", "reverse", "ends_first")),
            *(
                Arrangement(plain, "reverse", MethodSpec(selecting.name, {**selecting.parameters, "top_n": count}))
                for count in (1, 3, 5)
            ),
            *(
                Arrangement(MethodSpec("repeated_passages", {"repeat": repeat}), "relevance", scorer)
                for repeat in ("all", "best")
            ),
        ]
    return list({arrangement.label: arrangement for arrangement in result}.values())


def _without_selection(scorer: MethodSpec | None) -> MethodSpec | None:
    if scorer is None:
        return None
    selection = getattr(RERANKERS.get(scorer.name), "selection", ())
    return MethodSpec(scorer.name, {name: value for name, value in scorer.parameters.items() if name not in selection})


def check_arrangements(choices: Sequence[MethodSpec | Arrangement]) -> list[Arrangement]:
    """Return methods and arrangements as arrangements, checked before a model is loaded.

    Raises:
        ConfigError: an unknown name or parameter, a value outside of what is allowed, or an arrangement twice.
    """
    arrangements = [choice if isinstance(choice, Arrangement) else Arrangement(choice) for choice in choices]
    for index, arrangement in enumerate(arrangements):
        MITIGATIONS.check(arrangement.mitigation)
        create_order(arrangement.order)
        if arrangement.reranker is not None:
            RERANKERS.check(arrangement.reranker)
        if arrangement in arrangements[:index]:
            raise ConfigError(f"{arrangement.label!r} occurs twice with the same parameters; remove one of them")
    return arrangements


def arrangement_rerankers(
    arrangements: Sequence[Arrangement], engine: Generator, settings: Settings | None
) -> dict[str, Reranker]:
    """Return the rerankers that ``arrangements`` name, by label; ``settings`` name their embeddings."""
    from rag_posfix.pipeline.build import build_embeddings, model_loader
    from rag_posfix.pipeline.retrievers_and_servers import connect_with
    from rag_posfix.reranking.build import RerankerModels, build_reranker

    specs = {choice.reranker.label: choice.reranker for choice in arrangements if choice.reranker is not None}
    settings = settings or Settings()
    embeddings = functools.cache(lambda: build_embeddings(settings))
    models = RerankerModels(embeddings, lambda: engine, connect_with(settings), model_loader(settings))
    return {label: build_reranker(spec, models) for label, spec in specs.items()}


def load_models(
    arrangements: Sequence[Arrangement],
    engine: Generator | None,
    reranker: Reranker | None,
    settings: Settings | None,
    progress: Progress,
) -> tuple[Generator, Reranker, str]:
    """Return the model, the reranker that scores the passages, and the name of the reranker in the record.

    Args:
        reranker: Scores the passages; if None, the embeddings of ``settings``.
    """
    relevance = type(reranker).__name__
    if engine is None or reranker is None:
        chosen = settings or Settings()
        with progress("loading the model and the embeddings"):
            from rag_posfix.pipeline.build import build_embeddings, build_generator
            from rag_posfix.reranking.embedding import EmbeddingReranker

            engine = engine or build_generator(chosen)
            if reranker is None:
                reranker, relevance = EmbeddingReranker(embeddings=build_embeddings(chosen)), chosen.embedding_model
    for arrangement in arrangements:
        engine.describe(arrangement.mitigation)
    return engine, reranker, relevance


def with_passages_kept(engine: Generator, max_bytes: int) -> Engine:
    """Return the engine with a passage KV store in memory, so that the next condition reuses passages of this one."""
    from rag_posfix.caching.kv.store import PassageStore
    from rag_posfix.caching.memory import MemoryTier
    from rag_posfix.generation.engine import Engine

    if not isinstance(engine, Engine):
        raise ConfigError(f"reuse keeps keys and values in this process, and {engine.model_id} is on a server")
    return engine.with_passages(PassageStore([MemoryTier(max_bytes)]))


def engine_facts(engine: Generator, arrangements: Sequence[Arrangement]) -> dict[str, Any]:
    """Return what the head of a record says of ``engine``, and under ``mitigations`` of ``arrangements`` on it."""
    mitigations = {
        arrangement.label: {
            "parameters": arrangement.mitigation.parameters,
            "fingerprint": engine.describe(arrangement.mitigation).fingerprint,
            "order": arrangement.order,
            "reranker": None if arrangement.reranker is None else arrangement.reranker.label,
            "order_free": arrangement.order_free,
        }
        for arrangement in arrangements
    }
    return {**environment(), **model_facts(engine), "mitigations": mitigations}


def answers_head(
    kind: str,
    facts: Mapping[str, Any],
    data: Path | Sequence[PositionExample],
    settings: Mapping[str, Any],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the head of the record: versions, model, data, prompts, settings and summary."""
    return {
        "kind": kind,
        **{name: value for name, value in facts.items() if name != "mitigations"},
        "data": data_facts(data),
        "template": PromptTemplate().fingerprint(),
        "prompt_version": PROMPT_VERSION,
        "mitigations": facts["mitigations"],
        "settings": settings,
        "summary": summary,
    }


def _reranker_label(spec: MethodSpec) -> str:
    scorers = spec.parameters.get("scorers")
    if spec.name != "fused" or not isinstance(scorers, list) or not all(isinstance(name, str) for name in scorers):
        return spec.label
    parameters = {name: value for name, value in spec.parameters.items() if name != "scorers"}
    return MethodSpec("+".join(scorers), parameters).label
