"""A request on its way to a replica, with what routers read of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rag_posfix.contracts.request import GenerationRequest
from rag_posfix_api.ray_serve.sketch import marked_passages

_FIRST_CHARACTER = 0x10000
"""The characters from here on are whole code points, none of them half of a pair."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request and its routing information.

    Attributes:
        request: What the replica answers.
        passages: Number of tokens of each passage, by mark.
    """

    request: GenerationRequest
    passages: Mapping[int, int]

    @classmethod
    def of(cls, request: GenerationRequest) -> RoutedRequest:
        """Return ``request`` with its passages marked."""
        return cls(request, marked_passages(request))

    @property
    def prompt(self) -> str:
        """The prompt with one character for each token: what Ray's ``PrefixCacheAffinityRouter`` compares."""
        return "".join(chr(_FIRST_CHARACTER + token) for token in self.request.layout.token_ids)
