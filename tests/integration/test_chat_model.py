"""The chat model against langchain's own suites, on the real weights."""

from __future__ import annotations

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from rag_posfix.generation.chat_model import RagPosfixChatModel


class Flags:
    """What a small local text model does not do."""

    @property
    def chat_model_class(self):
        return RagPosfixChatModel

    @property
    def has_tool_calling(self):
        return False

    @property
    def has_structured_output(self):
        return False


class TestChatModelUnit(Flags, ChatModelUnitTests):
    @property
    def chat_model_params(self):
        return {"model": "smollm2"}


@pytest.mark.weights
class TestChatModelOnRealWeights(Flags, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _engine(self, engine):
        self.engine = engine

    @property
    def chat_model_params(self):
        return {"model": "smollm2", "generator": getattr(self, "engine", None), "max_tokens": 24}
