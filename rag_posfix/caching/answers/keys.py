"""The key of an answer in the cache: a hash of everything that can change the answer, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from rag_posfix.text import content_hash

SCHEMA_VERSION = 4
"""Part of every key. Increase it when stored entries or their meaning change: older entries are then misses."""


def tenant_salt(*tenants: str) -> str:
    """Return the salt that separates the entries of tenants, "" if no tenant is named.

    Args:
        tenants: The tenants of the process's settings and of the question; "" for none.
    """
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
        order_invariant: Whether the mitigation gives the same answer for every order of the passages. The hashes are
            then sorted, so that shuffled passages give the same key.
        tenant: Salt that separates the answers of tenants.
        filter: ``filter_key`` of the filter that the passages were retrieved under: answers of one set of permissions
            are never given to another. Empty without a filter.
        traced: Whether the stored answer has citations by attention.
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
    filter: str = ""
    traced: bool = True

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
            self.filter,
            str(self.traced),
            str(self.order_invariant),
            *documents,
        )
