import pytest

from rag_posfix.cli.options import checked_choices
from rag_posfix.errors import ConfigError, UnknownNameError


def test_several_choices_are_split_at_commas_and_checked():
    found = checked_choices("none,context_experts:experts=2,context_experts")
    assert [(c.name, c.parameters) for c in found] == [
        ("none", {}), ("context_experts", {"experts": 2}), ("context_experts", {})
    ]  # fmt: skip
    with pytest.raises(UnknownNameError, match=r"unknown mitigation 'pines'\. Did you mean 'pine' \(inter_document\)"):
        checked_choices("none,pines")
    assert checked_choices("pine")[0].name == "inter_document"


def test_a_choice_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="has 'none' twice with the same parameters; remove one"):
        checked_choices("none,context_experts, none")
    with pytest.raises(ConfigError, match="has 'inter_document' twice"):
        checked_choices("pine,inter_document")
