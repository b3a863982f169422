"""Judgements of passages by a server: forms of requests, spellings, order, permits, cache, likelihoods."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import closing
from typing import Any

import anyio
import pytest

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import tokenize_passage, tokenize_prompt
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.generator import collected_usage, sum_usage
from rag_posfix.errors import UnsupportedModelError, UpstreamError
from rag_posfix.generation.remote.generator import PieceEncoder
from rag_posfix.plan.layout import Layout
from tests.support.serving import DictCache
from tests.support.upstream import Answering, Reply, as_json, error, judging, whole
from tests.unit.generation.remote.requests import asking

YES, NO = ("Yes", " yes"), ("No",)
ODDS = {"passage 1": {"Yes": math.log(0.5), " yes": math.log(0.1), "No": math.log(0.2), "x": -9.0}}
NEUTRAL = {"Yes": math.log(0.3), "No": math.log(0.3), "x": -9.0}


def layout_of(*texts: str, question: str = "why?") -> Layout:
    encoder, template = PieceEncoder(), PromptTemplate()
    passages = [tokenize_passage(encoder, template, text) for text in texts]
    return tokenize_prompt(encoder, template, question).with_passages(passages)


def content_of(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def judge(body: dict[str, Any]) -> Reply:
    odds = next((values for text, values in ODDS.items() if text in content_of(body)), NEUTRAL)
    return as_json(judging("Yes", odds))


def test_the_odds_sum_the_spellings_of_the_first_token():
    with asking(judge) as (generator, server):
        first, second, bare = generator.log_odds(layout_of("passage 1", "passage 2"), YES, NO)
    assert first == pytest.approx(math.log(0.6 / 0.2))
    assert second == bare == 0.0
    body = server.bodies[-1]
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"], body["temperature"]) == (1, True, 20, 0.0)


def test_each_request_is_prefix_passage_question():
    with asking(judge) as (generator, server):
        generator.log_odds(layout_of("passage 1", "passage 2"), YES, NO)
    prefix = PromptTemplate().opening
    contents = {content_of(body) for body in server.bodies}
    assert all(content.startswith(prefix) and content.rstrip().endswith("Answer:") for content in contents)
    assert len(contents) == 3


@pytest.mark.parametrize(
    ("alternatives", "expected"),
    [
        ({"Yes": -0.1, "x": -4.0}, 3.9),  # no is at most as likely as the last of those listed
        ({"x": -0.1, "y": -4.0}, 0.0),
        ({"ĠYes": -0.1, "▁No": -1.1}, 0.0),  # " Yes" and " No" are other spellings
        ({"Ġyes": -0.1, "No": -1.1}, 1.0),
        ({"x": 0.0, "y": -math.inf}, 0.0),
        ({"Yes": 0.0, "No": -math.inf}, 9999.0),
    ],
)
def test_spellings_that_are_not_listed(alternatives: dict[str, float], expected: float):
    with asking(as_json(judging("Yes", alternatives))) as (generator, _):
        assert generator.log_odds(layout_of("p"), YES, NO)[0] == pytest.approx(expected)


def test_a_server_with_fewer_alternatives_is_asked_for_those():
    def picky(body: dict[str, Any]) -> Reply:
        return error(400, "top_logprobs must be at most 5") if body["top_logprobs"] > 5 else judge(body)

    with asking(picky) as (generator, server):
        assert generator.log_odds(layout_of("passage 1"), YES, NO)[0] > 1
        generator.log_odds(layout_of("passage 2"), YES, NO)
    assert [body["top_logprobs"] for body in server.bodies] == [20, 5, 5, 5, 5, 5]


def test_completions_serve_where_chat_gives_no_log_probabilities():
    def completing(body: dict[str, Any]) -> Reply:
        if "messages" in body:
            return whole("Yes")
        top = {"Yes": -0.5, "No": -1.5}
        return as_json({"choices": [{"index": 0, "text": "Yes", "logprobs": {"top_logprobs": [top]}}]})

    with asking(completing) as (generator, server):
        assert generator.log_odds(layout_of("passage 1"), YES, NO) == (1.0, 1.0)
    assert server.paths == ["/v1/chat/completions", *["/v1/completions"] * 3]
    assert any("passage 1\n\nQuestion: why?" in body.get("prompt", "") for body in server.bodies)


@pytest.mark.parametrize("in_parts", [False, True])
def test_samples_vote_where_a_server_gives_no_log_probabilities(in_parts: bool, caplog):
    def sampling(body: dict[str, Any]) -> Reply:
        if "messages" not in body:
            return error(404, "no such route")
        said_yes = "passage 1" in content_of(body) and body.get("seed", 0) < 4
        said = "Yes, it does." if said_yes else "no."
        return whole([{"type": "text", "text": said}] if in_parts else said)

    with asking(sampling) as (generator, server):
        found = generator.log_odds(layout_of("passage 1"), YES, NO)
    assert found == pytest.approx((math.log(4.5 / 1.5), math.log(0.5 / 5.5)))
    sampled = [body for body in server.bodies if body.get("seed") is not None]
    assert sorted(body["seed"] for body in sampled) == sorted([*range(5)] * 2)
    assert "judged by sampled answers" in caplog.text


@pytest.mark.parametrize("said", ["", "<think>\nOkay"])
def test_a_model_that_thinks_first_cannot_judge_by_samples(said: str):
    def thinking(body: dict[str, Any]) -> Reply:
        return error(403, "no logprobs for this model") if "logprobs" in body else whole(said, "length")

    with (
        asking(thinking) as (generator, _),
        pytest.raises(UnsupportedModelError, match=r"its 10 answers are empty or thoughts.* turn its thinking off"),
    ):
        generator.log_odds(layout_of("passage 1"), YES, NO)


def test_a_model_that_thinks_first_cannot_judge_by_log_probabilities():
    thinking = as_json(judging("<think>", {"<think>": -0.1, "Okay": -9.0}))
    with asking(thinking) as (generator, _), pytest.raises(UnsupportedModelError, match="its 2 answers are empty or"):
        generator.log_odds(layout_of("passage 1"), YES, NO)
    unlikely = as_json(judging("<think>", {"<think>": -0.1, "Yes": -8.0, "No": -9.0}))
    with asking(unlikely) as (generator, _):
        assert generator.log_odds(layout_of("passage 1"), YES, NO) == (1.0, 1.0)


def test_some_empty_samples_count_for_neither():
    def halting(body: dict[str, Any]) -> Reply:
        said = "yes" if body.get("seed") == 0 and "passage 1" in content_of(body) else ""
        return error(403, "no logprobs for this model") if "logprobs" in body else whole(said)

    with asking(halting) as (generator, _):
        found = generator.log_odds(layout_of("passage 1"), YES, NO)
    assert found == pytest.approx((math.log(1.5 / 0.5), 0.0))


@pytest.mark.parametrize(("status", "told"), [(500, "broken"), (403, "no access")])
def test_what_fails_otherwise_is_an_error(status: int, told: str):
    with asking(error(status, told)) as (generator, _), pytest.raises(UpstreamError, match=f"status {status}: {told}"):
        generator.log_odds(layout_of("p"), YES, NO)


def test_judgements_are_kept_by_model_passage_question_and_tenant():
    cache = DictCache()
    with asking(judge, judgements=cache) as (generator, server):
        first = generator.log_odds(layout_of("passage 1", "passage 2"), YES, NO)
        sent = len(server.bodies)
        assert generator.log_odds(layout_of("passage 2", "passage 1"), YES, NO) == (first[1], first[0], first[2])
        assert len(server.bodies) == sent
        generator.log_odds(layout_of("passage 1"), YES, NO, "tenant")
        generator.log_odds(layout_of("passage 1", question="where?"), YES, NO)
        assert len(server.bodies) == sent + 4


def test_a_judgement_of_a_passage_that_was_removed_meanwhile_is_not_kept():
    layout = layout_of("passage 1")

    def removing(body: dict[str, Any]) -> Reply:
        if "passage 1" in content_of(body):
            cache.drop_documents([layout.keys[0]])
        return judge(body)

    with (
        closing(TieredAnswerCache([MemoryTier()])) as cache,
        asking(removing, judgements=cache) as (generator, server),
    ):
        for sent in (3, 4, 5):  # at first the form of requests is asked for, and the prompt without a passage
            generator.log_odds(layout, YES, NO)
            assert len(server.bodies) == sent


def test_passages_seen_before_are_sent_first_in_the_order_they_were_seen():
    with asking(judge, limits={"concurrency": 1}) as (generator, server):
        for texts in (["p 5"], ["p 1", "p 2", "p 3"], ["p 4", "p 3", "p 2", "p 1", "p 5"]):
            server.bodies.clear()
            generator.log_odds(layout_of(*texts), YES, NO)
            sent = [content_of(body) for body in server.bodies]
    places = {text: next(i for i, content in enumerate(sent) if text in content) for text in texts}
    assert places["p 5"] < min(places[text] for text in ("p 1", "p 2", "p 3"))
    assert places["p 4"] == max(places.values()) == len(sent) - 1


def test_no_more_requests_run_at_a_time_than_allowed():
    running, most = 0, 0
    lock, full = threading.Lock(), threading.Event()

    def counting(body: dict[str, Any]) -> Reply:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()
        if len(server.bodies) > 2:  # the first two find out what the server can do, one after another
            full.wait(60)
        with lock:
            running -= 1
        return judge(body)

    with asking(counting, limits={"concurrency": 3}) as (generator, server):
        generator.log_odds(layout_of(*(f"passage {i}" for i in range(12))), YES, NO)
        assert len(server.bodies) == 14
    assert most == 3


def test_a_busy_server_holds_no_permit_and_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    refused: set[str] = set()
    sleep = anyio.sleep

    async def until_the_others_were_sent(_: float) -> None:
        async with asyncio.timeout(60):
            while len(server.bodies) < 3:
                await sleep(0.005)

    monkeypatch.setattr("anyio.sleep", until_the_others_were_sent)

    def busy_once(body: dict[str, Any]) -> Reply:
        content = content_of(body)
        if "passage 1" in content and content not in refused:
            refused.add(content)
            return error(429, "busy", retry_after="1")
        return judge(body)

    with asking(busy_once, limits={"concurrency": 1, "retries": 2}) as (generator, server):
        generator.log_odds(layout_of("warm up"), YES, NO)
        server.bodies.clear()
        odds = generator.log_odds(layout_of("passage 1", "passage 2", "passage 3"), YES, NO)
    assert odds[0] == pytest.approx(math.log(3))
    again = [index for index, body in enumerate(server.bodies) if "passage 1" in content_of(body)]
    assert len(again) == 2
    assert again[1] == len(server.bodies) - 1, "the others were sent while it waited"


def test_a_check_that_raises_ends_all_requests():
    class Late(Exception):
        pass

    def late() -> None:
        if server.bodies:
            raise Late

    with asking(Reply(pause_before=-1)) as (generator, server):
        with pytest.raises(Late):
            generator.log_odds(layout_of("passage 1"), YES, NO, check=late)
        assert server.gone.wait(60)


def test_tokens_of_judgements_are_counted():
    with asking(judge) as (generator, _), collected_usage() as spent:
        generator.log_odds(layout_of("passage 1"), YES, NO)
        assert sum_usage(spent).prompt_tokens == 30  # one request finds the form


def echoed(beyond: int = -10_000) -> Answering:
    """A server whose tokens are characters; each has the log-probability -1, with passage 1 -0.5.

    Of the prompt, the tokens before the question and ``beyond`` more come from its prefix cache.
    """

    def reply(body: dict[str, Any]) -> Reply:
        prompt = body["prompt"]
        values = [None, *(-0.5 if "passage 1" in prompt else -1.0 for _ in prompt[1:]), -3.0]
        scored = {"token_logprobs": values, "text_offset": list(range(len(prompt) + 1))}
        cached = max(0, len(prompt) - len("why?") + beyond)
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        return as_json({"choices": [{"index": 0, "text": prompt, "logprobs": scored}], "usage": usage})

    return reply


def test_the_likelihood_is_the_mean_over_the_tokens_of_the_question():
    with asking(echoed()) as (generator, server):
        layout = layout_of("passage 1", "passage 2")
        assert generator.question_likelihood(layout, bare=True) == pytest.approx((-0.5, -1.0, -1.0))
    assert server.bodies[0]["echo"] is True


def test_tokens_that_end_where_the_question_begins_or_begin_where_it_ends_are_not_its_own():
    def split(body: dict[str, Any]) -> Reply:
        start = len(body["prompt"]) - len("why?")
        offsets = [0, start, start + 1, len(body["prompt"])]  # "...Question: ", "w", "hy?", and the token generated
        scored = {"token_logprobs": [-9.0, -1.0, -2.0, -9.0], "text_offset": offsets}
        return as_json({"choices": [{"index": 0, "text": body["prompt"], "logprobs": scored}]})

    with asking(split) as (generator, _):
        assert generator.question_likelihood(layout_of("p")) == (-1.5,)  # (-1 - 2) / 2


def test_tokens_from_a_prefix_cache_are_not_believed():
    layout = layout_of("passage 1")
    with asking(echoed(-1)) as (generator, _):  # the token before the question was read: it gives the first number
        assert generator.question_likelihood(layout) == (-0.5,)
    with asking(echoed(0)) as (generator, _), pytest.raises(UpstreamError, match="prefix cache"):
        generator.question_likelihood(layout)


@pytest.mark.parametrize("reply", [error(400, "echo is not supported"), whole("x")])
def test_a_server_without_scored_prompts_is_named(reply: Reply):
    with asking(reply) as (generator, _), pytest.raises(UnsupportedModelError, match="use the reranker yes_no"):
        generator.question_likelihood(layout_of("passage 1"))


def test_a_probe_bounds_its_answers_by_the_field_that_the_server_knows():
    def chatting(body: dict[str, Any]) -> Reply:
        return judge(body) if "messages" in body else error(404, "no such route")

    with asking(chatting, token_limit_field="max_completion_tokens") as (generator, server):
        generator.probe()
    chats = [body for body in server.bodies if "messages" in body]
    assert {(body.get("max_completion_tokens"), body.get("max_tokens")) for body in chats} == {(1, None)}


def caching_in_blocks(block: int) -> Answering:
    """A server with a prefix cache of whole blocks; five characters of a prompt are a token."""
    seen: list[str] = []

    def shared(prompt: str, other: str) -> int:
        return next((i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), len(prompt)) // 5

    def reply(body: dict[str, Any]) -> Reply:
        if "messages" not in body:
            return error(404, "no completions")
        prompt = content_of(body)
        cached = max((shared(prompt, other) for other in seen), default=0) // block * block
        seen.append(prompt)
        usage = {"prompt_tokens": len(prompt) // 5, "prompt_tokens_details": {"cached_tokens": cached}}
        return as_json({**judging("Yes", NEUTRAL), "usage": usage})

    return reply


@pytest.mark.parametrize(
    ("block", "of_passage", "of_long"),
    [
        # A sentence has 75 characters with its space, 15 tokens. Ten have 150, and nine blocks of 16 hold 144 of them.
        # 110 have 1,650, of which 103 blocks of 16 hold 1,648 and three of 528 hold 1,584.
        (16, 144, 1648),
        (528, 0, 1584),
    ],
)
def test_the_probe_finds_the_blocks_of_the_prefix_cache(block: int, of_passage: int, of_long: int):
    with asking(caching_in_blocks(block)) as (generator, _):
        facts = generator.probe()
    assert facts.block_tokens == block
    assert (facts.cached_passage_tokens, facts.cached_tokens) == (of_passage, of_long)
    assert facts.shares_passages is (of_passage > 0)


def test_a_server_that_does_not_say_what_it_cached_has_no_blocks():
    with asking(lambda body: judge(body) if "messages" in body else error(404, "chat alone")) as (generator, _):
        facts = generator.probe()
    assert (facts.block_tokens, facts.cached_passage_tokens, facts.shares_passages) == (None, None, None)
