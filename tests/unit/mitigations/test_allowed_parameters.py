"""What each parameter of the methods may be, as an error tells it."""

import re

import pytest

from rag_posfix.errors import ConfigError
from rag_posfix.mitigations import create

ALLOWED = """
blended: fraction a number between 0 and 1
blended: choose one of 'deviation', 'first', 'query'
blended: layers a whole number >= 1
calibrated_attention: temperature a number above 0 and at most 100
calibrated_attention: strength a number between 0 and 1
calibrated_attention: profile a list of 2 to 1000 numbers between 0 and 1e+06, not all of them 0, or None
canonical_rotations: rows a whole number >= 1, or None
canonical_rotations: relevance_weight a number between 0 and 20
committee: prior a number between 1e-06 and 0.999999
committee: relevance_weight a number between 0 and 20
committee: relevance one of 'question', 'score', 'both'
committee: contrast a number between 0 and 2
committee: experts a whole number >= 1, or None
context_experts: contrast a number between 0 and 2, or 'divergence'
context_experts: relevance_weight a number between 0 and 20
context_experts: relevance one of 'question', 'score', 'both'
context_experts: pool 'mixture' or 'max'
context_experts: answer_weight a number between 0 and 1
context_experts: experts a whole number >= 1, or None
context_experts: plausible a number between 0 and 1
head_scaling: low a number between 0.1 and 10
head_scaling: high a number between 0.1 and 10
head_scaling: alpha a number between 0 and 100
head_scaling: skip_layers a whole number >= 0
hidden_scaling: channel a whole number >= 0, or None
hidden_scaling: factor a number between -10 and 10
hidden_scaling: first_layer a whole number >= 0, or None
hidden_scaling: last_layer a whole number >= 0, or None
layer_scaling: points a list of 1 to 16 numbers between 0.1 and 10
multi_base: factors a list of 1 to 16 numbers between 0.1 and 10
parallel_encoding: temperature a number between 0.1 and 10
parallel_encoding: scale a number between 0.1 and 10
parallel_windows: windows a whole number >= 1, or None
parallel_windows: indentation 'left' or 'right'
passage_answers: relevance one of 'question', 'score', 'both'
passage_answers: relevance_weight a number between 0 and 20
passage_answers: share_weight a number between 0 and 5
passage_answers: answer_tokens a whole number >= 1
passage_answers: pool 'chosen' or 'mixture'
shifted_rotary: threshold a whole number >= 2, or None
shifted_rotary: share a number between 0 and 1
shifted_rotary: window a whole number >= 0
sorted_inter_document: sort 'lexicographic' or 'relevance'
sorted_inter_document: routing a number between 0 and 1, or None
stable_mask: gamma a number above 0 and at most 100
stable_mask: train_length a whole number >= 1, or None
"""


@pytest.mark.parametrize("line", ALLOWED.strip().split("\n"))
def test_another_value_is_refused_with_what_is_allowed(line):
    method, parameter, allowed = line.split(" ", 2)
    with pytest.raises(ConfigError, match=f"{re.escape(f'{method} {parameter}=()')} must be {re.escape(allowed)}$"):
        create(method.rstrip(":"), {parameter: ()})
