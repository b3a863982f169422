"""What a rank asks of the others, without others; several ranks are in the integration tests."""

from types import SimpleNamespace

import torch

from rag_posfix.patching.attention_hook import channel_columns
from rag_posfix.patching.spec import Ranks


class Two(Ranks):
    """The first of two ranks; the other has the same numbers, a hundred higher."""

    def __init__(self):
        super().__init__(count=2)

    def gather(self, own, size, dim):
        return own if own.shape[dim] == size else torch.cat((own, own + 100), dim=dim)


class Share:
    """The rows of a weight that are here, as a DTensor has them."""

    dtype = torch.float32

    def __init__(self, rows):
        self.rows = rows

    def is_floating_point(self):
        return True

    def to_local(self):
        return self.rows


def test_alone_nobody_is_asked():
    alone, values, heads = Ranks(), torch.arange(6.0).view(1, 3, 2), torch.arange(3.0)
    alone.wait()
    assert alone.mean(values) is values
    assert alone.broadcast_decision(values) is values
    assert alone.gather(values, 3, 1) is values
    assert alone.own_heads(heads, 3) is heads


def test_each_rank_takes_its_own_heads_out_of_all():
    values = torch.arange(6.0)
    assert [Ranks(3, rank).own_heads(values, 2).tolist() for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_a_channel_of_projections_that_are_split_is_that_of_the_heads_that_are_here():
    """Llama's way: two of four query heads and one of two key heads, of two channels each; hidden channel 1."""
    query, key = torch.arange(8.0).view(4, 2), torch.arange(4.0).view(2, 2)
    module = SimpleNamespace(
        head_dim=2, q_proj=SimpleNamespace(weight=Share(query)), k_proj=SimpleNamespace(weight=Share(key))
    )
    columns = channel_columns(module, 1, 2, 1, Two())
    assert [column.tolist() for column in columns] == [[[1, 3], [5, 7]], [[1, 3]]]


def test_a_channel_of_a_projection_that_is_gathered_is_that_of_all_heads():
    """Phi3's way: queries, keys and values in one weight of two ranks with two rows each, heads of one channel.

    All rows of channel 0: 0, 2 here and 100, 102 there; two query heads, one key head, one value head.
    """
    module = SimpleNamespace(head_dim=1, qkv_proj=SimpleNamespace(weight=Share(torch.arange(4.0).view(2, 2))))
    query, key = channel_columns(module, 0, 2, 1, Two())
    assert (query.tolist(), key.tolist()) == ([[0], [2]], [[100]])
