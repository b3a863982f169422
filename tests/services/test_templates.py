"""Prompt templates that a request brings, where the operator allows them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.serving import CHAT_BODIES, HARBOUR, FakeGenerator, ListRetriever, client_for, make_pipeline
from tests.support.toy_encoder import ToyEncoder

FIELDS = {"instruction": "Read.", "question_prefix": "Q: "}


class PromptKeeper(FakeGenerator):
    """Keeps the text of the last prompt."""

    prompt = ""

    def stream(self, request: Any) -> Any:
        self.prompt = self.encoder.decode(request.layout.token_ids)
        return super().stream(request)


@pytest.fixture
def generator() -> PromptKeeper:
    return PromptKeeper(ToyEncoder(), 8192)


def client(generator: PromptKeeper, allowed: str) -> Any:
    return client_for(make_pipeline(generator, retriever=ListRetriever(HARBOUR)), request_templates=allowed)


@pytest.mark.parametrize("path", CHAT_BODIES)
@pytest.mark.slow
def test_a_template_is_chosen_in_every_dialect(generator: PromptKeeper, path: str):
    service = client(generator, "any")
    for template, opening in (("full-de", "Beantworte die Frage nur"), (FIELDS, "Read.\n\n")):
        assert service.post(path, json={**CHAT_BODIES[path], "posfix": {"template": template}}).status_code == 200
        assert generator.prompt.startswith(f"<|im_start|>user\n{opening}")


@pytest.mark.parametrize(
    ("allowed", "template", "message"),
    [
        ("none", "full", "takes no template of this kind"),
        ("shipped", FIELDS, "takes no template of this kind"),
        ("shipped", "/etc/passwd.toml", "unknown template '/etc/passwd.toml'; use one of short, full"),
        ("any", {"heading": "x"}, "must contain '{title}'"),
    ],
)
def test_a_template_that_is_not_allowed_is_an_error_that_says_why(
    generator: PromptKeeper, allowed: str, template: Any, message: str
):
    response = client(generator, allowed).post(
        "/v1/chat/completions", json={**CHAT_BODIES["/v1/chat/completions"], "posfix": {"template": template}}
    )
    assert response.status_code == 400
    assert message.lower() in response.json()["error"]["message"].lower()


def test_a_shipped_template_is_allowed_by_its_name_alone(generator: PromptKeeper):
    body = {**CHAT_BODIES["/v1/chat/completions"], "posfix": {"template": "citations"}}
    assert client(generator, "shipped").post("/v1/chat/completions", json=body).status_code == 200
    assert "in square brackets" in generator.prompt
