"""Log-probabilities in chat completions: whole, streamed, stopped and from the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rag_posfix.contracts.request import (
    Chunk,
    Generation,
    GenerationRequest,
    ScoredToken,
    TokenScore,
)
from rag_posfix.generation.fake import FakeGenerator
from tests.services.chat_requests import URL, ask, events, refused
from tests.support.serving import (
    ANSWER,
    BRIDGE,
    DictCache,
    chat,
    client_for,
    make_pipeline,
)
from tests.support.toy_encoder import ToyEncoder


def test_tokens_come_with_log_probabilities_whole_streamed_and_from_the_cache():
    pipeline = make_pipeline(cache=DictCache())
    asked = {"documents": [BRIDGE], "logprobs": True, "top_logprobs": 2}
    first, second = ask(pipeline, **asked), ask(pipeline, **asked)
    assert (first["cached"], second["cached"]) == (False, True)
    scored = first["choices"][0]["logprobs"]
    assert second["choices"][0]["logprobs"] == scored
    assert scored["refusal"] is None
    assert "".join(token["token"] for token in scored["content"]) == ANSWER
    token = scored["content"][0]
    assert token["logprob"] == pytest.approx(-0.6931, abs=1e-4)
    assert (token["token"], token["bytes"]) == ("The ", list(b"The "))
    assert [one["token"] for one in token["top_logprobs"]] == ["The ", "other1"]
    for cache in (True, False):
        body = chat(**asked, stream=True, cache=cache)
        parts = events(client_for(pipeline).post(URL, json=body).text)[:-1]
        found = [part["choices"][0]["logprobs"] for part in parts if part["choices"]]
        assert [token for one in found if one for token in one["content"]] == scored["content"]


class StoppedAnswer(FakeGenerator):
    """Says "It is 19" and stops at "11": the last two tokens are of the stop string and the end of the answer."""

    def generate(self, request: GenerationRequest) -> Generation:
        tokens = (("It ", 0), ("is ", 3), ("1911", 6), ("!", 8), ("</s>", 11))
        scored = tuple(ScoredToken(TokenScore(text.encode(), -1.0), start) for text, start in tokens)
        return replace(super().generate(request), text="It is 19", log_probs=scored)

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        generation = self.generate(request)
        yield Chunk("It is ", log_probs=generation.log_probs[:2])
        yield Chunk("19", generation, generation.log_probs[2:])


def test_tokens_of_a_stop_string_and_of_the_end_have_no_log_probabilities_in_chats():
    pipeline = make_pipeline(StoppedAnswer(ToyEncoder()), cache=DictCache())
    for fields in ({"cache": False}, {}, {}, {"stream": True}, {"stream": True, "cache": False}):
        text = client_for(pipeline).post(URL, json=chat(documents=[BRIDGE], logprobs=True, **fields)).text
        parts = events(text)[:-1] if "stream" in fields else [json.loads(text)]
        scored = [part["choices"][0]["logprobs"] for part in parts]
        assert [one["token"] for some in scored if some for one in some["content"]] == ["It ", "is ", "1911"]
    body = {"model": "fake", "prompt": "ab", "logprobs": 0}
    (choice,) = client_for(pipeline).post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["It ", "is ", "1911", "!", "</s>"], "OpenAI's completions have them"


def test_answers_with_and_without_log_probabilities_are_cached_apart():
    pipeline = make_pipeline(cache=DictCache())
    assert ask(pipeline, documents=[BRIDGE])["choices"][0]["logprobs"] is None
    scored = ask(pipeline, documents=[BRIDGE], logprobs=True)
    assert scored["cached"] is False
    assert scored["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert ask(pipeline, documents=[BRIDGE], logprobs=False)["cached"] is True


@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}, {"top_logprobs": 2}]
)
def test_alternatives_are_0_to_20_and_need_logprobs(fields: dict[str, Any]):
    status, error = refused(**fields)
    assert (status, error["param"]) == (400, "top_logprobs")
