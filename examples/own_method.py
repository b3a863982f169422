"""A mitigation of your own: registered by the application, found by name everywhere.

The method reads the passages sorted by relevance, the best one last, next to the question. Equal relevance is ordered
by content, so the answer does not depend on the order in which the passages arrive.
"""

from contextlib import closing
from dataclasses import dataclass

from langchain_core.documents import Document

from rag_posfix import MitigationChoice, Question, build_pipeline
from rag_posfix.mitigations import MITIGATIONS, Mitigation
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import ModelShape, Plan, RowPlan


@MITIGATIONS.register("best_last")
@dataclass(frozen=True)
class BestLast(Mitigation):
    """Read the passages sorted by relevance, the best one last."""

    name = "best_last"
    order_invariant = True

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row: one sequence that the model reads."""
        relevance = layout.relevance or (0.5,) * layout.n_passages
        order = sorted(range(layout.n_passages), key=lambda i: (relevance[i], layout.keys[i]))
        return Plan(rows=(RowPlan(passages=tuple(order)),))


DOCUMENTS = [
    Document("The Torvane lighthouse was designed by Anders Wick and first lit in 1883."),
    Document("The Maravel lighthouse was designed by Ilse Korvanth and first lit in 1871."),
    Document("The Brenholt lighthouse was designed by Jonas Aldring and first lit in 1902."),
]


def main() -> None:
    """Ask in two orders, the unmodified model and the new method."""
    with closing(build_pipeline()) as rag:
        for method in ("none", "best_last"):
            print(method)
            for documents in (DOCUMENTS, DOCUMENTS[::-1]):
                asked = Question(
                    "Who designed the Brenholt lighthouse?",
                    documents=documents,
                    mitigation=MitigationChoice(method),
                    order="original",
                    use_cache=False,
                )
                print(f"  {rag.ask(asked).text}")


if __name__ == "__main__":
    main()
