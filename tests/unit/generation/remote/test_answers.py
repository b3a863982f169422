"""Answers of servers that say the same in other words than OpenAI's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any

import pytest

from rag_posfix.contracts.request import Generation
from rag_posfix.errors import ConfigError, NoAnswerError, OverloadedError, UpstreamError
from rag_posfix.generation.remote.connection import ServerLimits
from rag_posfix.generation.remote.generator import RemoteGenerator, open_remote
from tests.support.upstream import Reply, error, event, piece, upstream, whole
from tests.unit.generation.remote.requests import request_of


@contextmanager
def asking(*replies: Reply, **limits: Any) -> Iterator[RemoteGenerator]:
    with upstream(*replies) as server:
        generator = open_remote(server.model, limits=ServerLimits(**{"retries": 0, **limits}))
        try:
            yield generator
        finally:
            generator.close()


def answers(content: Any, finish: Any = "stop", *parts: dict[str, Any]) -> Iterator[Generation]:
    """Return a whole answer, and the end of a stream of ``parts``, or of the content in one."""
    deltas = parts or (piece(content),)
    stream = Reply(*map(event, deltas), event(piece(finish=finish)), event(b"[DONE]"))
    with asking(whole(content, finish), stream) as generator:
        yield generator.generate(request_of(generator))
        yield list(generator.stream(request_of(generator)))[-1].generation


class TestHowAnAnswerEnded:
    @pytest.mark.parametrize(
        "reason",
        [
            "model_length",
            "MAX_TOKENS",
            "model_context_window_exceeded",
            "token_limit",
            "max_new_tokens",
            "FINISH_REASON_MAX_TOKENS",
            {"type": "length", "length": 20},
        ],
    )
    def test_a_length_in_other_words_is_a_length(self, reason: str):
        for generation in answers("In ", reason):
            assert (generation.text, generation.finish_reason, generation.is_known_end) == ("In ", "length", True)

    @pytest.mark.parametrize(
        "reason", ["eos", "STOP", "end_turn", "COMPLETE", "stop_str", "null", "FINISH_REASON_STOP"]
    )
    def test_an_end_in_other_words_is_a_stop(self, reason: str):
        for generation in answers("In 1901.", reason):
            assert (generation.finish_reason, generation.is_known_end) == ("stop", True)

    @pytest.mark.parametrize(
        ("reason", "said"),
        [
            ("network_error", "gave up"),
            ("insufficient_system_resource", "gave up"),
            ("repetition_truncation", "gave up"),
            ("USER_CANCEL", "gave up"),
            ("abort", "gave up"),
            ("error", "gave up"),
            ("malformed_model_output", "gave up"),
            ("not_finished", "gave up"),
            ("sensitive", "withheld the answer"),
            ("IMAGE_SAFETY", "withheld the answer"),
            ("SAFETY", "withheld the answer"),
            ("content_filter", "withheld the answer"),
        ],
    )
    def test_half_an_answer_is_an_error(self, reason: str, said: str):
        with asking(whole("In ", reason), Reply(event(piece("In ")), event(piece(finish=reason)))) as generator:
            with pytest.raises(UpstreamError, match=rf"{said}.*{reason}"):
                generator.generate(request_of(generator))
            with pytest.raises(UpstreamError, match=rf"{said}.*{reason}"):
                list(generator.stream(request_of(generator)))

    def test_an_unknown_reason_is_a_warning(self, caplog: pytest.LogCaptureFixture):
        with caplog.at_level(logging.WARNING):
            for generation in answers("In 1901.", "ran_out_of_ink"):
                assert (generation.text, generation.finish_reason, generation.is_known_end) == (
                    "In 1901.",
                    "stop",
                    False,
                )
        assert caplog.text.count("'ran_out_of_ink', which is not known") == 2

    def test_done_ends_a_stream_and_a_whole_answer_is_complete_without_a_reason(self):
        for generation in answers("In 1901.", None):
            assert (generation.text, generation.finish_reason) == ("In 1901.", "stop")

    def test_a_reason_of_null_in_words_ends_no_stream(self):
        parts = event(piece("In ", "null")), event(piece("1901.", "null"))
        with asking(Reply(*parts)) as generator, pytest.raises(UpstreamError, match="in the middle"):
            list(generator.stream(request_of(generator)))


class TestContent:
    @pytest.mark.parametrize(
        "content",
        [
            ["In ", "1901."],
            [{"text": "In 1901."}],
            {"type": "text", "text": "In 1901."},
            [{"type": "text", "text": {"value": "In 1901.", "annotations": []}}],
            [
                {"type": "text", "text": "In "},
                {"type": "reference", "reference_ids": [1]},
                {"type": "text", "text": "1901."},
            ],
        ],
    )
    def test_texts_of_parts_of_other_forms_are_read(self, content: Any):
        for generation in answers(content):
            assert generation.text == "In 1901."

    def test_the_texts_of_parts_are_joined_and_thoughts_withheld(self):
        thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
        parts = [thought, {"type": "text", "text": "In "}, {"type": "text", "text": "1901."}]
        for generation in answers(parts, "stop", piece([thought]), piece(parts[1:2]), piece("1901.")):
            assert generation.text == "In 1901."

    def test_thoughts_alone_are_no_answer(self):
        thought = [{"type": "thinking", "thinking": "Hm."}]
        stream = Reply(event(piece(thought)), event(piece(finish="stop")))
        with asking(whole(thought), stream) as generator:
            for ask in (generator.generate, lambda request: list(generator.stream(request))):
                with pytest.raises(NoAnswerError, match="without any content"):
                    ask(request_of(generator))

    def test_an_emoji_in_two_halves_is_one_character(self):
        halves = Reply(
            event(piece("In ")),
            event(b'{"choices": [{"delta": {"content": "\\ud83d"}, "finish_reason": null}]}'),
            event(b'{"choices": [{"delta": {"content": "\\ude00 1901."}, "finish_reason": "stop"}]}'),
        )
        with asking(halves) as generator:
            chunks = list(generator.stream(request_of(generator)))
        assert [chunk.text for chunk in chunks] == ["In ", "\U0001f600 1901.", ""]
        assert chunks[-1].generation is not None
        assert chunks[-1].generation.text == "In \U0001f600 1901."

    def test_half_an_emoji_at_the_end_is_left_out(self):
        half = event(b'{"choices": [{"delta": {"content": "\\ud83d"}, "finish_reason": "length"}]}')
        with asking(Reply(event(piece("In ")), half)) as generator:
            assert list(generator.stream(request_of(generator)))[-1].generation.text == "In "


class TestStreams:
    @staticmethod
    def read(*parts: bytes, content_type: str = "text/event-stream") -> str:
        with asking(Reply(*parts, content_type=content_type)) as generator:
            chunks = list(generator.stream(request_of(generator)))
        assert chunks[-1].generation is not None
        assert "".join(chunk.text for chunk in chunks) == chunks[-1].generation.text
        return chunks[-1].generation.text

    @pytest.mark.parametrize(
        "kind", ["text/plain; charset=utf-8", "Text/Event-Stream", "application/octet-stream", ""]
    )
    def test_a_stream_may_have_any_type(self, kind: str):
        parts = [event(piece("In 1901.")), event(piece(finish="stop")), event(b"[DONE]")]
        assert self.read(*parts, content_type=kind) == "In 1901."

    def test_a_page_is_no_stream(self):
        with pytest.raises(UpstreamError, match="its answer is a page, of type text/html"):
            self.read(b"<html>Sign in</html>", content_type="text/html; charset=utf-8")

    @pytest.mark.parametrize("end", [b"data: [DONE]\n", b"data: [DONE] \n\n", b"data:[DONE]\n\n", b""])
    def test_events_of_one_line_each_are_read(self, end: bytes):
        parts = [event(piece(text))[:-1] for text in ("In ", "1901.")] + [event(piece(finish="stop"))[:-1]]
        assert self.read(*parts, end) == "In 1901."

    def test_a_server_that_does_not_stream_is_read(self):
        assert self.read(*whole("In 1901.", None).body, content_type="application/json") == "In 1901."

    def test_a_message_in_place_of_a_delta_is_read_and_is_not_repeated(self):
        message = {"choices": [{"message": {"role": "assistant", "content": "In 1901."}, "finish_reason": "stop"}]}
        assert self.read(event(message), event(b"[DONE]")) == "In 1901."
        assert self.read(event(piece("In ")), event(piece("1901.")), event(message)) == "In 1901."

    @pytest.mark.parametrize("sign", [{"type": "ping"}, {}, {"status": "processing"}])
    def test_a_sign_of_life_ends_nothing(self, sign: dict[str, str]):
        parts = [event(piece("In ")), b"event: ping\n" + event(sign), event(piece("1901.", "stop"))]
        assert self.read(*parts) == "In 1901."

    @pytest.mark.parametrize(
        "failed",
        [
            {"message": "CUDA out of memory", "code": 500},
            {"object": "error", "message": "CUDA out of memory"},
            {"choices": [], "error": None, "detail": "CUDA out of memory"},
            {"choices": [{"index": 0, "delta": {}, "error": {"code": 502, "message": "CUDA out of memory"}}]},
        ],
    )
    def test_an_error_of_another_form_is_no_end_of_an_answer(self, failed: dict[str, Any]):
        with pytest.raises(UpstreamError, match="failed while it generated the answer: CUDA out of memory"):
            self.read(event(piece("In ")), event(failed), event(b"[DONE]"))

    def test_a_stream_without_choices_is_named(self):
        with pytest.raises(UpstreamError, match="a stream without choices; is it an OpenAI-compatible server"):
            self.read(event({"model": "m", "response": "In 1901.", "done": True}))


class TestPauses:
    @pytest.mark.parametrize("headers", [{"retry-after-ms": "60000"}, {"retry-after-ms": "60000", "retry-after": "1"}])
    def test_milliseconds_are_read_first(self, headers: dict[str, str]):
        reply = error(429, "slow down", **headers)
        with asking(reply, retries=1) as generator, pytest.raises(OverloadedError) as failed:
            generator.generate(request_of(generator))
        assert failed.value.retry_seconds == 60.0

    def test_a_date_is_a_pause(self):
        """Some seconds beyond any date that the other side of a slow test could see as past."""
        reply = error(429, "slow down", **{"retry-after": formatdate(4_000_000_000, usegmt=True)})
        with asking(reply, retries=1) as generator, pytest.raises(OverloadedError) as failed:
            generator.generate(request_of(generator))
        assert failed.value.retry_seconds is not None
        assert failed.value.retry_seconds > 1_000_000

    @pytest.mark.parametrize("said", [formatdate(0, usegmt=True), "soon"])
    def test_a_date_that_is_over_and_what_is_no_pause_are_none(self, said: str):
        replies = error(429, "slow down", **{"retry-after": said}), whole("In 1901.")
        with asking(*replies, retries=1) as generator:
            assert generator.generate(request_of(generator)).text == "In 1901."


class TestProxies:
    @pytest.fixture(autouse=True)
    def _no_exceptions(self, monkeypatch: pytest.MonkeyPatch):
        for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)

    @pytest.mark.parametrize("proxy", ["socks://bob:secret@127.0.0.1:7890", "ftp://bob:secret@127.0.0.1:7890"])
    def test_a_proxy_of_an_unknown_kind_is_named_without_its_password(self, monkeypatch, proxy: str):
        monkeypatch.setenv("ALL_PROXY", proxy)
        with pytest.raises(ConfigError, match=r"ALL_PROXY=.*127.0.0.1:7890.*NO_PROXY") as refused:
            open_remote("openai:m@http://model.example/v1")
        assert "secret" not in str(refused.value)

    def test_a_dead_proxy_is_named(self, monkeypatch):
        monkeypatch.setenv("HTTP_PROXY", "http://bob:secret@127.0.0.1:1")
        generator = open_remote("openai:m@http://model.example/v1", limits=ServerLimits(retries=0))
        with pytest.raises(UpstreamError, match=r"through the proxies .*HTTP_PROXY=http://127.0.0.1:1") as failed:
            generator.generate(request_of(generator))
        generator.close()
        assert "secret" not in str(failed.value)
