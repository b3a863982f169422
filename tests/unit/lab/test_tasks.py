"""The examples of each task keep its rules, and targets stand where they are to be predicted."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.lab.tasks import IGNORED, TASKS, TRAINED
from rag_posfix.lab.tasks.counting import Counting
from rag_posfix.lab.tasks.flip_flop import FlipFlop
from rag_posfix.lab.tasks.key_value import KeyValue
from rag_posfix.lab.tasks.language import NAMES, WORDS, Language, sentences
from rag_posfix.lab.tasks.last_sentence import LastSentence
from rag_posfix.lab.tasks.selective_copy import SelectiveCopy
from rag_posfix.lab.tasks.text import OTHER, PARAGRAPH, Text, split_ids, tokens_of, vocabulary_of


def drawn(task, split=TRAINED, size=64, seed=0):
    return task.batch(split, size, torch.Generator().manual_seed(seed))


def scored_tokens(batch):
    """Return the tokens that the measure counts, one list per example."""
    return [targets[scored].tolist() for targets, scored in zip(batch.targets, batch.scored, strict=True)]


@pytest.mark.parametrize("name", TASKS.names())
def test_examples_repeat_with_their_seed_and_targets_are_the_next_tokens(name):
    task = TASKS.get(name)()
    for split in task.splits:
        batch, again, other = (drawn(task, split, 8, seed) for seed in (1, 1, 2))
        assert torch.equal(batch.ids, again.ids)
        assert torch.equal(batch.ids, other.ids) is (name == "text")  # which is always measured on the same words
        assert int(batch.ids.min()) >= 0
        assert int(batch.ids.max()) < task.vocabulary
        wanted = batch.targets != IGNORED
        assert torch.equal(batch.targets[:, :-1][wanted[:, :-1]], batch.ids[:, 1:][wanted[:, :-1]])
        assert wanted[batch.scored].all()
        assert batch.scored.any(dim=1).all()
        assert not wanted[:, -1].any()
    assert next(iter(task.splits)) == TRAINED
    assert task.name == name
    assert "http" in task.paper


@pytest.mark.parametrize("name", TASKS.names())
def test_every_preset_makes_a_task(name):
    for preset in TASKS.presets(name):
        assert TASKS.create(type("Spec", (), {"name": preset, "parameters": {}})()).name == name


def test_the_bit_after_a_read_is_that_of_the_last_write():
    for split, pairs in (("in", 40), ("sparse", 40), ("longer", 80)):
        batch = drawn(FlipFlop(pairs=40), split)
        assert batch.ids.shape == (64, 2 * pairs)
        for row in batch.ids.tolist():
            kinds, bits = row[::2], row[1::2]
            assert (kinds[0], kinds[-1]) == (2, 3)
            held = None
            for kind, bit in zip(kinds, bits, strict=True):
                held = bit if kind == 2 else held
                assert kind != 3 or bit == held
        assert [len(one) for one in scored_tokens(batch)] == [1] * 64
        wanted = (batch.targets != IGNORED).sum(dim=1)
        assert torch.equal(wanted, (batch.ids[:, ::2] == 3).sum(dim=1))


def test_fewer_pairs_matter_out_of_the_distribution():
    ignored = [
        float((drawn(FlipFlop(pairs=100), split).ids[:, ::2] == 4).float().mean())
        for split in ("in", "sparse", "longer")
    ]
    expected = (0.8, 0.96, 0.8)
    assert ignored == [pytest.approx(share, abs=0.03) for share in expected]  # two of 100 are fixed


def test_the_copy_is_the_sequence_without_its_blanks():
    task = SelectiveCopy(tokens=5, blanks=6, symbols=3)
    for split, blanks in (("in", 6), ("dense", 3), ("sparse", 12)):
        batch = drawn(task, split)
        for row, scored in zip(batch.ids.tolist(), scored_tokens(batch), strict=True):
            mixed, copied = row[: 5 + blanks], row[-5:]
            assert row[5 + blanks] == 1
            assert mixed.count(0) == blanks
            assert [token for token in mixed if token] == copied == scored
    assert len({tuple(row[:11]) for row in drawn(task).ids.eq(0).tolist()}) > 30  # blanks are at random places


def value_of(row, task):
    """Run the operations of an example, and return the value of the variable that is asked for, and the answer."""
    values = [None] * task.variables
    for place, token in enumerate(row):
        variable, kind = divmod(token - 13, 3)
        if token < 13:
            assert token == 1  # before the question there are only passes
        elif kind == 2:
            return values[variable], row[place + 1] - 2, row[place + 2 :]
        else:
            values[variable] = 0 if kind == 0 else values[variable] + 1
    raise AssertionError("there is no question")


@pytest.mark.parametrize("variables", [1, 3])
def test_the_answer_of_counting_is_the_value_of_the_variable(variables):
    task = Counting(steps=40, variables=variables)
    for split in task.splits:
        batch = drawn(task, split, 200)
        seen = set()
        for row, scored in zip(batch.ids.tolist(), scored_tokens(batch), strict=True):
            value, answer, rest = value_of(row, task)
            assert value == answer <= 10
            assert scored == [answer + 2]
            assert set(rest) <= {0}
            seen.add(answer)
        assert len(seen) >= 4


def test_as_many_operations_count_in_dense_and_sparse_sequences():
    task = Counting(steps=200)
    counts = {}
    for split in task.splits:
        ids = drawn(task, split, 400).ids
        counts[split] = (float((ids >= 13).sum(dim=1).float().mean()), float((ids == 1).sum(dim=1).float().mean()))
    # A mean length of half the steps, of which 8 in 58 count; besides, the first set and the question.
    assert counts["in"][0] == pytest.approx(2 + 100 * 8 / 58, rel=0.12)
    assert counts["dense"][0] == pytest.approx(counts["in"][0], rel=0.15)
    assert counts["sparse"][0] == pytest.approx(counts["in"][0], rel=0.15)
    assert counts["dense"][1] < 0.6 * counts["in"][1] < 0.4 * counts["sparse"][1]


def test_the_value_of_a_key_is_the_token_after_it_at_every_place():
    task = KeyValue(pairs=4, keys=20, values=5, questions=3)
    batch = drawn(task, "longer", 200)
    for row, place, scored in zip(batch.ids.tolist(), batch.places.tolist(), scored_tokens(batch), strict=True):
        keys, values = row[:16:2], row[1:16:2]
        assert len(set(keys)) == 8
        assert row[16::3] == [0, 0, 0]
        asked = [keys.index(key) for key in row[17::3]]
        assert row[18::3] == [values[one] for one in asked]
        assert len(set(asked)) == 3
        assert asked[-1] == place
        assert scored == [values[place]]
    assert set(batch.places.tolist()) == set(range(8))
    learned = batch.targets != -100  # the loss counts the value of every question
    assert learned.sum(dim=1).tolist() == [3] * 200
    assert learned.nonzero()[:3, 1].tolist() == [17, 20, 23]


def test_sizes_of_key_value_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="keys=7 must be at least twice pairs=4"):
        KeyValue(pairs=4, keys=7)
    with pytest.raises(ConfigError, match="questions=5 must be at most pairs=4"):
        KeyValue(pairs=4, keys=20, questions=5)


def test_a_paragraph_has_four_sentences_and_people_return_in_the_next_one():
    text, same, total = sentences(random.Random(0)), 0, 0
    paragraphs = [[next(text) for _ in range(4)] for _ in range(200)]
    for before, after in itertools.pairwise(paragraphs):
        assert [one[-1] for one in after] == [".", ".", ".", "¶"]
        places = {one[one.index("in") + 2] for one in after if "in" in one}
        assert len(places) <= 1
        same += sum(a[0] == b[0] for a, b in zip(before, after, strict=True))
        total += 4
        assert all(one[0] in NAMES for one in after)
    assert same / total == pytest.approx(0.9 + 0.1 / 12, abs=0.04)


def test_a_text_has_as_many_people_as_asked_for():
    text = list(itertools.islice(sentences(random.Random(0), 2), 200))
    assert {one[0] for one in text} == set(NAMES[:2])
    others = {WORDS.index(name) for name in NAMES[2:]}
    assert not others & set(drawn(Language(people=2), "in", 20).ids.flatten().tolist())
    with pytest.raises(ConfigError, match="people=13 must be at most 12"):
        Language(people=13)


def test_the_measure_of_the_language_counts_equally_many_words_at_every_length():
    task = Language(length=32)
    for split, length in (("in", 32), ("x2", 64), ("x5", 160)):
        batch = drawn(task, split, 3)
        assert batch.ids.shape == (3, length)
        assert batch.scored.sum(dim=1).tolist() == [8] * 3
    assert len(set(WORDS)) == len(WORDS) == 45


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [(FlipFlop, "pairs", 1), (SelectiveCopy, "tokens", 0), (Counting, "steps", 5), (Language, "length", 7)],
)
def test_sizes_that_make_no_sequence_are_refused(task, name, value):
    with pytest.raises(ConfigError, match=f"{name}={value} must be a whole number"):
        task(**{name: value})


def test_the_answer_of_last_sentence_is_the_count_after_the_last_sentence_end_but_one():
    task = LastSentence(length=8, words=3)
    for split, sentence_count in (("in", 2), ("longer", 2), ("more", 5)):
        batch = drawn(task, split, 100)
        answers = set()
        for row, scored in zip(batch.ids.tolist(), scored_tokens(batch), strict=True):
            ends = [place for place, token in enumerate(row) if token == 1]
            assert len(ends) == sentence_count
            last = row[ends[-2] + 1 : ends[-1]]
            assert 2 <= len(last) <= 8
            asked, answer = row[ends[-1] + 1], row[ends[-1] + 2]
            assert answer - 5 == last.count(asked)
            assert scored == [answer]
            assert set(row[ends[-1] + 3 :]) <= {0}
            answers.add(answer)
        assert len(answers) > 3
    longest = [len(row[: row.index(1)]) for row in drawn(task, "longer", 200).ids.tolist()]
    assert max(longest) == 32


def test_the_held_out_tenth_of_a_text_is_never_trained_on(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Word{n}." for n in range(200)))  # 200 words, 200 stops and 199 paragraph ends
    task = Text(str(file), length=8, words=1000)
    tokens = tokens_of(str(file))
    assert tokens[:4] == ("Word0", ".", PARAGRAPH, "Word1")
    first = len(tokens) - len(tokens) // 10
    vocabulary = vocabulary_of(str(file), 1000)
    assert vocabulary[:2] == (OTHER, ".")  # the most frequent one; PARAGRAPH is once less
    assert set(vocabulary[1:]) == set(tokens[:first])
    trained = task.training_batch(256, torch.Generator().manual_seed(0)).ids
    assert {vocabulary[index] for index in trained.unique()} <= set(tokens[:first])
    held_out = drawn(task, size=256).ids  # its words were not seen: stops and paragraph ends alone are known
    assert {vocabulary[index] for index in held_out.unique()} == {OTHER, ".", PARAGRAPH}
    last = split_ids(str(file), 1000)[1][-2:].tolist()
    for split, length in (("in", 8), ("x2", 16), ("x5", 40)):
        batch = drawn(task, split, 2)
        assert batch.ids.shape == (2, length)
        assert batch.scored.sum(dim=1).tolist() == [2, 2]
        assert scored_tokens(batch)[1] == last  # at each length the same words


def test_words_are_counted_whole_and_lines_of_code_end():
    assert {"re", "(", PARAGRAPH, "<line>"} <= set(vocabulary_of("code", 200))
    prose = tokens_of("prose")
    assert "<line>" not in prose
    assert any("." in token[1:-1] for token in prose)  # dotted names


@pytest.mark.parametrize(("source", "length", "reason"), [
    ("prose", 4000, "needs a held-out tenth of more than 20000 words, that of 'prose' has "),
    ("/nowhere/at/all", 8, r"cannot be read \(FileNotFoundError"),
])  # fmt: skip
def test_a_text_that_is_too_short_or_absent_is_told(source, length, reason):
    with pytest.raises(ConfigError, match=reason):
        Text(source, length)
