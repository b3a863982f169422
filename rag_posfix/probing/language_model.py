"""A loaded language model as the subject of probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.evaluation.record import model_facts
from rag_posfix.generation.engine import Engine
from rag_posfix.patching.forward_context import ForwardContext, Overrides, active
from rag_posfix.probing.subject import Change, Subject, Watch
from rag_posfix.probing.watched_attention import WatchedAttention


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel:
    """A loaded language model that probes read. Implements ``Subject``.

    Attributes:
        engine: The model with its tokenizer.
    """

    engine: Engine

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.engine.loaded.spec.shape.n_layers

    @property
    def n_heads(self) -> int:
        """Number of query heads of a layer."""
        return self.engine.loaded.spec.shape.n_heads

    @property
    def width(self) -> int:
        """Channels of a hidden state."""
        return self.engine.loaded.spec.shape.hidden_size

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.engine.loaded.model.config.get_text_config().vocab_size)

    @property
    def longest(self) -> int:
        """The context window."""
        return self.engine.context_window

    def facts(self) -> Mapping[str, Any]:
        """Return name, fingerprint, dtype and device."""
        return model_facts(self.engine)

    @torch.inference_mode()
    def read(self, ids: Tensor, watch: Watch = Watch(), change: Change = Change(), keep: int = 1) -> Tensor:  # noqa: B008
        """Read tokens in one pass without a cache; see ``Subject.read``.

        Without anything to watch or change in attention the model's own attention runs.
        """
        at = torch.arange(ids.shape[1]) if change.positions is None else change.positions
        loaded = self.engine.loaded.reading(int(at.max()) + 1)
        ids = ids.to(loaded.device)
        positions = at.to(loaded.device)[None].expand(ids.shape[0], -1)
        overrides = Overrides(hidden_scale=change.hidden_scale)
        if watch.attention or change.attention:
            self._needs_all_keys()
            overrides = Overrides(attend=WatchedAttention(watch, change), hidden_scale=change.hidden_scale)
        context = ForwardContext(
            overrides, positions.float(), loaded.spec, prompt_length=change.prompt_length,
            on_hidden_states=watch.inputs,
            # Several newest queries are aligned with the last keys; a mask of the model's own is made for all queries.
            starts=(0,) * ids.shape[0] if change.hidden_scale is not None and loaded.keeps_all_keys else None,
        )  # fmt: skip
        with active(context):
            output = loaded.model(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep,
                output_hidden_states=watch.states is not None,
            )  # fmt: skip
        if watch.states is not None:  # the last of them comes after the last norm, and enters no layer
            for layer, states in enumerate(output.hidden_states[:-1]):
                watch.states(layer, states)
        logits: Tensor = output.logits.float()
        return logits

    def _needs_all_keys(self) -> None:
        if not self.engine.loaded.keeps_all_keys:
            raise UnsupportedModelError(
                f"the attention of {self.engine.model_id} cannot be probed: some of its layers see a window of the "
                "last tokens only; choose a model whose every layer sees all tokens"
            )


def language_model(subject: Subject, probe: str) -> LanguageModel:
    """Return the subject if it is a language model."""
    if not isinstance(subject, LanguageModel):
        raise UnsupportedModelError(
            f"the probe {probe} reads text, and a small decoder has no tokenizer; give a language model with --model"
        )
    return subject
