import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.caching.kv import store
from rag_posfix.caching.kv.store import passage_key
from rag_posfix.errors import CacheError

texts = st.text(max_size=6)
tokens = st.lists(st.integers(0, 50_000) | st.integers(-(2**63), 2**63 - 1), max_size=6)
encodings = st.recursive(
    st.none() | st.booleans() | texts | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {
        "model_fingerprint": texts,
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "encoding": encodings,
        "prefix_tokens": tokens,
        "tokens": tokens,
        "salt": texts,
    }
)
KEY = {
    "model_fingerprint": "model",
    "dtype": torch.bfloat16,
    "encoding": ("start", 12.0, None, (1.0, 1.5)),
    "prefix_tokens": [1, 2, 3],
    "tokens": [4, 5],
    "salt": "tenant",
}


def typed(encoding):
    """``encoding`` with its types: 1, 1.0 and True are equal in Python."""
    if isinstance(encoding, tuple):
        return tuple(map(typed, encoding))
    return (type(encoding), encoding)


def test_the_key_does_not_depend_on_the_process():
    # Entries of a running store are lost where this changes; raise SCHEMA_VERSION then.
    assert passage_key(**KEY) == "1f02e24748e72cb930be581e76b8759966b13747f60742d5fb9b023fd28c41b0"


@given(arguments, arguments)
@pytest.mark.slow
def test_two_keys_are_equal_only_if_everything_is(one, two):
    equal = {**one, "encoding": typed(one["encoding"])} == {**two, "encoding": typed(two["encoding"])}
    assert (passage_key(**one) == passage_key(**two)) == equal


@given(arguments, arguments, st.sampled_from(sorted(KEY)))
def test_each_argument_alone_changes_the_key(one, two, name):
    other = {**one, name: two[name]}
    equal = typed(one[name]) == typed(two[name]) if name == "encoding" else one[name] == two[name]
    assert (passage_key(**one) == passage_key(**other)) == equal


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_the_boundary_between_prefix_and_passage_counts(both, first, second):
    one, two = (
        passage_key(**{**KEY, "prefix_tokens": both[:cut], "tokens": both[cut:]})
        for cut in (min(first, len(both)), min(second, len(both)))
    )
    assert (one == two) == (min(first, len(both)) == min(second, len(both)))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a",), "a"),
        ((("a",),), ("a",)),
        ((), None),
        ("", None),
        ("1", 1),
        (1, 1.0),
        (True, 1),
        (0.1, 0.1 + 1e-16 * 2),
        ((1, (2, 3)), (1, 2, 3)),
    ],
)
def test_encodings_that_look_alike_are_different(one, two):
    assert passage_key(**{**KEY, "encoding": one}) != passage_key(**{**KEY, "encoding": two})


def test_encodings_that_mean_the_same_are_the_same():
    assert passage_key(**{**KEY, "encoding": -0.0}) == passage_key(**{**KEY, "encoding": 0.0})
    nan = passage_key(**{**KEY, "encoding": math.nan})
    assert nan == passage_key(**{**KEY, "encoding": float("nan")})


def test_the_schema_version_changes_the_key(monkeypatch):
    before = passage_key(**KEY)
    monkeypatch.setattr(store, "SCHEMA_VERSION", store.SCHEMA_VERSION + 1)
    assert passage_key(**KEY) != before


@pytest.mark.parametrize("encoding", [[1], {"a": 1}, b"a", torch.tensor(1.0), (1, [2])])
def test_an_encoding_that_is_no_plain_data_is_rejected(encoding):
    with pytest.raises(CacheError, match="allowed: str, int, float, bool, None and tuples"):
        passage_key(**{**KEY, "encoding": encoding})


@pytest.mark.parametrize("wrong", [[2**63], [1.5], ["a"]])
def test_a_token_that_is_no_integer_is_refused(wrong):
    with pytest.raises(CacheError, match="tokens must be 64-bit integers"):
        passage_key(**{**KEY, "tokens": wrong})
