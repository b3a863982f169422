"""The reference is transformers' Qwen3 and two matrices, over a prompt that is written out here."""

import json
import math

import pytest
import tokenizers
import torch
import transformers
from langchain_core.documents import Document
from safetensors import safe_open
from safetensors.torch import save_file

from rag_posfix.assembly.documents import content_key
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError, PromptTooLongError, UnsupportedModelError
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.deferred import deferred_generator
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.generation.load import load_engine
from rag_posfix.plan.layout import Layout
from rag_posfix.reranking import LastButNotLateReranker
from rag_posfix.reranking.build import RerankerModels, build_reranker, check_loads_no_model
from tests.support.reader import order, raw, scores
from tests.support.tiny import VOCABULARY, stock_model
from tests.support.toy_encoder import MarkedEncoder, ToyEncoder

QUESTION = "which river?"
TEXTS = ("Rome lies on the Tiber.", "Paris lies on the Seine.", "Bread is baked.")
CONTROLS = ["<|im_start|>", "<|im_end|>", "<|embed_token|>", "<|rerank_token|>"]
SHAPES = {"projector.0.weight": (32, 64), "projector.2.weight": (24, 32)}


def save_reranker(folder, tensors, architecture="JinaForRanking", controls=CONTROLS):
    """Write a tiny random Qwen3 with further tensors, and a tokenizer of letters with control tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(code): code for code in range(VOCABULARY)}, []))
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="\x02")
    tokenizer.add_special_tokens({"additional_special_tokens": controls})
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": VOCABULARY + len(CONTROLS), "max_position_embeddings": 4096}
    stock_model("qwen3", tie_word_embeddings=True, **sizes).save_pretrained(folder)
    weights = folder / "model.safetensors"
    with safe_open(str(weights), "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(stored | tensors, str(weights), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return str(folder)


@pytest.fixture(scope="module")
def projector():
    drawn = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=drawn) / 8 for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, projector):
    return save_reranker(tmp_path_factory.mktemp("reranker"), projector)


@pytest.fixture(scope="module")
def engine(folder):
    return load_engine(folder, dtype="float32")


@pytest.fixture(scope="module")
def reference(folder, projector):
    """Return a function from a question and texts to the vectors of the texts and the question, in plain torch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Qwen3Model.from_pretrained(folder)

    def vectors(question, texts):
        passages = "\n".join(f'<passage id="{i}">\n{text}<|embed_token|>\n</passage>' for i, text in enumerate(texts))
        prompt = (
            "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based "
            "on how relevant they are to the query. If the query is a question, how relevant a passage is depends on "
            "how well it answers the question. If not, try to analyze the intent of the query and assess how well "
            "each passage satisfies the intent. If an instruction is provided, you should follow the instruction when "
            "determining the ranking.<|im_end|>\n<|im_start|>user\n"
            f"I will provide you with {len(texts)} passages, each indicated by a numerical identifier. Rank the "
            f"passages based on their relevance to query: {question}\n{passages}\n"
            f"<query>\n{question}<|rerank_token|>\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = torch.tensor(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            states = model(ids[None]).last_hidden_state[0]
        first, last = projector.values()
        projected = (states @ first.T).relu() @ last.T
        of = dict(zip(CONTROLS, tokenizer.convert_tokens_to_ids(CONTROLS), strict=True))
        return projected[ids == of["<|embed_token|>"]], projected[ids == of["<|rerank_token|>"]]

    return vectors


def cosines(states, asked):
    return torch.cosine_similarity(states, asked, dim=-1).tolist()


def documents(*texts):
    return [Document(page_content=text) for text in texts]


@pytest.mark.parametrize("given", [TEXTS, TEXTS[::-1]])
def test_raw_scores_are_the_cosines_of_the_reference_in_the_given_order(engine, reference, given):
    result = LastButNotLateReranker(generator=engine, order="input").compress_documents(documents(*given), QUESTION)
    expected = dict(zip(given, cosines(*reference(QUESTION, given)), strict=True))
    assert raw(result) == pytest.approx(expected, abs=1e-5)
    assert scores(result) == pytest.approx({text: (1 + value) / 2 for text, value in expected.items()}, abs=1e-5)
    assert order(result) == sorted(given, key=lambda text: -expected[text])


def test_the_order_of_the_prompt_is_by_content_unless_it_is_given(engine, reference):
    by_content = sorted(TEXTS, key=lambda text: content_key(Document(page_content=text)))
    expected = dict(zip(by_content, cosines(*reference(QUESTION, by_content)), strict=True))
    reranker = LastButNotLateReranker(generator=engine)
    for given in (TEXTS, TEXTS[::-1]):
        assert raw(reranker.compress_documents(documents(*given), QUESTION)) == pytest.approx(expected, abs=1e-5)


def test_a_title_is_read_before_the_text_and_a_long_document_is_cut_for_scoring_alone(engine, reference):
    given = [Document(page_content="x" * 40, metadata={"title": "Rivers"}), Document(page_content="short")]
    reranker = LastButNotLateReranker(generator=engine, order="input", max_document_tokens=20)
    long, short = sorted(reranker.compress_documents(given, QUESTION), key=lambda found: found.page_content == "short")
    states, asked = reference(QUESTION, ["Rivers\n" + "x" * 13, "short"])
    found = [document.metadata["reranking"]["raw_score"] for document in (long, short)]
    assert found == pytest.approx(cosines(states, asked), abs=1e-5)
    assert long.page_content == "x" * 40
    assert long.metadata["reranking"]["long_document"] == "truncated"
    assert "long_document" not in short.metadata["reranking"]


def test_several_prompts_are_compared_with_the_weighted_sum_of_their_questions(engine, reference):
    reranker = LastButNotLateReranker(generator=engine, order="input", window=2)
    result = reranker.compress_documents(documents(*TEXTS), QUESTION)
    first, second = reference(QUESTION, TEXTS[:2]), reference(QUESTION, TEXTS[2:])
    weights = [(1 + max(cosines(*block))) / 2 for block in (first, second)]
    asked = weights[0] * first[1] + weights[1] * second[1]
    expected = cosines(torch.cat((first[0], second[0])), asked)
    assert raw(result) == pytest.approx(dict(zip(TEXTS, expected, strict=True)), abs=1e-5)


class Scripted(FakeGenerator):
    """Returns vectors from a table, by the text before each mark, and keeps the prompts."""

    capabilities = frozenset({"states"})

    def __init__(self, table, context_window=4096):
        super().__init__(MarkedEncoder(), context_window)
        self.table, self.prompts = table, []

    def projected_states(self, token_ids, marked):
        assert len(token_ids) <= self.context_window
        self.prompts.append(token_ids)
        starts = [0, *(mark + 1 for mark in marked)]
        before = [self.encoder.decode(token_ids[start:stop]) for start, stop in zip(starts, marked, strict=False)]
        return [self.table[text.rpartition(">\n")[2]].pop(0) for text in before]


def test_scores_of_two_prompts_by_hand():
    # Prompt 1: cos = 1, weight 1. Prompt 2: cos((0, 1), (3, 4)) = .8, weight .9. The question is (1, .9), of length
    # 1.81 ** .5; its cosines are 1 / 1.81 ** .5 and (3 + 3.6) / 5 / 1.81 ** .5.
    generator = Scripted({"a": [(2.0, 0.0)], "b": [(3.0, 4.0)], "why?": [(1.0, 0.0), (0.0, 1.0)]})
    reranker = LastButNotLateReranker(generator=generator, window=1, order="input")
    result = reranker.compress_documents(documents("a", "b"), "why?")
    assert order(result) == ["b", "a"]
    assert raw(result) == pytest.approx({"a": 1 / math.sqrt(1.81), "b": 1.32 / math.sqrt(1.81)})


def test_passages_beyond_the_context_window_take_a_further_prompt_and_a_vector_of_zeros_has_the_cosine_0():
    texts = [letter * 100 for letter in "abc"]
    table = {text: [(1.0, 0.0)] for text in texts} | {"why?": [(1.0, 0.0)] * 2, texts[2]: [(0.0, 0.0)]}
    generator = Scripted(table, context_window=1020)
    result = LastButNotLateReranker(generator=generator, order="input").compress_documents(documents(*texts), "why?")
    assert raw(result) == {texts[0]: 1.0, texts[1]: 1.0, texts[2]: 0.0}
    assert [prompt.count(259) for prompt in generator.prompts] == [2, 1]
    with pytest.raises(PromptTooLongError, match="tokens are left for each document, and at least 16 are needed"):
        LastButNotLateReranker(generator=Scripted(table, 670)).compress_documents(documents("a"), "why?")


def test_control_tokens_in_a_document_are_text(engine, reference, monkeypatch):
    prompts = []
    read = type(engine).projected_states
    monkeypatch.setattr(engine, "projected_states", lambda *given: prompts.append(given) or read(engine, *given))
    text = "a<|embed_token|>b<|rerank_token|>"
    LastButNotLateReranker(generator=engine).compress_documents(documents(text, "c"), f"{QUESTION}<|rerank_token|>")
    ((ids, marked),) = prompts
    marks = [engine.encoder.encode_template(name) for name in CONTROLS[2:]]
    assert [i for i, token in enumerate(ids) if [token] in marks] == marked
    assert text in engine.encoder.decode(ids)


def test_generators_around_an_engine_return_its_states(engine, folder, tmp_path):
    ids, marked = list(range(3, 20)), [4, 16]
    expected = engine.projected_states(ids, marked)
    deferred = deferred_generator(folder, lambda: engine, dtype="float32", cache_dir=tmp_path)
    assert deferred.projected_states(ids, marked) == expected
    batching = BatchingGenerator(engine)
    try:
        assert batching.projected_states(ids, marked) == expected
    finally:
        batching.close()


def test_a_model_of_its_own_is_found_by_name_and_questions_cannot_name_it(engine):
    asked = []
    models = RerankerModels(lambda: None, lambda: None, load_model=lambda name: asked.append(name) or engine)
    spec = MethodSpec("jina_v3", {"model": "jinaai/jina-reranker-v3"})
    assert build_reranker(spec, models).generator is engine
    assert asked == ["jinaai/jina-reranker-v3"]
    with pytest.raises(ConfigError, match="cannot choose jina_v3"):
        check_loads_no_model(spec)


def test_a_trained_reranker_writes_no_answers(engine):
    with pytest.raises(UnsupportedModelError, match=r"is a reranker .*last_but_not_late:model=NAME"):
        engine.open(Layout.plain((3, 4, 5)))


def test_models_without_projector_or_control_tokens_are_refused(tmp_path, projector):
    plain = load_engine(save_reranker(tmp_path / "plain", {}), dtype="float32")
    with pytest.raises(ConfigError, match=r"plain has no projector .*model=jinaai/jina-reranker-v3"):
        LastButNotLateReranker(generator=plain).compress_documents(documents("a"), QUESTION)
    unmarked = load_engine(save_reranker(tmp_path / "unmarked", projector, controls=CONTROLS[:2]), dtype="float32")
    with pytest.raises(ConfigError, match=r"unmarked has no control token '<\|embed_token\|>'"):
        LastButNotLateReranker(generator=unmarked).compress_documents(documents("a"), QUESTION)
    with pytest.raises(ConfigError, match="FakeGenerator cannot read passages for a reranker"):
        LastButNotLateReranker(generator=FakeGenerator(ToyEncoder()))


def test_a_projector_of_another_architecture_and_other_tensors_are_refused(tmp_path, projector):
    for name, tensors, architecture in (
        ("qwen3", projector, "Qwen3ForCausalLM"),
        ("score", {**projector, "score.weight": torch.zeros(1, 64)}, "JinaForRanking"),
    ):
        with pytest.raises(ConfigError, match=r"unexpected \((projector.0.weight|score.weight)"):
            load_engine(save_reranker(tmp_path / name, tensors, architecture), dtype="float32")
