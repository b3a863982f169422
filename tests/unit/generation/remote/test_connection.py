"""Several servers of one remote model: who gets which passage, and what happens when one of them fails."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import GenerationRequest, Sampling
from rag_posfix.errors import ConfigError, OverloadedError, UpstreamError
from rag_posfix.generation.remote import connection
from rag_posfix.generation.remote import connection as address
from rag_posfix.generation.remote.connection import RemoteModel, ServerLimits, Servers, is_remote, parse_remote
from rag_posfix.generation.remote.generator import RemoteGenerator, open_remote
from rag_posfix.plan.layout import Layout
from rag_posfix.text import hide_passwords
from tests.support.engine_process import EngineProcess
from tests.support.upstream import (
    Answering,
    Reply,
    Upstream,
    as_json,
    error,
    event,
    judging,
    piece,
    streamed,
    upstream,
    whole,
)
from tests.support.waiting import wait_until

URLS = [f"http://10.0.0.{number}:8000/v1" for number in range(1, 5)]
KEYS = [f"passage {number}" for number in range(4000)]
YES, NO = ("Yes",), ("No",)


def opened(urls: list[str], retries: int = 0) -> RemoteGenerator:
    return open_remote(
        f"openai:m@{','.join(urls)}", api_key="secret", limits=ServerLimits(connect_seconds=60, retries=retries)
    )


@pytest.fixture
def serve():
    """Starts a server with each reply, and returns them with a generator of all."""
    with ExitStack() as stack:

        def start(*replies: Reply | Answering, retries: int = 0) -> tuple[RemoteGenerator, *tuple[Upstream, ...]]:
            servers = [stack.enter_context(upstream(reply)) for reply in replies]
            return stack.enter_context(closing(opened([server.url for server in servers], retries))), *servers

        yield start


def layout_of(generator: RemoteGenerator, question: str, *texts: str) -> Layout:
    documents = [Document(page_content=text) for text in texts]
    return Assembler(generator.encoder, 8192).assemble(question, documents, order="original").layout


def request_of(generator: RemoteGenerator, question: str, *texts: str) -> GenerationRequest:
    return GenerationRequest(layout_of(generator, question, *texts), sampling=Sampling(max_tokens=32))


def question_of(station: int) -> str:
    return f"When did station {station} begin?"


def station(number: int) -> str:
    return f"Station {number} began in {1000 + number} beside the river"


def test_several_urls_are_read_in_order():
    model = parse_remote("openai:a@b@http://one:1/v1/,https://two")
    assert model == RemoteModel("a@b", "http://one:1/v1,https://two/v1")
    assert model.urls == ("http://one:1/v1", "https://two/v1")


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("http://one,http://one/v1", "given once"),
        ("http://one,two", "a URL is http"),
        ("http://one,", "a URL is http"),
        ("http://one,ftp://two", "a URL is http"),
        ("http://one,http://user:hidden@two", "API_KEY"),
    ],
)
def test_a_wrong_further_url_is_refused(urls: str, message: str):
    with pytest.raises(ConfigError, match=message) as refused:
        parse_remote(f"openai:m@{urls}")
    assert "hidden" not in str(refused.value)


def test_a_further_server_keeps_the_identity_of_the_model():
    with closing(opened(URLS[:1])) as one, closing(opened(URLS[:2])) as two, closing(opened(URLS[1:2])) as other:
        assert one.fingerprint == two.fingerprint != other.fingerprint


def test_a_further_server_takes_its_share_and_moves_no_other_passage():
    three, four = Servers(URLS[:3]), Servers(URLS)
    before, after = ([servers.choose(key) for key in KEYS] for servers in (three, four))
    assert all(abs(count / len(KEYS) - 1 / 3) < 0.03 for count in Counter(before).values())
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {URLS[3]}
    assert abs(len(moved) / len(KEYS) - 1 / 4) < 0.03  # 1 of 4 servers is new


def test_the_order_of_the_servers_in_the_setting_does_not_matter():
    assert [Servers(URLS).choose(key) for key in KEYS] == [Servers(URLS[::-1]).choose(key) for key in KEYS]


def test_a_server_that_rests_is_chosen_only_if_all_others_were_tried(monkeypatch):
    servers = Servers(URLS[:2])
    first, second = (key_server := servers.choose("p")), next(url for url in URLS[:2] if url != key_server)
    servers.rest(first)
    assert servers.choose("p") == second
    assert servers.choose("p", {second}) == first
    monkeypatch.setattr(address, "REST_SECONDS", -1.0)
    servers.rest(first)  # its rest is over
    assert servers.choose("p") == first


def sent(server: Upstream) -> set[str]:
    """The passages of the judgements that a server was sent."""
    contents = [body["messages"][-1]["content"] for body in server.bodies if body.get("logprobs")]
    return {found[0] for content in contents if (found := re.search(r"passage \d+", content))}


def test_each_passage_is_judged_on_one_server_whatever_its_order_question_and_company(serve):
    chance, passages = random.Random(0), [f"passage {number}" for number in range(30)]
    answer = as_json(judging("Yes", {"Yes": -0.1, "No": -2.0}))
    generator, *servers = serve(answer, answer, answer)
    for number in range(30):
        texts = chance.sample(passages, 5)
        generator.log_odds(layout_of(generator, f"question {number}?", *texts), YES, NO)
    shares = [sent(server) for server in servers]
    assert all(shares)
    assert sum(map(len, shares)) == len(set.union(*shares)) == len(passages)
    contents = [[body["messages"][-1]["content"] for body in server.bodies] for server in servers]
    bare = [sum(not re.search(r"passage \d", text) for text in texts) for texts in contents]
    assert all(bare), "requests without a passage are spread"
    assert {headers["authorization"] for server in servers for headers in server.headers} == {"Bearer secret"}


def test_the_answer_comes_from_the_server_that_judged_its_first_passage(serve):
    def answer(body):
        return as_json(judging("Yes", {"Yes": -0.1, "No": -2.0})) if body.get("logprobs") else whole("yes")

    generator, *servers = serve(answer, answer, answer)
    used = set()
    for number in range(9):
        request = request_of(generator, "why?", f"passage {number}", "passage 100")
        generator.log_odds(request.layout, YES, NO)
        generator.generate(request)
        owner = next(server for server in servers if f"passage {number}" in sent(server))
        assert f"passage {number}\n" in owner.bodies[-1]["messages"][-1]["content"]
        assert "logprobs" not in owner.bodies[-1]
        used.add(owner.url)
    assert len(used) > 1


@pytest.mark.slow
def test_a_killed_server_loses_no_answer_and_takes_its_passages_back(monkeypatch):
    monkeypatch.setattr(address, "REST_SECONDS", 0.5)
    texts: list[str] = []
    killed = threading.Event()
    with ExitStack() as stack:
        engines = [stack.enter_context(EngineProcess()) for _ in range(3)]
        generator = stack.enter_context(closing(opened([engine.url for engine in engines])))

        def ask(number: int) -> str:
            if number == 150:
                engines[1].kill()
                killed.set()
            request = request_of(generator, question_of(number), station(number), station(number + 1000))
            answer = generator.generate(request).text if number % 2 else list(generator.stream(request))[-1]
            return answer if isinstance(answer, str) else answer.generation.text

        with ThreadPoolExecutor(6) as pool:
            texts = list(pool.map(ask, range(450)))
        assert killed.is_set()
        assert texts == [station(number) for number in range(450)]
        seen = [set(engine.seen()) for engine in (engines[0], engines[2])]
        engines[1].start()

        def is_back() -> bool:
            return [ask(number) for number in range(40)] == texts[:40] and bool(engines[1].seen())

        wait_until(is_back)
        own = set(engines[1].seen())
        assert own
        wait_until(lambda: [ask(number) for number in own] == [texts[number] for number in own])
    assert seen[0] & seen[1] == set(), "the passages of the killed server each had one other server"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("openai:m@https://user:pass@host:8/v1", "openai:m@https://...@host:8/v1"),
        ("openai:m@http://a:p@ss@h1,http://b:c@h2/v1", "openai:m@http://...@h1,http://...@h2/v1"),
        ("openai:m@qwen@http://host/v1/a@b", "openai:m@qwen@http://host/v1/a@b"),
        ("redis://:p/a#s?s@h1", "redis://...@h1"),
        ("openai:m@http://a:p/ss@h1,http://h2/v1/a@b", "openai:m@http://...@h1,http://h2/v1/a@b"),
        ("a name @ work.txt", "a name @ work.txt"),
    ],
)
def test_user_and_password_of_each_url_are_hidden_and_nothing_else(text, shown):
    assert hide_passwords(text) == shown


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_another_server_answers_at_once_where_one_is_busy_or_broken(serve, status: int):
    generator, broken, sound = serve(error(status, "no", **{"retry-after": "60"}), whole("fine"))
    requests = [request_of(generator, "why?", f"passage {number}") for number in range(24)]
    assert {generator.generate(request).text for request in requests} == {"fine"}
    asked = len(broken.bodies)
    assert len(sound.bodies) == 24
    if status == 429:  # it is busy, not broken: it keeps its passages
        assert asked > 1
    else:
        assert asked == 1, "a broken one rests"


def test_an_error_of_the_request_is_not_repeated_elsewhere(serve):
    generator, *servers = serve(error(400, "bad"), error(400, "bad"), retries=2)
    with pytest.raises(UpstreamError, match="status 400"):
        generator.generate(request_of(generator, "why?", "passage"))
    assert sum(len(server.bodies) for server in servers) == 1


def test_each_server_is_tried_before_one_is_tried_again(serve):
    generator, *servers = serve(*[error(429, "busy")] * 3, retries=1)
    with pytest.raises(OverloadedError):
        generator.generate(request_of(generator, "why?", "passage"))
    assert sorted(len(server.bodies) for server in servers) == [1, 1, 2]  # 3 servers and 1 retry


def test_a_request_that_is_dropped_late_goes_to_another_server(serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "STALE_SECONDS", 0.0)  # no time is as short
    generator, broken, _ = serve(Reply(status=0), whole("fine"))
    requests = [request_of(generator, "why?", f"passage {number}") for number in range(24)]
    assert {generator.generate(request).text for request in requests} == {"fine"}
    assert len(broken.bodies) == 1, "it rests"


def test_an_answer_that_is_cut_is_repeated_elsewhere_and_a_stream_that_has_begun_is_an_error(serve):
    cut = as_json({"choices": []}, cut=True)
    generator, broken, _ = serve(cut, whole("fine"))
    requests = [request_of(generator, "why?", f"passage {number}") for number in range(24)]
    assert {generator.generate(request).text for request in requests} == {"fine"}
    assert broken.bodies
    begun = streamed("It ", cut=True)
    begun.body = (event(piece("It ")),)
    generator, *_ = serve(begun, begun)
    stream = generator.stream(request_of(generator, "why?", "passage"))
    assert next(stream).text == "It "
    with pytest.raises(UpstreamError, match="in the middle of an answer"):
        list(stream)


# The address of a remote model.


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("openai:qwen@http://127.0.0.1:8080/v1", "qwen", "http://127.0.0.1:8080/v1"),
        ("openai:qwen@http://127.0.0.1:8080/v1/", "qwen", "http://127.0.0.1:8080/v1"),
        ("openai:qwen@http://127.0.0.1:8080", "qwen", "http://127.0.0.1:8080/v1"),
        ("openai:a/b:c@https://host/api/openai/v1", "a/b:c", "https://host/api/openai/v1"),
        ("openai:@cf/meta/llama-3@https://host/v1", "@cf/meta/llama-3", "https://host/v1"),
        ("openai:m@http://[::1]:1/v1", "m", "http://[::1]:1/v1"),
    ],
)
def test_name_and_base_url_are_read(text: str, name: str, url: str):
    assert parse_remote(text) == RemoteModel(name, url)


@pytest.mark.parametrize(
    "text",
    [
        "openai:qwen",
        "openai:qwen@127.0.0.1:8080/v1",
        "openai: @http://host/v1",
        "openai:m@ftp://host/v1",
        "openai:m@http://",
        "openai:m@http://host:port/v1",
        "openai:m@http://host/v1?key=1",
        "openai:m@http://host/v1/chat/completions",
        "openai:m@http://" + "h" * 3000,
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str):
    with pytest.raises(ConfigError, match=r"for example openai:\S+@http"):
        parse_remote(text)


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="RAG_POSFIX_REMOTE_API_KEY") as refused:
        parse_remote("openai:m@https://me:hunter2@host/v1")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "m@http://user:SECRET/SECRET@host/v1",
        "m@http://user:SECRET/x@SECRET@host/v1",
        "m@http://host/v1?api_key=SECRET",
        "m@http://host/v1#SECRET",
        "m@http://[SECRET:x@host/v1",
        "m@http://a/v1,http://a/v1?key=SECRET",
        "m@user:SECRET@host/v1",
        "http://user:SECRET@host/v1",
    ],
)
def test_no_secret_of_a_wrong_address_is_shown(address: str):
    with pytest.raises(ConfigError, match=r"must be openai|the URL|a URL|the base URL") as refused:
        parse_remote(f"openai:{address}")
    assert "SECRET" not in str(refused.value)
    assert refused.value.__cause__ is None, "the text of urllib quotes the URL, and logs show causes"


def test_what_is_wrong_with_an_address_without_secrets_is_shown():
    with pytest.raises(ConfigError, match=r"openai:m@http://host:99999/v1': .* port of 0 to 65535"):
        parse_remote("openai:m@http://host:99999/v1")


def test_only_the_prefix_makes_a_model_remote():
    assert is_remote("openai:m@http://host")
    assert not is_remote("openai/m")
    assert not is_remote("smollm2")
