import json
import re
from datetime import datetime

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import environment, file_digest, write_record


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
        assert str(caught.value).startswith(f"cannot write a record to {folder}: ")
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
