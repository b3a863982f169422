import itertools
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from langchain_core.cross_encoders import BaseCrossEncoder
from langchain_core.documents import Document
from safetensors.torch import load_file, save_file

from rag_posfix.errors import ConfigError, PromptTooLongError, RerankingError, RerankingTimeoutError
from rag_posfix.reranking import CrossEncoderReranker
from rag_posfix.reranking.cross_encoder import ChunkedText, split_into_chunks
from rag_posfix.reranking.deadline import deadline
from tests.support.clock import Clock
from tests.support.cross_encoder import MAX_LENGTH, tiny_cross_encoder
from tests.support.reader import order, raw, scores

TEXTS = ["the tiber flows.", "bread, bread, bread!", "a", "paris lies on the seine"]
QUESTION = "which river?"
# Letters one by one, two separators and the class token: what is left of 64 for a passage.
ROOM = MAX_LENGTH - 3 - len("whichriver?")


def documents(*texts):
    return [Document(page_content=text) for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_cross_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(folder):
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu")


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    """The same model without an activation, as those of MS MARCO are saved."""
    from sentence_transformers import CrossEncoder

    folder = tiny_cross_encoder(tmp_path_factory.mktemp("logits"), activation=torch.nn.Identity())
    return CrossEncoder(str(folder), device="cpu")


def predicted(encoder, *texts):
    return {text: float(encoder.predict([(QUESTION, text)], show_progress_bar=False)[0]) for text in texts}


def test_scores_are_those_of_the_models_own_predict(folder, encoder):
    expected = predicted(encoder, *TEXTS)
    for model in (encoder, str(folder)):
        for batch_size in (1, 3, 32):
            reranker = CrossEncoderReranker(model=model, batch_size=batch_size)
            result = reranker.compress_documents(documents(*TEXTS), QUESTION)
            assert scores(result) == pytest.approx(expected, abs=1e-6)
            assert raw(result) == scores(result)
            assert order(result) == sorted(TEXTS, key=lambda text: -expected[text])
    assert len({round(score, 6) for score in expected.values()}) == 4


def test_logits_go_through_a_sigmoid(encoder, logits):
    result = CrossEncoderReranker(model=logits).compress_documents(documents(*TEXTS), QUESTION)
    assert raw(result) == pytest.approx(predicted(logits, *TEXTS), abs=1e-5)  # float32, alone and in a batch
    assert scores(result) == pytest.approx(predicted(encoder, *TEXTS), abs=1e-6)
    assert not all(0 <= value <= 1 for value in raw(result).values())


def test_titles_are_read(encoder):
    titled = Document(page_content="a", metadata={"title": "rome"})
    result = CrossEncoderReranker(model=encoder).compress_documents([titled], QUESTION)
    assert scores(result)["a"] == pytest.approx(predicted(encoder, "rome\na")["rome\na"], abs=1e-6)


def test_a_long_document_is_read_in_chunks_and_the_best_counts(encoder):
    text = " ".join(["seine"] * 12 + ["tiber"] * 12)
    cut = split_into_chunks(encoder.tokenizer, QUESTION, text, MAX_LENGTH, 64)
    assert len(cut.chunks) == math.ceil(24 / (ROOM // 5))
    assert "".join(cut.chunks) == text
    assert all(set(chunk.split()) <= {"seine", "tiber"} for chunk in cut.chunks), "no word is torn"
    result = CrossEncoderReranker(model=encoder).compress_documents(documents(text), QUESTION)
    assert scores(result)[text] == pytest.approx(max(predicted(encoder, *cut.chunks).values()), abs=1e-6)
    said = result[0].metadata["reranking"]
    assert (said["long_document"], said["chunks"]) == ("chunked", len(cut.chunks))
    assert result[0].page_content == text


def test_a_long_document_is_cut_where_asked(encoder):
    text = " ".join(["seine"] * 12 + ["tiber"] * 12)
    reranker = CrossEncoderReranker(model=encoder, long_documents="truncate")
    result = reranker.compress_documents(documents(text, "a"), QUESTION)
    assert scores(result)[text] == pytest.approx(predicted(encoder, text)[text], abs=1e-6)
    said = {one.page_content: one.metadata["reranking"].get("long_document") for one in result}
    assert said == {text: "truncated", "a": None}


def test_chunks_without_spaces_end_between_tokens(encoder):
    cut = split_into_chunks(encoder.tokenizer, QUESTION, "a." * 100, MAX_LENGTH, 64)
    assert "".join(cut.chunks) == "a." * 100
    sizes = [len(encoder.tokenizer(chunk, add_special_tokens=False)["input_ids"]) for chunk in cut.chunks]
    assert max(sizes) <= ROOM


def test_a_shorter_window_can_be_asked_for(encoder):
    text = "tiber " * 6
    short = CrossEncoderReranker(model=encoder, max_length=32).compress_documents(documents(text), QUESTION)
    assert short[0].metadata["reranking"]["chunks"] == 2  # 18 letters of 30 fit
    cut = CrossEncoderReranker(model=encoder, max_length=32, long_documents="truncate")
    result = cut.compress_documents(documents(text), QUESTION)
    assert scores(result)[text] == pytest.approx(predicted(encoder, text[: 18 + 3])[text[:21]], abs=1e-6)
    assert encoder.max_seq_length == MAX_LENGTH, "the model that was given stays as it is"


def test_a_question_that_fills_the_window_is_told(encoder):
    with pytest.raises(PromptTooLongError, match="the question takes 60 tokens"):
        CrossEncoderReranker(model=encoder).compress_documents(documents("a"), "river" * 12)


class Numbers(BaseCrossEncoder):
    def __init__(self, *numbers):
        self.numbers = itertools.cycle(numbers)
        self.batches = []

    def score(self, text_pairs):
        self.batches.append(text_pairs)
        return [next(self.numbers) for _ in text_pairs]


def test_a_model_of_langchains_kind_is_taken_for_one_that_gives_logits_unless_told_otherwise():
    result = CrossEncoderReranker(model=Numbers(0.0, math.log(3))).compress_documents(documents("a", "bb"), QUESTION)
    assert scores(result) == pytest.approx({"a": 0.5, "bb": 0.75})
    plain = CrossEncoderReranker(model=Numbers(0.25, 0.5), activation="none")
    assert scores(plain.compress_documents(documents("a", "bb"), QUESTION)) == {"a": 0.25, "bb": 0.5}
    with pytest.raises(RerankingError, match=r"was scored 3\.0; a score must lie in"):
        CrossEncoderReranker(model=Numbers(3.0), activation="none").compress_documents(documents("a"), QUESTION)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_an_error(bad):
    with pytest.raises(RerankingError, match="not finite"):
        CrossEncoderReranker(model=Numbers(0.0, bad)).compress_documents(documents("a", "bb"), QUESTION)


def test_ten_thousand_candidates_are_read_in_batches():
    model = Numbers(*range(7))
    result = CrossEncoderReranker(model=model, batch_size=64).compress_documents(
        documents(*map(str, range(10_000))), QUESTION
    )
    assert len(result) == 10_000
    assert {len(batch) for batch in model.batches} == {64, 10_000 % 64}


def test_batches_are_the_same_for_every_order_of_documents_of_one_length():
    # The last digits of a score depend on its place in the batch: here each place adds its own.
    found = set()
    for texts in itertools.permutations(("aa", "bb", "cc", "d")):
        model = Numbers(*(place * 1e-7 for place in range(4)))
        result = CrossEncoderReranker(model=model, batch_size=3).compress_documents(documents(*texts), QUESTION)
        found.add((*map(tuple, model.batches), *sorted(scores(result).items())))
    assert len(found) == 1


def test_a_text_that_fills_the_window_is_whole_and_a_longer_one_is_not(encoder):
    def split(length, chunk, window=MAX_LENGTH):
        return split_into_chunks(encoder.tokenizer, QUESTION, "." * length, window, 64 * chunk)

    assert split(ROOM, chunk=False) == ChunkedText(("." * ROOM,))
    assert split(ROOM + 1, chunk=False) == ChunkedText(("." * (ROOM + 1),), truncated=True)
    assert split(ROOM, chunk=True) == ChunkedText(("." * ROOM,))
    assert split(ROOM + 1, chunk=True) == ChunkedText(("." * ROOM, "."))
    smallest = MAX_LENGTH - ROOM + 8  # eight tokens are left for a passage
    assert split(9, chunk=True, window=smallest) == ChunkedText(("." * 8, "."))
    with pytest.raises(PromptTooLongError, match=f"window of {smallest - 1} has 7 left for a passage; at least 8"):
        split(9, chunk=True, window=smallest - 1)


def test_the_deadline_is_checked_between_batches(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("rag_posfix.reranking.deadline.time", SimpleNamespace(monotonic=clock))

    class Slow(Numbers):
        def score(self, text_pairs):
            clock.advance(2)
            return super().score(text_pairs)

    model = Slow(1.0)
    with deadline(1), pytest.raises(RerankingTimeoutError):
        CrossEncoderReranker(model=model, batch_size=1).compress_documents(documents("a", "b"), QUESTION)
    assert len(model.batches) == 1


def test_a_model_with_several_outputs_is_refused(tmp_path):
    model = str(tiny_cross_encoder(tmp_path, num_labels=3))
    with pytest.raises(RerankingError, match="has 3 outputs, must have one"):
        CrossEncoderReranker(model=model).compress_documents(documents("a"), QUESTION)


def test_a_model_that_is_not_there_is_told_when_it_is_needed(tmp_path):
    reranker = CrossEncoderReranker(model=str(tmp_path / "none"))
    with pytest.raises(RerankingError, match=r"none' could not be loaded on device 'auto': .*; pass the folder"):
        reranker.compress_documents(documents("a"), QUESTION)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("classifier.", r"2 missing \(classifier\.bias, classifier\.weight\)"),
        ("bert.pooler.", r"2 missing \(bert\.pooler\.dense\.bias, bert\.pooler\.dense\.weight\)"),
        ("bert.encoder.layer.1.output.dense.bias", r"1 missing \(bert\.encoder\.layer\.1\.output\.dense\.bias\)"),
    ],
)
def test_a_model_that_would_score_with_random_weights_is_refused(tmp_path, names, told):
    folder = tiny_cross_encoder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    left = {name: value for name, value in weights.items() if not name.startswith(names)}
    save_file(left, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RerankingError, match=rf"the weights of a BertForSequenceClassification: {told};"):
        CrossEncoderReranker(model=str(folder)).compress_documents(documents("a"), QUESTION)


def test_a_model_with_weights_that_would_be_left_out_is_refused(tmp_path):
    folder = tiny_cross_encoder(tmp_path)
    norm = "bert.encoder.layer.0.attention.self.query_norm.weight"
    weights = {**load_file(folder / "model.safetensors"), norm: torch.ones(8)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RerankingError, match=rf"1 unexpected \({norm}\);"):
        CrossEncoderReranker(model=str(folder)).compress_documents(documents("a"), QUESTION)


def test_an_encoder_that_was_not_trained_to_rank_is_refused(folder, tmp_path):
    headless = shutil.copytree(folder, tmp_path / "headless")
    transformers.BertModel.from_pretrained(folder).save_pretrained(headless)
    with pytest.raises(RerankingError, match=r"classifier\.weight\); config\.json calls it a BertModel; use a check"):
        CrossEncoderReranker(model=str(headless)).compress_documents(documents("a"), QUESTION)


@pytest.mark.parametrize("model", ["", 7, None])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ConfigError, match="must be a model id, a folder"):
        CrossEncoderReranker(model=model)
