"""A tiny model, and what it reads."""

import pytest

from tests.support.tiny import loaded_model


@pytest.fixture(scope="module")
def loaded():
    """A tiny Llama with random weights, with the attention hook on it."""
    return loaded_model()


@pytest.fixture
def passes(loaded):
    """The number of tokens of each forward pass, as they come."""
    seen = []
    handle = loaded.model.register_forward_pre_hook(
        lambda module, arguments, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    yield seen
    handle.remove()
