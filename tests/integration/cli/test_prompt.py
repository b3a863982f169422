"""``prompt``: what the model will read, with token counts and cached segments."""

from __future__ import annotations

import pytest

QUESTION = "Who designed the Maravel lighthouse?"


@pytest.mark.weights
@pytest.mark.slow
def test_the_prompt_is_printed_with_counts_and_a_template(run, index, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("Read.\n\n{{ passages }}\nQ: {{ question }}\nA:", encoding="utf-8")
    result = run("prompt", QUESTION, "--index", index, "--template", template, "--k", "1", "--json")
    assert [segment["kind"] for segment in result.json["segments"]] == ["prefix", "passage", "suffix"]
    prefix, passage, suffix = (segment["text"] for segment in result.json["segments"])
    assert prefix.endswith("<|im_start|>user\nRead.\n\n")
    assert "Maravel" in passage
    assert suffix.startswith(f"Q: {QUESTION}\nA:<|im_end|>")
    assert result.json["tokens"] == sum(segment["tokens"] for segment in result.json["segments"])
    printed = run("prompt", QUESTION, "--index", index, "--k", "1")
    assert "Answer the question using only the passages below." in printed.out
    assert "passage lighthouse: " in printed.err
    assert "prompt tokens" not in printed.out
    assert run("prompt", QUESTION, "--index", index, "--template", "shrt", "--json").error["type"] == "ConfigError"
