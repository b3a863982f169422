"""Log-probabilities over HTTP, with the real client on the real SmolLM2, against plain forwards of the model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline.pipeline import Defaults, Pipeline
from tests.support.serving import DictCache, serving

pytestmark = pytest.mark.weights

TEXT = "The capital of France is Paris. The capital of Italy is"
TOLERANCE = 1e-3
"""In float32: passes of other lengths add in another order."""


@pytest.fixture(scope="module")
def client(float32_engine: Engine) -> Iterator[openai.OpenAI]:
    defaults = Defaults(mitigation=MitigationChoice("none"))
    assembler = Assembler(float32_engine.encoder, float32_engine.context_window)
    pipeline = Pipeline(float32_engine, assembler, cache=DictCache(), defaults=defaults)
    with (
        serving(pipeline) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=120) as client,
    ):
        yield client


def forward(engine: Engine, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of each next token by the model alone, (T, V) float32."""
    with torch.no_grad():
        logits: torch.Tensor = engine.loaded.model(torch.tensor([ids])).logits
    return logits[0].float().log_softmax(-1)


def test_a_prompt_is_scored_as_by_a_plain_forward(float32_engine: Engine, client: openai.OpenAI):
    ids = float32_engine.encoder.encode_prompt(TEXT)
    expected = forward(float32_engine, ids)
    completion = client.completions.create(
        model="default", prompt=[TEXT], max_tokens=1, echo=True, logprobs=2, temperature=0, seed=1234
    )
    (choice,) = completion.choices
    scored = choice.logprobs
    assert scored is not None
    assert scored.tokens is not None
    assert "".join(scored.tokens[:-1]) == TEXT
    assert choice.text == TEXT + scored.tokens[-1]
    assert scored.text_offset is not None
    assert [TEXT[a:b] for a, b in zip(scored.text_offset, scored.text_offset[1:], strict=False)] == scored.tokens[:-1]
    assert scored.token_logprobs is not None
    assert scored.token_logprobs[0] is None
    found = torch.tensor(scored.token_logprobs[1:-1])
    own = expected[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert (found - own).abs().max() < TOLERANCE
    assert scored.top_logprobs is not None
    best = expected.argmax(-1).tolist()
    assert [max(top, key=lambda token: top[token]) for top in scored.top_logprobs[1:]] == [
        float32_engine.encoder.decode([token]) for token in best
    ]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(ids), 1)


@pytest.mark.slow
def test_the_tokens_of_a_chat_answer_are_scored_plain_streamed_and_from_the_cache(
    float32_engine: Engine, client: openai.OpenAI
):
    asked = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answers = [client.chat.completions.create(**asked) for _ in range(2)]
    assert [answer.model_extra["cached"] for answer in answers] == [False, True]
    first, cached = (answer.choices[0].logprobs for answer in answers)
    assert first is not None
    assert first == cached
    assert first.content is not None
    text = answers[0].choices[0].message.content
    assert "".join(token.token for token in first.content) == text
    layout = (
        Assembler(float32_engine.encoder, float32_engine.context_window)
        .assemble("What is the capital of Italy?", [])
        .layout
    )
    greedy = GenerationRequest(layout, MitigationChoice("none"), Sampling(max_tokens=4))
    prompt, written = list(layout.token_ids), list(float32_engine.generate(greedy).token_ids)
    assert float32_engine.encoder.decode(written) == text
    expected = forward(float32_engine, prompt + written)[len(prompt) - 1 : -1]
    for token, number, row in zip(first.content, written, expected, strict=True):
        assert token.logprob == pytest.approx(float(row[number]), abs=TOLERANCE)
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
        assert bytes(token.bytes or ()) == token.token.encode()
    chunks = list(client.chat.completions.create(**{**asked, "stream": True, "extra_body": {"cache": False}}))
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    streamed = [token for piece in pieces if piece is not None for token in piece.content or ()]
    assert [token.token for token in streamed] == [token.token for token in first.content]
    assert [token.logprob for token in streamed] == pytest.approx([t.logprob for t in first.content], abs=TOLERANCE)
