"""The name under which an answer is kept: everything that can change the answer, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from rag_posfix.text import content_hash

__all__ = ["SCHEMA_VERSION", "AnswerKey", "tenant_salt"]

SCHEMA_VERSION = 1
"""Raise it when the stored answers or their meaning change: older entries then are misses."""


def tenant_salt(*tenants: str) -> str:
    """Return the salt of a tenant: of the process's own and the question's, "" if neither says one."""
    return repr(tenants) if any(tenants) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerKey:
    """What an answer depends on.

    Attributes:
        model: Fingerprint of the weights and their dtype.
        template: Hash of the prompt template.
        assembly: Fingerprint of how passages are chosen, ordered and cut.
        mitigation: Fingerprint of the mitigation and its parameters.
        sampling: Fingerprint of how tokens are chosen.
        question: The question.
        history: The turns before the question, serialised; empty without any.
        documents: Content hashes of the passages, in the order of the prompt.
        order_invariant: Whether the mitigation answers the same for every order of the passages. The hashes are
            then sorted, so that a shuffled context is the same key.
        tenant: Salt that keeps the answers of tenants apart.
    """

    model: str
    template: str
    assembly: str
    mitigation: str
    sampling: str
    question: str
    documents: tuple[str, ...]
    order_invariant: bool
    history: str = ""
    tenant: str = ""

    def digest(self) -> str:
        """Return the key as 32 hexadecimal digits."""
        documents = sorted(self.documents) if self.order_invariant else self.documents
        return content_hash(
            f"answer-v{SCHEMA_VERSION}",
            self.model,
            self.template,
            self.assembly,
            self.mitigation,
            self.sampling,
            self.question,
            self.history,
            self.tenant,
            str(self.order_invariant),
            *documents,
        )
