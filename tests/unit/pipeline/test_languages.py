"""Questions in other languages: detection, words, citations, and the prompt that they get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.templates import shipped_templates, templates_by_language
from rag_posfix.pipeline.citations import find_quotes
from rag_posfix.pipeline.language import asks_for_list, language_of
from rag_posfix.pipeline.pipeline import Defaults, Question
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.text import NO_PASSAGE_TEXT
from tests.support.pipelines import pipeline

DATA = Path(__file__).parents[2] / "data" / "languages"


def rows_of(language):
    return [json.loads(line) for line in (DATA / f"{language}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("language", ["fr", "zh", "ko"])
def test_words_find_the_passage_of_every_question(language):
    rows = rows_of(language)
    retriever = BM25Retriever.from_documents([Document(row["text"], id=row["id"]) for row in rows], k=1)
    assert [retriever.invoke(row["question"])[0].id for row in rows] == [row["id"] for row in rows]


@pytest.mark.parametrize("language", ["fr", "zh", "ko"])
def test_the_language_of_questions_is_known(language):
    assert {language_of(row["question"]) for row in rows_of(language)} == {language}


@pytest.mark.parametrize(("language", "least"), [("fr", 10), ("zh", 10), ("ko", 8)])
def test_short_answers_cite_their_passage_and_no_other(language, least):
    rows = rows_of(language)
    texts = [row["text"] for row in rows]
    cited = [[quote.passages for quote in find_quotes(row["answer"], texts, row["question"])] for row in rows]
    assert all(passages in ([], [(index,)]) for index, passages in enumerate(cited))
    assert sum(map(bool, cited)) >= least


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Who wrote the book about the Seine?", "en"),
        ("Wer hat das Rathaus gebaut?", "de"),
        ("¿Cuándo fue construido el puente?", "es"),
        ("橋は誰が設計しましたか", "ja"),
        ("ใครออกแบบสะพาน", "th"),
        ("Kermoal?", None),
        ("1868?", None),
    ],
)
def test_a_language_is_known_by_its_script_or_its_function_words(text, language):
    assert language_of(text) == language


def test_a_question_gets_the_template_and_the_text_of_its_language():
    made = pipeline(defaults=Defaults(templates=templates_by_language("short", {})))
    for language, question in (("fr", "Quand le phare fut-il allumé ?"), ("zh", "月牙桥是谁设计的?")):
        template = shipped_templates()[f"short-{language}"]
        assert made.ask(Question(question)).text == template.no_passage
        preview = made.preview(Question(question, [Document("x", id="x")]))
        assert template.instruction in preview.text
    assert made.ask(Question("When was it lit?")).text == NO_PASSAGE_TEXT


def test_a_follow_up_without_a_language_has_that_of_the_conversation():
    made = pipeline(defaults=Defaults(templates=templates_by_language("short", {})))
    german, documents = shipped_templates()["short-de"], [Document("x", id="x")]
    history = [
        {"role": "user", "content": "Wer hat den Leuchtturm entworfen?"},
        {"role": "assistant", "content": "Who designed it is unknown."},
    ]
    assert german.instruction in made.preview(Question("1871?", documents, history=history)).text
    assert made.ask(Question("1871?", [], history=history)).text == german.no_passage
    assert german.instruction not in made.preview(Question("Who designed it?", documents, history=history)).text
    assert german.instruction not in made.preview(Question("1871?", documents)).text


def test_the_text_of_the_settings_comes_first_and_own_templates_replace_shipped_ones(tmp_path):
    own = tmp_path / "it.toml"
    own.write_text('instruction = "Rispondi."\nno_passage = "Niente."\n', encoding="utf-8")
    templates = templates_by_language("short", {"it": str(own), "fr": "full-fr"})
    assert templates["it"].no_passage == "Niente."
    assert templates["fr"] == shipped_templates()["full-fr"]
    assert set(templates) == {"de", "fr", "es", "zh", "ko", "it"}
    made = pipeline(defaults=Defaults(templates=templates, no_passage_text="Nothing."))
    assert made.ask(Question("Quand le phare fut-il allumé ?")).text == "Nothing."


@pytest.mark.parametrize(
    "question",
    [
        "Which offices have a canteen?", "Which of these ten offices have a canteen?", "Which phones are waterproof?",
        "In which offices are dogs allowed?", "Which phones cost less than 300 euros?", "What pets are allowed?",
        "Which people work in Hamre?", "Welche Büros haben eine Kantine?", "Welche roten Schiffe wurden verkauft?",
        "Quels bureaux ont une cantine ?", "¿Qué oficinas tienen comedor?", "哪些办公室有食堂?", "List the courses.",
    ],
)  # fmt: skip
def test_a_question_for_several_things_asks_for_a_list(question):
    assert asks_for_list(question)


@pytest.mark.parametrize(
    "question",
    [
        "What does a helmet cost?", "Which bus is late?", "What happens to the money?", "What is the address?",
        "Which company's engine is it?", "What was the ferry's name?", "Which class is the best?",
        "How many clocks did he leave?", "Welches Schiff ist rot?", "Which is the largest?", "Which has two engines?",
    ],
)  # fmt: skip
def test_a_question_for_one_thing_asks_for_no_list(question):
    assert not asks_for_list(question)
