"""The command line as users and programs call it: what it prints, where, and with which exit code."""

from __future__ import annotations

import json

import pytest

from rag_posfix.cli import main as cli
from tests.support.command_line import cache_with_models, command_line
from tests.support.letter_embeddings import LetterEmbeddings

PASSAGES = {
    "facts.jsonl": json.dumps(
        {"id": "lighthouse", "text": "The Maravel lighthouse was designed by Ilse Korvanth and was first lit in 1868."}
    ),
    "bridge.md": "# Bridges\n\nThe Ostrel bridge crosses the river Venn and is 210 metres long.",
    "bread.txt": "Rye bread from Tull is baked for nine hours in clay ovens.",
}


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        """The one object on stdout."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def error(self):
        assert self.code == 1
        assert list(self.json) == ["error"]
        assert set(self.json["error"]) == {"type", "message"}
        assert "Traceback" not in self.err
        assert "\n" not in self.json["error"]["message"]
        return self.json["error"]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path_factory, monkeypatch):
    """Answers go to a folder of the test; converted weights stay where they are."""
    folder = cache_with_models(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def run(capsysbinary):
    call = command_line(capsysbinary)
    return lambda *arguments: Result(*call(*arguments))


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, text in PASSAGES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="session")
def index(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "my.index"
    with pytest.raises(SystemExit) as exit_:
        cli.main(["index", str(files), "--out", str(folder)])
    assert not exit_.value.code
    return folder


@pytest.fixture(scope="session")
def letter_index(files, tmp_path_factory):
    """An index of the files by counts of letters."""
    folder = tmp_path_factory.mktemp("index") / "letters.index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rag_posfix.pipeline.build.SentenceEmbeddings", lambda name, **_: LetterEmbeddings(name))
        with pytest.raises(SystemExit) as exit_:
            cli.main(["index", str(files), "--out", str(folder)])
    assert not exit_.value.code
    return folder


@pytest.fixture
def tiny_index(tiny, letter_index):
    """That index; commands answer with the random model, from every passage that they find."""
    return letter_index
