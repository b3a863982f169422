"""What the model of a test reads."""

import pytest


@pytest.fixture
def passes(loaded):
    """The number of tokens of each forward pass, as they come."""
    seen = []
    handle = loaded.model.register_forward_pre_hook(
        lambda module, arguments, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    yield seen
    handle.remove()
