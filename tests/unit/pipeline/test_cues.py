"""An answer ends where the model goes on with the next question of the template."""

from __future__ import annotations

from dataclasses import replace

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.templates import shipped_templates
from rag_posfix.contracts.request import PromptTemplate, Sampling
from rag_posfix.generation.remote.generator import open_remote
from rag_posfix.pipeline.pipeline import Pipeline, Question
from tests.support.pipelines import pipeline
from tests.support.upstream import streamed, upstream, whole
from tests.unit.generation.remote.requests import request_of

OWN = PromptTemplate(question_prefix="<q>\n", answer_cue="\n</q>\n<a>\n")
TEMPLATES = {**shipped_templates(), "own": OWN}
GERMAN = shipped_templates()["short-de"]


def run_on(template):
    """Return a text that goes on as a prompt of the template does."""
    return f"1901\n\n{template.question_prefix}1902?{template.answer_cue} 1903"


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_ends_before_the_next_question_of_its_template(name):
    template = TEMPLATES[name]
    asked = Question("1901?", [Document(page_content=run_on(template))], template=template)
    answer = pipeline().ask(asked)
    assert (answer.text.strip(), answer.finish_reason, answer.stop_string) == ("1901", "stop", None)
    assert answer.well_formed
    chunks = list(pipeline().stream(asked))
    assert "".join(chunk.text for chunk in chunks) == answer.text


def test_an_answer_ends_before_a_second_answer():
    text = "1901\nAntwort: 1902"
    assert pipeline().ask(Question("1901?", [Document(page_content=text)], template=GERMAN)).text == "1901"


def test_the_words_of_a_cue_within_a_line_end_nothing():
    text = "Frage: und Antwort: stehen hier.\nDie Frage: ist offen\nFrageb\u00f6gen auch"
    answer = pipeline().ask(Question("Frage?", [Document(page_content=text)], template=GERMAN))
    assert answer.text == text


def test_a_stop_string_of_the_question_is_named_although_it_is_a_cue():
    asked = Question("1901?", [Document(page_content=run_on(GERMAN))], template=GERMAN)
    answer = pipeline().ask(replace(asked, sampling=Sampling(stop=("\nFrage:",))))
    assert answer.stop_string == "\nFrage:"


def test_a_server_gets_the_cues_and_an_answer_ends_there_whether_it_stops_or_not():
    text = run_on(GERMAN)
    parts = [text[start : start + 4] for start in range(0, len(text), 4)]
    with upstream(whole(text, "length"), streamed(*parts, finish="length")) as server:
        generator = open_remote(server.model)
        asking = Pipeline(generator, Assembler(generator.encoder, generator.context_window, GERMAN))
        asked = Question("Wann?", [Document(page_content="1901.")], mitigation="none", use_cache=False)
        answer = asking.ask(asked)
        pieces = list(asking.stream(asked))
        generator.close()
    assert (answer.text, answer.finish_reason, answer.well_formed) == ("1901\n", "stop", True)
    assert "".join(piece.text for piece in pieces) == "1901\n"
    assert pieces[-1].answer is not None
    assert pieces[-1].answer.text == "1901\n"
    assert [body["stop"] for body in server.bodies] == [["\nFrage:", "\nAntwort:"]] * 2


def test_a_streamed_answer_that_ends_like_the_beginning_of_a_cue_is_whole():
    with upstream(streamed("1901\n", "Fra", finish="length")) as server:
        generator = open_remote(server.model)
        request = replace(request_of(generator), cues=("\nFrage:",))
        pieces = list(generator.stream(request))
        generator.close()
    assert "".join(piece.text for piece in pieces) == "1901\nFra"
    assert pieces[-1].generation is not None
    assert (pieces[-1].generation.text, pieces[-1].generation.finish_reason) == ("1901\nFra", "length")


def test_a_server_gets_at_most_four_strings_and_none_where_it_may_refuse_them():
    cues = ("\na:", "\nb:", "\nc:")
    for options, sent in (
        ({}, ["x", "y", "\na:", "\nb:"]),
        ({"token_limit_field": "max_completion_tokens"}, ["x", "y"]),
    ):
        with upstream(whole("z")) as server:
            generator = open_remote(server.model, **options)
            generator.generate(replace(request_of(generator, stop=("x", "y")), cues=cues))
            generator.close()
        assert server.bodies[0]["stop"] == sent
