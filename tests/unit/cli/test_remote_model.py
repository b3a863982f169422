"""``--model openai:NAME@URL`` on the command line: what is wrong is told before anything is loaded or sent."""

from __future__ import annotations

import pytest

from tests.support.command_line import command_line

MODEL = "openai:m@http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--model", MODEL), "set mitigation='none' (--mitigation none, RAG_POSFIX_MITIGATION=none)"),
        (("serve", "--model", MODEL, "--mitigation", "parallel_encoding"), "'parallel_encoding' needs the weights"),
        (("serve", "--model", "openai:m@host", "--mitigation", "none"), "must be openai:NAME@URL, for example"),
        (("verify", "--model", MODEL), "is on a server, and this needs the weights in this process"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(arguments, message, capsysbinary):
    code, out, err = command_line(capsysbinary)(*arguments)
    assert code == 1
    assert out == ""
    assert message in " ".join(err.split())
    assert "Traceback" not in err
