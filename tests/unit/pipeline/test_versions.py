"""Of two versions of one text the newer is read, and the older is named."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from rag_posfix.pipeline.pipeline import Question
from rag_posfix.pipeline.versions import date_of, older_versions
from rag_posfix.retrieval.base import as_retriever
from tests.support.pipelines import pipeline

QUESTION = "How long is the notice period?"
OLD = "The notice period is 21 days from the end of the month."
NEW = "The notice period is 30 days from the end of the month."


def document(text, source, **metadata):
    return Document(text, id=source, metadata={"source": source, **metadata})


@pytest.mark.parametrize(
    ("metadata", "date"),
    [
        ({"date": "2024-03-01T00:00:00"}, "2024-03-01"),
        ({"year": 2019}, "2019"),
        ({"title": "Policy of 2021"}, "2021"),
        ({"title": "Policy, 3 March 2021"}, "2021-03-03"),
        ({"title": "Richtlinie vom 3. März 2021"}, "2021-03-03"),
        ({"title": "Policy, March 3, 2021"}, "2021-03-03"),
        ({"source": "files/policy-2024-03.md"}, "2024-03"),
        ({"source": "files/20240301_policy.md"}, "2024-03-01"),
        ({"title": "Policy 7", "source": "policy.md"}, ""),
        ({"source": "invoice-1202024.md"}, ""),
    ],
)
def test_a_date_is_read_from_metadata_title_or_file_name(metadata, date):
    assert date_of(Document(page_content="Since 1999.", metadata=metadata)) == date


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("Valid from 1 March 2023. The notice period is 21 days.", "2023-03-01"),
        ("Stand: 2023-03. Die Frist beträgt 21 Tage.", "2023-03"),
        ("Fassung vom 1. Oktober 2022", "2022-10-01"),
        ("The house was built in 1999. Last updated: May 2020.", "2020-05"),
        ("The house was built in 1999.", ""),
    ],
)
def test_a_date_in_a_text_counts_where_the_text_says_that_it_is_its_own(text, date):
    assert date_of(Document(page_content=text)) == date


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"source": "policy-2021.md"}, {"source": "policy-2024.md"}),
        ({"source": "a.md", "date": "2021-05-01"}, {"source": "b.md", "date": "2021-06-01"}),
        ({"source": "a.md", "title": "Policy (March 2021)"}, {"source": "b.md", "title": "Policy (May 2021)"}),
        ({"source": "policy_v2.md"}, {"source": "policy_v10.md"}),
    ],
)
def test_the_older_of_two_versions_is_found_by_date_or_number(older, newer):
    versions = [
        document(OLD, **older),
        document(NEW, **newer),
        document("The canteen opens at noon each day.", "c.md"),
    ]
    assert older_versions(versions, QUESTION) == {0: 1}
    assert older_versions(versions[::-1], QUESTION) == {2: 1}


def test_a_date_in_the_text_tells_which_version_is_newer():
    versions = [document(f"Valid from 1 May 2024. {NEW}", "b.md"), document(f"Valid from 1 May 2021. {OLD}", "a.md")]
    assert older_versions(versions, QUESTION) == {1: 0}


def test_of_three_versions_the_newest_is_left():
    versions = [document(text, f"policy-{year}.md") for text, year in ((OLD, 2019), (NEW, 2024), (OLD, 2021))]
    assert older_versions(versions, QUESTION) == {0: 1, 2: 1}


@pytest.mark.parametrize(
    "question",
    [
        "How long was the notice period in 2021?", "What was the notice period before?", "How has the period changed?",
        "Compare the notice periods.", "Wie lang war die Frist früher?", "List all notice periods.",
    ],
)  # fmt: skip
def test_a_question_about_an_earlier_state_or_about_all_reads_every_version(question):
    assert older_versions([document(OLD, "policy-2021.md"), document(NEW, "policy-2024.md")], question) == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"source": "log.csv", "date": "2021"}, {"source": "log.csv", "date": "2022"}),  # rows of one file
        ({"source": "a.md"}, {"source": "b.md"}),
        ({"source": "policy-2021.md"}, {"source": "policy.md"}),
        ({"source": "policy-2021.md"}, {"source": "policy-2021-05.md"}),
    ],
)
def test_without_two_files_and_two_dates_nothing_is_older(first, second):
    assert older_versions([document(OLD, **first), document(NEW, **second)], QUESTION) == {}


def test_texts_with_other_words_are_no_versions_of_each_other():
    minutes = [
        document("The board bought a boat for the children of the town.", "minutes-2021.md"),
        document("The roof of the boat house leaks, Arne repairs it.", "minutes-2022.md"),
    ]
    assert older_versions(minutes, "When did the board buy a boat?") == {}


CONTRACT = "The notice period of {} is {} days from the end of the month, salary is paid monthly."


@pytest.mark.parametrize(
    ("question", "sources"),
    [
        ("How long is the notice period of Anna Berg?", ("contract-2021.md", "contract-2024.md")),
        ("How long is the notice period?", ("minutes-2021.md", "minutes-2024.md")),
        ("How long is the notice period?", ("2021 meetings.md", "2024 meetings.md")),
        ("How long is the notice period?", ("Rechnung 2021.md", "Rechnung 2024.md")),
        ("Wie lang ist die Frist im April?", ("policy-2021-04.md", "policy-2021-05.md")),
    ],
)
def test_documents_of_a_series_or_of_somebody_whom_the_question_names_are_no_versions(question, sources):
    texts = CONTRACT.format("Anna Berg", 21), CONTRACT.format("Carl Dahl", 30)
    assert (
        older_versions([document(text, source) for text, source in zip(texts, sources, strict=True)], question) == {}
    )


@pytest.mark.parametrize("question", [QUESTION, "May I shorten the notice period?", "Ist die notice period fest?"])
def test_a_question_that_names_nobody_reads_the_newer_of_two(question):
    """ "log" in "catalogue" is no log."""
    assert older_versions([document(OLD, "catalogue-2021.md"), document(NEW, "catalogue-2024.md")], question) == {0: 1}


def asked(question=QUESTION, **options):
    versions = [document(OLD, "policy-2021.md"), document(NEW, "policy-2024.md")]
    return pipeline(retriever=as_retriever(lambda _: versions)).ask(Question(question, **options))


def test_the_older_version_is_not_read_and_is_named_with_the_newer():
    answer = asked()
    assert [read.id for read in answer.documents] == ["policy-2024.md"]
    assert answer.dropped == (("policy-2021.md", "older_version"),)
    (warning,) = answer.warnings
    assert warning.startswith("policy-2021.md (2021) is an older version of policy-2024.md (2024) and was not read")


def test_all_versions_are_read_with_min_relevance_off_or_if_they_come_with_the_question():
    assert len(asked(min_relevance="off").documents) == 2
    versions = [document(OLD, "policy-2021.md"), document(NEW, "policy-2024.md")]
    assert len(pipeline().ask(Question(QUESTION, versions)).documents) == 2
