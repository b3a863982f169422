from benchmarks.walks import Walk, plan_walk
from rag_posfix.text import clean_text, content_hash


def test_a_walk_counts_each_function_of_the_project_once_and_no_other():
    walk = Walk()
    with walk.counting():
        clean_text("a")
        clean_text("b")
        sorted("cd")
    assert walk.summary() == {"files": 1, "functions": 1}


def test_a_walk_ends_with_the_last_function():
    walk = Walk(last="clean_text")
    with walk.counting():
        clean_text("a")
        content_hash("a")
    assert {name for _, name in walk.functions} == {"clean_text"}


def test_a_plan_reaches_the_attention_hook():
    assert "hooked_attention" in {name for _, name in plan_walk().functions}
