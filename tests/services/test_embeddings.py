"""Embeddings in OpenAI's format, with the real client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import client_for, make_pipeline, serving

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    pipeline = make_pipeline(embeddings=LetterEmbeddings())
    with (
        serving(pipeline, max_documents=3) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_texts_have_their_vectors_in_both_encodings(client: openai.OpenAI):
    expected = LetterEmbeddings().embed_query("a cab")
    by_default = client.embeddings.create(model="minilm", input=["zz", "a cab"])  # the client asks for base64
    assert [one.index for one in by_default.data] == [0, 1]
    assert by_default.data[1].embedding == expected
    assert by_default.data[0].embedding[-1] == 2
    plain = client.embeddings.create(model="default", input="a cab", encoding_format="float", dimensions=26)
    assert plain.data[0].embedding == expected
    assert plain.model == "minilm"
    assert plain.usage.total_tokens == plain.usage.prompt_tokens == len("a cab"), "a token for each character"


def test_errors_have_openais_types(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="'minilm'") as unknown:
        client.embeddings.create(model="text-embedding-9", input="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="have 26") as short:
        client.embeddings.create(model="minilm", input="a", dimensions=5)
    assert short.value.param == "dimensions"


@pytest.mark.parametrize(
    ("given", "status", "part"),
    [
        ([], 422, "input"),
        ("", 400, "empty text"),
        (["a", " "], 400, "empty text"),
        ([1, 2], 422, "input"),
    ],
)
def test_bad_input_is_told(given: Any, status: int, part: str):
    pipeline = make_pipeline(embeddings=LetterEmbeddings())
    client = client_for(pipeline, max_documents=3)
    response = client.post(PATH, json={"input": given})
    assert response.status_code == status, response.text
    assert part in response.json()["error"]["message"]


def test_a_pipeline_without_an_embedding_model_says_so():
    client = client_for()
    response = client.post(PATH, json={"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported")
