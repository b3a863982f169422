import gzip
import hashlib
import json
import re
from datetime import datetime

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import (
    ExperimentRecord,
    environment,
    file_digest,
    read_head,
    read_record,
    save_record,
    write_record,
)


def test_a_record_is_json_in_a_folder_that_is_made(tmp_path):
    path = write_record(tmp_path / "new" / "folder", "positions", {"n": 2, 0: "integer keys", "text": "é\u2028"})
    assert path.parent == tmp_path / "new" / "folder"
    assert re.fullmatch(r"positions-\d{8}T\d{12}\.json", path.name)
    assert json.loads(path.read_text("utf-8")) == {"n": 2, "0": "integer keys", "text": "é\u2028"}


def test_every_run_gets_a_new_path_and_nothing_else_is_left(tmp_path):
    paths = {write_record(tmp_path, "positions", {"run": run}) for run in range(20)}
    assert len(paths) == 20
    assert set(tmp_path.iterdir()) == paths


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(EvaluationError) as caught:
            write_record(folder, "positions", {})
        assert str(caught.value).startswith(f"cannot write {folder / 'positions'}")
        assert str(caught.value).endswith("; choose another --out")


def test_data_that_is_not_json_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        write_record(tmp_path, "positions", {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_the_digest_is_the_sha256_of_the_file(tmp_path):
    (tmp_path / "data").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(tmp_path / "data") == expected


def test_the_environment_names_versions_machine_and_time():
    found = environment()
    assert {"rag-posfix", "torch", "transformers", "numpy"} <= set(found["versions"])
    assert found["processor_count"] >= 1
    assert re.fullmatch(r"3\.\d+\.\d+.*", found["python"])
    assert found["git"] is None or re.fullmatch(r"[0-9a-f]{12,40}(-dirty)?", found["git"])
    assert datetime.fromisoformat(found["at"]).utcoffset().total_seconds() == 0


HEAD = {"kind": "positions", "settings": {"limit": 2}, "summary": {"n": 2, "worst": 0.5}}
ROWS = [
    {"question": "a\nb\r\u2028", "score": 0.1 + 0.2, "order": (1, 0)},
    {"question": "é", "score": None, "order": []},
]
READ = [
    {"question": "a\nb\r\u2028", "score": 0.1 + 0.2, "order": [1, 0]},
    {"question": "é", "score": None, "order": []},
]


def test_a_record_that_was_written_is_read_back_and_verifies(tmp_path):
    record = ExperimentRecord(HEAD, ROWS).write(tmp_path / "out")
    path = record.files["record"]
    assert record.to_json() == {"n": 2, "worst": 0.5, "record": str(path)}
    again = read_record(path)
    assert (again.head, list(again.rows), again.files) == (HEAD, READ, {"record": path})


def test_the_head_names_the_rows_their_number_and_the_hash_of_their_uncompressed_bytes(tmp_path):
    path = ExperimentRecord(HEAD, ROWS).write(tmp_path).files["record"]
    rows = path.with_suffix(".jsonl.gz")
    lines = gzip.decompress(rows.read_bytes())
    assert lines.count(b"\n") == 2
    digest = hashlib.sha256(lines).hexdigest()
    assert read_head(path) == {**HEAD, "rows": {"file": rows.name, "count": 2, "sha256": digest}}
    assert {one.name for one in tmp_path.iterdir()} == {path.name, rows.name}


def test_equal_rows_are_equal_bytes(tmp_path):
    for name in ("one.json", "two.json"):
        save_record(tmp_path / name, HEAD, ROWS)
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = ExperimentRecord(HEAD, ROWS)
    assert record.write(None) is record
    assert record.to_json() == {"n": 2, "worst": 0.5}
    assert list(tmp_path.iterdir()) == []


def test_a_record_without_rows_is_a_head_alone(tmp_path):
    path = write_record(tmp_path, "slot-attention", {"profile": [0.5]})
    assert list(tmp_path.iterdir()) == [path]
    assert (read_record(path).head, read_record(path).rows) == ({"profile": [0.5]}, ())


@pytest.mark.parametrize(
    "change", [lambda lines: lines.replace(b"0.3", b"0.4"), lambda lines: lines[:-10], lambda lines: lines * 2]
)
def test_rows_that_were_changed_are_detected(tmp_path, change):
    path = ExperimentRecord(HEAD, ROWS).write(tmp_path).files["record"]
    rows = path.with_suffix(".jsonl.gz")
    lines = gzip.decompress(rows.read_bytes())
    assert change(lines) != lines
    rows.write_bytes(gzip.compress(change(lines)))
    with pytest.raises(EvaluationError, match=rf"holds other rows than {path.name} was written for"):
        read_record(path)
    assert read_head(path)["summary"] == HEAD["summary"], "a head is read without its rows"


def test_rows_that_are_missing_damaged_or_elsewhere_are_one_line(tmp_path):
    path = ExperimentRecord(HEAD, ROWS).write(tmp_path).files["record"]
    rows = path.with_suffix(".jsonl.gz")
    rows.write_bytes(rows.read_bytes()[:-9])
    with pytest.raises(EvaluationError, match=r"jsonl\.gz cannot be read"):
        read_record(path)
    rows.unlink()
    with pytest.raises(EvaluationError, match=r"jsonl\.gz cannot be read"):
        read_record(path)
    for damaged, said in (({"file": "../x.gz", "sha256": ""}, "beside the head"), ([1], "file, count and sha256")):
        path.write_text(json.dumps({**HEAD, "rows": damaged}))
        with pytest.raises(EvaluationError, match=said):
            read_record(path)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), (b"{", "is not JSON"), (b"[]", "holds a list")]
)
def test_a_file_that_is_no_head_is_one_line(tmp_path, content, said):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(EvaluationError, match=said):
        read_head(tmp_path / "x.json")
