import itertools

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, PromptTooLongError, UnknownNameError
from rag_posfix.generation.fake import FakeGenerator
from tests.support.toy_encoder import ToyEncoder

PASSAGES = (
    "The Seine flows through Paris. It is long.",
    "Rome lies on the Tiber. It is old.",
    "Bread is baked in ovens.",
)


def ask(question, passages=PASSAGES, window=8192, **sampling):
    fake = FakeGenerator(ToyEncoder(), window)
    layout = Assembler(fake.encoder, 8192).assemble(question, [Document(page_content=p) for p in passages]).layout
    return fake, GenerationRequest(layout, sampling=Sampling(**sampling))


def test_it_follows_the_protocol():
    assert isinstance(FakeGenerator(ToyEncoder()), Generator)


def test_it_answers_with_the_first_sentence_of_the_passage_that_shares_the_most_words():
    fake, request = ask("On which river lies Rome?")
    generation = fake.generate(request)
    assert generation.text == "Rome lies on the Tiber"
    assert generation.finish_reason == "stop"
    assert generation.usage.prompt_tokens == len(request.layout.token_ids)
    assert generation.usage.completion_tokens == len(generation.token_ids) == 5


def test_the_answer_and_the_attention_follow_the_passages_when_they_are_permuted():
    found = set()
    for passages in itertools.permutations(PASSAGES):
        fake, request = ask("On which river lies Rome?", passages)
        generation = fake.generate(request)
        found.add((generation.text, tuple(sorted(zip(passages, generation.attention, strict=True)))))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("question", "passages", "attention"),
    [
        # Common with the question: 0 words of the first, "rome", "lies", "on" of the second, "in" of the third.
        ("What lies in Rome on maps?", PASSAGES, (0.0, 0.75, 0.25)),
        ("Why?", PASSAGES, pytest.approx((1 / 3, 1 / 3, 1 / 3))),
        ("Why?", (), ()),
    ],
)
def test_attention_is_the_share_of_common_words(question, passages, attention):
    fake, request = ask(question, passages)
    assert fake.generate(request).attention == attention


def test_max_tokens_counts_words():
    fake, request = ask("On which river lies Rome?", max_tokens=2)
    generation = fake.generate(request)
    assert (generation.text.strip(), generation.finish_reason) == ("Rome lies", "length")
    assert generation.usage.completion_tokens == 2


def test_a_stop_string_cuts_the_answer():
    fake, request = ask("On which river lies Rome?", stop=(" on",))
    assert fake.generate(request).text == "Rome lies"


@pytest.mark.parametrize("passage", ["Rome lies on the Tiber", "\n  Rome lies", "Rome  \n lies \n"])
def test_the_stream_is_the_answer_in_pieces(passage):
    fake, request = ask("Rome?", (passage,))
    chunks = list(fake.stream(request))
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].generation.text == passage
    assert len(chunks) > 2


def test_a_prompt_beyond_the_window_is_refused():
    fake, request = ask("Why?", window=100)
    with pytest.raises(PromptTooLongError, match="the context window is 100"):
        fake.generate(request)
    with pytest.raises(PromptTooLongError):
        next(fake.stream(request))


def test_mitigations_are_checked_as_the_engine_checks_them():
    fake = FakeGenerator(ToyEncoder(), order_invariant=False)
    info = fake.describe(MitigationChoice("context_experts", {"experts": 3}))
    assert (info.name, info.order_invariant) == ("context_experts", False)
    assert info.fingerprint != fake.describe(MitigationChoice("context_experts")).fingerprint
    with pytest.raises(UnknownNameError, match="Did you mean 'context_experts'"):
        fake.describe(MitigationChoice("context_expert"))
    with pytest.raises(ConfigError, match="has no parameter 'expert'"):
        fake.describe(MitigationChoice("context_experts", {"expert": 3}))
