"""Small vocabularies of every kind that decoder models have, and the chat templates of released models.

``tests/data/vocabularies`` and ``tests/data/chat_templates`` hold them; the README there says how they were made.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

_DATA = Path(__file__).resolve().parents[1] / "data"
VOCABULARIES = tuple(sorted(path.stem for path in (_DATA / "vocabularies").glob("*.json")))
CONTROLS: dict[str, list[str]] = json.loads((_DATA / "chat_templates" / "controls.json").read_text("utf-8"))
"""The control tokens of each family of models."""


@cache
def base(vocabulary):
    """Return the vocabulary without control tokens."""
    return Tokenizer.from_file(str(_DATA / "vocabularies" / f"{vocabulary}.json"))


def chat_template(family):
    return (_DATA / "chat_templates" / f"{family}.jinja").read_text("utf-8")


def stock_tokenizer(vocabulary, family):
    """Return transformers' own tokenizer of a vocabulary, with the chat template and control tokens of a family."""
    backend = Tokenizer.from_str(base(vocabulary).to_str())
    # Phi 3's control tokens hold the white space behind them.
    backend.add_special_tokens(
        [AddedToken(name, normalized=False, rstrip=family == "phi-3") for name in CONTROLS[family]]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template(family))
