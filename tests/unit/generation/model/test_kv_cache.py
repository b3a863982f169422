import torch

from rag_posfix.generation.model.sequence_batch import SPARE_TOKENS, ConcatenatedCache, GrowingCache


def new(count, rows=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 3, count, 4, generator=generator) for _ in range(2))


def held(cache, layer=0):
    return cache.layers[layer].keys, cache.layers[layer].values


def test_tokens_are_appended_and_returned_with_all_before_them():
    cache, parts = GrowingCache(2), [new(5), new(1, seed=1), new(200, seed=2), new(1, seed=3)]
    for i, part in enumerate(parts):
        for layer in (0, 1):
            found = cache.update(*part, layer)
            assert torch.equal(found[0], torch.cat([p[0] for p in parts[: i + 1]], dim=2))
            assert torch.equal(found[1], torch.cat([p[1] for p in parts[: i + 1]], dim=2))
    assert cache.get_seq_length() == 207
    assert cache.get_mask_sizes(3, 0) == (210, 0)


def test_a_token_that_has_room_moves_nothing():
    cache = GrowingCache(1)
    cache.update(*new(5), 0)
    where = held(cache)[0].data_ptr()
    for _ in range(SPARE_TOKENS):
        cache.update(*new(1), 0)
        assert held(cache)[0].data_ptr() == where
    cache.update(*new(1), 0)
    assert held(cache)[0].data_ptr() != where, "now it had to grow"


def test_looking_ahead_leaves_the_cache_as_it_is_and_copies_nothing():
    cache = GrowingCache(1)
    cache.update(*new(5), 0)
    before = [part.clone() for part in held(cache)]
    first, second = cache.branch(), cache.branch()
    first.update(*new(3, seed=1), 0)
    assert held(first)[0].data_ptr() == held(cache)[0].data_ptr()
    second.update(*new(300, seed=2), 0)  # beyond the room: its own buffer from here on
    assert cache.get_seq_length() == 5
    assert all(torch.equal(a, b) for a, b in zip(held(cache), before, strict=True))
    assert torch.equal(held(second)[0], torch.cat([before[0], new(300, seed=2)[0]], dim=2))


def test_a_copy_goes_its_own_way():
    cache = GrowingCache(1)
    cache.update(*new(5), 0)
    copied, some = cache.copy(4), cache.copy(5, torch.tensor([1]))
    copied.update(*new(2, seed=1), 0)
    assert torch.equal(held(copied)[0][:, :, :4], held(cache)[0][:, :, :4])
    assert copied.get_seq_length() == 6
    assert torch.equal(held(some)[1], held(cache)[1][1:])


def test_each_group_of_a_joint_pass_keeps_its_own_tokens():
    one, two = GrowingCache(1), GrowingCache(1)
    one.update(*new(5, rows=1), 0)
    two.update(*new(9, rows=2, seed=1), 0)
    keys, values = new(1, rows=3, seed=2)
    returned = ConcatenatedCache([one, two], [1, 2]).update(keys, values, 0)
    assert returned[0] is keys
    assert torch.equal(held(one)[0][:, :, 5:], keys[:1])
    assert torch.equal(held(two)[1][:, :, 9:], values[1:])
