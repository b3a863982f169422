"""``--model openai:NAME@URL`` on the command line: what is wrong is told before anything is loaded or sent."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import command_line
from tests.support.upstream import as_json, error, judging, upstream, whole

MODEL = "openai:m@http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--model", MODEL, "--mitigation", "default"), "set mitigation='none' (--mitigation none,"),
        (("serve", "--model", MODEL, "--mitigation", "parallel_encoding"), "'parallel_encoding' needs the weights"),
        (("serve", "--model", "openai:m@host", "--mitigation", "none"), "must be openai:NAME@URL, for example"),
        (("bench", "--model", MODEL), "is on a server, and this needs the weights in this process"),
        (("verify", "--model", MODEL), "127.0.0.1:1/v1 cannot be reached"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(arguments, message, capsysbinary):
    code, out, err = command_line(capsysbinary)(*arguments)
    assert code == 1
    assert out == ""
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_verify_shows_what_runs_on_a_server(capsysbinary):
    chat = as_json(judging("Yes", {"Yes": -1.0, "No": -2.0}))

    def server(body):
        return chat if "messages" in body else error(404, "no such route")

    with upstream(server) as running:
        code, out, _ = command_line(capsysbinary)("verify", "--model", running.model, "--json")
        assert code == 0
        _, shown, _ = command_line(capsysbinary)("verify", "--model", running.model)
    data = json.loads(out)
    assert data["server"]["judgements"] == "chat completions with log-probabilities"
    assert data["server"]["prompt_log_probs"] is False
    assert {"none", "repeated_passages", "canonical_rotations"} <= set(data["supported"])
    assert "yes_no:top_n=5" in data["refused"]["context_experts"]
    assert {"yes_no", "listwise", "endpoint", "embedding"} <= set(data["rerankers"]["supported"])
    assert {"likelihood", "in_context"} <= set(data["rerankers"]["refused"])
    assert "nearest that runs" in shown
    assert "context_experts" in shown


def test_verify_says_that_a_server_gives_no_log_probabilities(capsysbinary):
    with upstream(whole("Yes")) as running:
        _, out, _ = command_line(capsysbinary)("verify", "--model", running.model, "--json")
    assert json.loads(out)["server"]["judgements"] == "the majority of 5 sampled answers"
