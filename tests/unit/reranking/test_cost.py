"""What a ranking costs, in tokens that the model reads and in forward passes: counted, not claimed."""

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import tokenize_passage, tokenize_prompt
from rag_posfix.attention import masks
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.prefill.per_passage import TILE
from rag_posfix.reranking import (
    AttentionSortingReranker,
    CalibratedAttentionReranker,
    InContextReranker,
    LikelihoodReranker,
    ListwiseReranker,
    YesNoReranker,
)
from rag_posfix.reranking.in_context import INSTRUCTION
from tests.support.tiny import loaded_model
from tests.support.tiny_evaluation import CountedForwards
from tests.support.toy_encoder import ToyEncoder

TEXTS = [f"Passage number {n} is about something else: {'more ' * n}" for n in range(6)]
QUESTION = "Which passage is it?"
PASSAGES = sum(len(text) + 2 for text in TEXTS)


@pytest.fixture(scope="module")
def loaded():
    return loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=2, max_position_embeddings=4096)


def engine_of(loaded, store=None):
    return Engine(loaded, ToyEncoder(), "tiny", "print", passages=store)


def documents():
    return [Document(page_content=text) for text in TEXTS]


def passes(engine, reranker, asked=QUESTION):
    """Tokens of each forward pass, rows times columns."""
    with CountedForwards(engine) as counted:
        reranker.compress_documents(documents(), asked)
    return counted.shapes


def prompt(question=QUESTION, template=None):
    return tokenize_prompt(ToyEncoder(), template or PromptTemplate(), question)


def test_in_context_reads_the_documents_once_and_two_short_suffixes(loaded):
    engine = engine_of(loaded)
    reranker = InContextReranker(generator=engine)
    template = PromptTemplate(question_prefix=INSTRUCTION, answer_cue="")
    suffixes = [len(prompt(asked, template).suffix) for asked in ("N/A", QUESTION)]
    assert passes(engine, reranker) == [(1, len(prompt().prefix) + PASSAGES), (1, suffixes[0]), (1, suffixes[1])]


def test_another_question_about_the_same_documents_reads_the_suffixes_alone(loaded):
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    reranker = InContextReranker(generator=engine)
    passes(engine, reranker)
    assert [rows * tokens < 200 for rows, tokens in passes(engine, reranker, "And what is this one?")] == [True, True]


def test_listwise_takes_a_pass_for_every_token_that_it_writes(loaded):
    engine = engine_of(loaded)
    written, listwise = passes(engine, ListwiseReranker(generator=engine)), 1
    assert written[0][1] > PASSAGES
    assert all(shape == (1, 1) for shape in written[1:])
    assert len(written) > 10 * listwise, "a model that does not end its answer writes all that it may"
    assert len(passes(engine, InContextReranker(generator=engine))) == 3


def test_likelihood_reads_prefix_and_passages_once_and_the_question_once_per_passage(loaded):
    engine = engine_of(loaded)
    reranker = LikelihoodReranker(generator=engine)
    prefix, batch, suffix = passes(engine, reranker)
    longest = max(map(len, TEXTS)) + 2
    assert (prefix[0], batch[0]) == (1, len(TEXTS))
    assert 0 <= prefix[1] - len(prompt().prefix) < TILE
    assert 0 <= batch[1] - longest < TILE
    assert suffix == (len(TEXTS), len("Question: " + QUESTION + reranker.restriction))


def test_a_warm_likelihood_reads_the_question_alone(loaded):
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    reranker = LikelihoodReranker(generator=engine)
    cold = passes(engine, reranker)
    assert passes(engine, reranker) == cold[-1:]


def test_the_judge_reads_twenty_passages_in_one_pass_and_the_question_after_each_and_none_in_another(loaded):
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    reranker = YesNoReranker(generator=engine)
    twenty = [Document(page_content=f"Passage {n:02} of twenty") for n in range(20)]
    with CountedForwards(engine) as cold:
        reranker.compress_documents(twenty, QUESTION)
    with CountedForwards(engine) as warm:
        reranker.compress_documents(twenty[::-1], "And what is this one?")
    assert [rows for rows, _ in cold.shapes] == [1, 20, 21]
    assert [rows for rows, _ in warm.shapes] == [21]


@pytest.mark.parametrize("rounds", [1, 2])
def test_attention_sorting_reads_the_prompt_once_per_round(loaded, rounds):
    engine = engine_of(loaded)
    whole = len(prompt()) + PASSAGES
    assert passes(engine, AttentionSortingReranker(generator=engine, rounds=rounds)) == [(1, whole)] * rounds


def test_calibrated_attention_reads_the_prompt_again_from_each_dummy_on(loaded):
    engine = engine_of(loaded)
    read = passes(engine, CalibratedAttentionReranker(generator=engine, order="input"))
    sizes = [len(tokenize_passage(ToyEncoder(), PromptTemplate(), text)) for text in TEXTS]
    starts = [len(prompt().prefix) + sum(sizes[:n]) for n in range(len(sizes))]
    whole = len(prompt()) + PASSAGES
    assert read[0] == (1, whole)
    # A dummy may begin with the very token that the passage began with.
    assert all(0 <= whole - start - tokens < 16 for start, (_, tokens) in zip(starts, read[1:], strict=True))
    profile = CalibratedAttentionReranker(generator=engine, profile=(2.0, 1.0))
    assert passes(engine, profile) == [(1, whole)]


def test_no_tensor_of_tokens_by_tokens_is_made(loaded, monkeypatch):
    shapes = []

    def recorded(query, key, scaling, original=masks.scores):
        shapes.append((query.shape[2], key.shape[2]))
        return original(query, key, scaling)

    monkeypatch.setattr(masks, "scores", recorded)
    InContextReranker(generator=engine_of(loaded)).compress_documents(documents(), QUESTION)
    assert max(keys for _, keys in shapes) > PASSAGES
    assert max(queries for queries, _ in shapes) <= masks.ROWS
