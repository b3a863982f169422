import torch

from rag_posfix.attention.masks import last_row, scores, weigh

# Two key heads, two query heads each, one channel: head h reads key head h // 2.
QUERY = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1)
KEY = torch.tensor([[1.0, 10.0], [100.0, 1000.0]]).view(1, 2, 2, 1)


def test_scores_read_the_key_head_of_their_group():
    # q k 0.5: head 0: 0.5, 5; head 1: 1, 10; head 2 (second key head): 150, 1500; head 3: 200, 2000.
    expected = [[0.5, 5.0], [1.0, 10.0], [150.0, 1500.0], [200.0, 2000.0]]
    assert scores(QUERY, KEY, 0.5)[0, :, 0].tolist() == expected


def test_weights_read_the_value_head_of_their_group():
    # Half of each: (1 + 10) / 2 = 5.5 and (100 + 1000) / 2 = 550.
    found = weigh(torch.full((1, 4, 1, 2), 0.5), KEY)
    assert found.flatten().tolist() == [5.5, 5.5, 550.0, 550.0]


def test_several_rows_keep_their_order():
    query = torch.randn((1, 6, 3, 4), generator=torch.Generator().manual_seed(0))
    key = torch.randn((1, 2, 5, 4), generator=torch.Generator().manual_seed(1))
    found = scores(query, key, 1.0)
    for row in range(3):
        alone = scores(query[:, :, row : row + 1], key, 1.0)
        assert torch.allclose(found[:, :, row : row + 1], alone)
    assert torch.allclose(last_row(query, key, 1.0), found[:, :, 2:])
    out = weigh(found, key)
    assert torch.allclose(out[0, 5, 1], found[0, 5, 1] @ key[0, 1])
