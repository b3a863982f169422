import gzip

import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import decreasing, read_qrels, read_run, write_run


def write(tmp_path, text, name="file"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["qrels.tsv", "qrels.tsv.gz"])
@pytest.mark.parametrize(
    "text",
    [
        "query-id\tcorpus-id\tscore\n1\ta\t2\n1\tb\t0\n2\ta\t1\n",
        "1\ta\t2\n1\tb\t0\n2\ta\t1\n",
        "1 0 a 2\n1 0 b 0\n2 0 a 1\n",
        "\ufeff1\tQ0\ta\t2\r\n\r\n1\tQ0\tb\t0\r\n2\tQ0\ta\t1.0",
        "1 0 a 2\n1 0 a 2\n1 0 b 0\n2 0 a 1\n",
    ],
    ids=["beir with header", "beir", "trec", "tabs, windows, byte order mark", "a pair twice"],
)
def test_judgements_are_read_in_either_form(tmp_path, name, text):
    assert read_qrels(write(tmp_path, text, name)) == {"1": {"a": 2, "b": 0}, "2": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no judgements"),
        ("1 a\n", ":1 has 2 columns"),
        ("1\ta\t1\n1\tb\tyes\n", ":2: grade 'yes' is not an integer"),
        ("1 0 a 0.5\n", ":1: grade '0.5' is not an integer"),
        ("1 0 a 1\n1 0 a 0\n", ":2: query '1' and document 'a' are judged 1 and 0; keep one grade"),
    ],
)
def test_judgements_that_cannot_be_read_name_the_line(tmp_path, text, said):
    with pytest.raises(EvaluationError) as caught:
        read_qrels(write(tmp_path, text))
    assert said in str(caught.value)


def test_a_file_that_is_missing_damaged_or_no_text_is_one_line(tmp_path):
    (tmp_path / "bad.gz").write_bytes(b"no gzip")
    (tmp_path / "binary").write_bytes(b"1 0 \xff 1\n")
    for name, said in [("absent", "is not a file"), ("bad.gz", "cannot be read"), ("binary", "cannot be read")]:
        with pytest.raises(EvaluationError, match=said):
            read_qrels(tmp_path / name)


def test_the_score_orders_a_run_and_the_rank_column_does_not(tmp_path):
    text = "q Q0 a 1 0.5 t\nq Q0 b 2 0.75 t\nr Q0 a 1 -3 tag with words\n"
    assert read_run(write(tmp_path, text)) == {"q": [("b", 0.75), ("a", 0.5)], "r": [("a", -3.0)]}


def test_scores_that_tie_are_ordered_as_trec_eval_orders_them(tmp_path):
    # 0.5 and 0.499999999 are one number in single precision.
    scores = {"a": 0.5, "c": 0.499999999, "b": 0.5, "d": 0.25}
    text = "".join(f"q Q0 {name} 0 {score!r} t\n" for name, score in scores.items())
    ours = [name for name, _ in read_run(write(tmp_path, text))["q"]]
    assert ours == ["c", "b", "a", "d"]
    for name in scores:
        evaluator = pytrec_eval.RelevanceEvaluator({"q": {name: 1}}, {"recip_rank"})
        assert 1 / evaluator.evaluate({"q": scores})["q"]["recip_rank"] == ours.index(name) + 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no ranking"),
        ("q Q0 a 1 0.5\n", ":1 has 5 columns"),
        ("q Q0 a 1 nan t\n", ":1: score 'nan' must be a finite number"),
        ("q Q0 a 1 high t\n", ":1: score 'high' must be a finite number"),
        ("q Q0 a 1 1 t\nq Q0 b 2 1 t\nq Q0 a 3 0 t\n", ":3: document 'a' is listed twice for query 'q'"),
    ],
)
def test_runs_that_cannot_be_read_name_the_line(tmp_path, text, said):
    with pytest.raises(EvaluationError) as caught:
        read_run(write(tmp_path, text))
    assert said in str(caught.value)


def test_scores_that_differ_stay_and_ties_fall_by_a_millionth_each():
    assert decreasing([0.9, 0.5, 0.5, 0.5, 0.25, 0.0]) == [0.9, 0.5, 0.499999, 0.499998, 0.25, 0.0]
    assert decreasing([0.0, 0.0]) == [0.0, -1e-06]
    assert decreasing([]) == []


def test_a_score_that_is_lower_by_too_little_falls_too():
    assert decreasing([0.5, 0.5 - 1e-9, 0.4]) == [0.5, 0.499999, 0.4]


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=30))
def test_no_reader_can_put_a_written_run_into_another_order(scores):
    ranked = sorted(scores, reverse=True)
    # Names that tie the wrong way: the last has the largest id.
    names = [f"d{index:02d}" for index in range(len(ranked))]
    written = dict(zip(names, decreasing(ranked), strict=True))
    last = pytrec_eval.RelevanceEvaluator({"q": {names[-1]: 1}}, {"recip_rank"}).evaluate({"q": written})
    assert last["q"]["recip_rank"] == pytest.approx(1 / len(names))
    places = [
        pytrec_eval.RelevanceEvaluator({"q": {name: 1}}, {"recip_rank"}).evaluate({"q": written})["q"]["recip_rank"]
        for name in names
    ]
    assert places == sorted(places, reverse=True)


@given(st.lists(st.floats(0, 1), max_size=20))
def test_a_written_score_lies_at_most_a_millionth_per_tie_below_the_given_one(scores):
    ranked = sorted(scores, reverse=True)
    for index, (score, written) in enumerate(zip(ranked, decreasing(ranked), strict=True)):
        assert -1e-9 <= score - written <= (index + 0.01) * 1e-6


@given(
    st.dictionaries(
        st.sampled_from(["q1", "q2", "ü"]),
        st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.floats(-5, 5), min_size=1),
        min_size=1,
    )
)
def test_a_run_that_was_written_is_read_as_it_was(tmp_path_factory, run):
    distinct = {
        query: dict(zip(scores, decreasing(sorted(scores.values(), reverse=True)), strict=True))
        for query, scores in run.items()
    }
    path = tmp_path_factory.mktemp("runs") / "new" / "a.trec"
    write_run(path, distinct, "a tag")
    assert {query: dict(ranked) for query, ranked in read_run(path).items()} == distinct
    columns = [line.split() for line in path.read_text("utf-8").splitlines()]
    assert columns[0][3] == "1"
    assert {column[5] for column in columns} == {"a-tag"}


def test_a_run_replaces_the_one_before_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.trec"
    write_run(path, {"q": {"a": 1.0}}, "t")
    with pytest.raises(TypeError):
        write_run(path, {"q": {"b": 1.0}, "r": {"b": object()}}, "t")
    assert path.read_text() == "q Q0 a 1 1 t\n"
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "file").touch()
    with pytest.raises(EvaluationError, match=r"cannot write .*; choose another --out"):
        write_run(tmp_path / "file" / "a.trec", {}, "t")
