"""The generation config of a checkpoint: the tokens that end an answer, and settings that are not applied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "top_h", "repetition_penalty", "guidance_scale"), (1.0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "length_penalty"), (1.0,)),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("do_sample", "early_stopping", "token_healing", "renormalize_logits"), (False,)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (1,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_decoder_ids"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("sequence_bias", "watermarking_config", "stop_strings", "max_length", "max_new_tokens"), ()),
    **dict.fromkeys(("max_time",), ()),
}
"""Settings that change the answers of transformers' ``generate``, and the values with which they do not."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The generation config of a checkpoint.

    Attributes:
        eos_ids: Tokens that end an answer.
        ignored: Settings that would change answers and are not applied: how tokens are chosen is up to each request.
    """

    eos_ids: frozenset[int]
    ignored: Mapping[str, Any]


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return what ``generation_config.json`` says, or ``config.json`` without it, as transformers does.

    The token that begins a text is not taken from here: prompts get theirs from the chat template or the tokenizer.

    Args:
        folder: Holds the files of the model.

    Raises:
        ConfigError: the file cannot be read, or ``eos_token_id`` is neither a token id nor a list of them.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        file = folder / "config.json"
    try:
        stated = json.loads(file.read_bytes())
        stated = {**stated.get("text_config", {}), **stated} if file.name == "config.json" else {**stated}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; download it again") from error
    ends = stated.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(token) is int for token in ends):
        raise ConfigError(f"{file}: eos_token_id={stated['eos_token_id']!r} must be a token id or a list of token ids")
    ignored = {
        name: stated[name]
        for name, neutral in _NEUTRAL.items()
        if stated.get(name) is not None and stated[name] not in neutral
    }
    return GenerationConfig(frozenset(token for token in ends if token >= 0), ignored)
