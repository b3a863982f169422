import pytest

from rag_posfix.reranking.language_model import without_copies


@pytest.mark.parametrize(
    ("question", "text", "expected"),
    [
        # The question has 4 runs of three words, all in the copy.
        ("When was the lighthouse built in?", "Q: When was the lighthouse built in? A: In 1890.", "A: In 1890."),
        ("when was the lighthouse built in", "Forum. When was the lighthouse built in Rome 7.", "Forum."),
        # 2 of 4 are shared: an answer in the question's words stays.
        ("What is the capital of France?", "The capital of France is Paris.", "The capital of France is Paris."),
        # An answer in the words of the question, for 5 of 6 runs, lacks the first or the last of them.
        (
            "Who designed and built the old Maravel lighthouse?",
            "Ilse Korvanth designed and built the old Maravel lighthouse.",
            "Ilse Korvanth designed and built the old Maravel lighthouse.",
        ),
        ("Who designed the Maravel lighthouse?", "FAQ: who designed the Maravel lighthouse? Ilse.", "Ilse."),
        ("德国最高的山是哪一座\uff1f", "德国最高的山是楚格峰。", "德国最高的山是楚格峰。"),
        # A short query has no copies: every passage about it repeats it.
        ("Torvane lighthouse", "The Torvane lighthouse was lit in 1883.", "The Torvane lighthouse was lit in 1883."),
        ("灯台はいつ建てられましたか", "質問。灯台はいつ建てられましたか\uff1f1890年です。", "質問。1890年です。"),
        ("?!", "Left as it is? Yes.", "Left as it is? Yes."),
        ("Who is it?", "", ""),
    ],
)
def test_sentences_that_copy_the_question_are_left_out(question, text, expected):
    assert without_copies(text, question) == expected


def test_a_text_without_copies_keeps_its_white_space():
    assert without_copies("  One.\n\n  Two. ", "Who is the author of it?") == "  One.\n\n  Two. "
