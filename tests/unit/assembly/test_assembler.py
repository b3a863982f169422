import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.assembly import Assembler, PromptTemplate
from rag_posfix.assembly.documents import content_key
from rag_posfix.assembly.orders import permute
from rag_posfix.assembly.tokenization import PassageBudget
from rag_posfix.errors import ConfigError, PromptTooLongError
from rag_posfix.text import clean_text, content_hash
from tests.support.texts import texts, visible_texts
from tests.support.toy_encoder import RecordingEncoder, ToyEncoder


def doc(text, score=None, **metadata):
    if score is not None:
        metadata["relevance_score"] = score
    return Document(page_content=text, metadata=metadata)


def assembler(window=100_000, **options):
    return Assembler(ToyEncoder(), window, **options)


def prompt(assembled):
    return ToyEncoder().decode(assembled.layout.token_ids)


def text_of(assembled, span):
    return ToyEncoder().decode(assembled.layout.tokens(span))


def test_the_whole_prompt_reads_as_documented():
    made = assembler().assemble(
        "Who?", [doc("It was Bob.", 0.4), doc("It was Ann.", 0.9, title="A  case\n")], history=()
    )
    assert prompt(made) == (
        "<|im_start|>user\n"
        "Answer the question using only the passages below. Some of them may be irrelevant. Give a short answer.\n\n"
        "A case\nIt was Ann.\n\n"
        "It was Bob.\n\n"
        "Question: Who?\nAnswer:<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    layout = made.layout
    assert [text_of(made, span) for span in layout.texts] == ["It was Ann.", "It was Bob."]
    assert [text_of(made, span) for span in layout.passages] == ["A case\nIt was Ann.\n\n", "It was Bob.\n\n"]
    assert text_of(made, layout.question) == "Who?"
    assert text_of(made, layout.suffix) == "Question: Who?\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    assert layout.relevance == (0.9, 0.4)
    assert layout.keys == (content_hash("A case", "It was Ann."), content_hash("", "It was Bob."))
    assert made.prompt_tokens == len(layout.token_ids)


HISTORY = [
    {"role": "user", "content": "Hi"},
    {"role": "system", "content": "Be kind."},
    {"role": "assistant", "content": "Hello"},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Listen."},
]


def test_history_and_system_messages_follow_the_passages():
    template = PromptTemplate(system="Rules.", instruction="Read.")
    made = assembler(template=template).assemble("Who?", [doc("Ann.")], history=HISTORY)
    assert prompt(made) == (
        "<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\nRead.\n\nAnn.\n\nBe kind.\n\nBe brief.\n\n"
        "Question: Hi\nAnswer:<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nListen.\n\nQuestion: Who?\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    )


def test_history_that_begins_with_the_assistant_or_is_a_system_message_alone_follows_the_passages():
    template = PromptTemplate(instruction="Read.")
    made = assembler(template=template).assemble(
        "Who?", [doc("Ann.")], history=[{"role": "assistant", "content": "Ask me."}]
    )
    assert prompt(made) == (
        "<|im_start|>user\nRead.\n\nAnn.\n\n<|im_end|>\n<|im_start|>assistant\nAsk me.<|im_end|>\n"
        "<|im_start|>user\nQuestion: Who?\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    )
    made = assembler(template=template).assemble(
        "Who?", [doc("Ann.")], history=[{"role": "system", "content": "Be kind."}]
    )
    assert prompt(made) == (
        "<|im_start|>user\nRead.\n\nAnn.\n\nBe kind.\n\nQuestion: Who?\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_prompt_of_a_turn_continues_the_prompt_of_the_turn_before_it():
    first = prompt(assembler().assemble("Who?", [doc("Ann.")], history=HISTORY[1:2]))
    history = [HISTORY[1], {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann."}]
    second = prompt(assembler().assemble("When?", [doc("Ann.")], history=history))
    assert second.startswith(first + "Ann.<|im_end|>")


def test_history_and_system_messages_precede_the_passages_if_history_is_first():
    template = PromptTemplate(system="Rules.", history_first=True)
    made = assembler(template=template).assemble("Who?", [doc("Ann.")], history=HISTORY)
    assert prompt(made).startswith(
        "<|im_start|>system\nRules.\n\nBe kind.\n\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nListen.\n\nAnswer the question using"
    )


def test_without_documents_the_turn_is_the_question_alone():
    for documents in ([], [doc("")], [doc(" \n")]):
        made = assembler().assemble("Who?", documents)
        assert prompt(made) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
        assert text_of(made, made.layout.question) == "Who?"
        assert made.layout.n_passages == 0
        assert made.layout.relevance is None
        assert [reason for _, reason in made.dropped] == ["empty"] * len(documents)


def test_two_identical_documents_give_the_prompt_of_one():
    one = assembler().assemble("Who?", [doc("Ann did it.", id="a")])
    two = assembler().assemble("Who?", [doc("Ann did it.", id="a"), doc("Ann did it.", id="b")])
    assert two.layout == one.layout
    assert two.dropped == (("b", "duplicate"),)
    assert two.ids == one.ids == ("a",)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("relevance", "bdac"),
        ("reverse", "cadb"),
        ("ends_first", "bacd"),
        ("original", "abcd"),
    ],
)
def test_order_places_the_documents(order, expected):
    scores = {"a": 0.3, "b": 0.9, "c": 0.1, "d": 0.5}
    made = assembler().assemble("Who?", [doc(text, score) for text, score in scores.items()], order=order)
    assert "".join(document.page_content for document in made.documents) == expected
    assert "".join(text_of(made, span) for span in made.layout.texts) == expected
    assert made.layout.relevance == tuple(scores[text] for text in expected)
    assert made.order == order


def test_unscored_documents_count_as_best_first_and_leave_no_relevance():
    made = assembler().assemble("Who?", [doc("a"), doc("b"), doc("c")], order="ends_first")
    assert "".join(document.page_content for document in made.documents) == "acb"
    assert made.layout.relevance is None


def test_scores_are_clipped_in_the_layout_and_a_missing_one_is_the_lowest():
    made = assembler().assemble("Who?", [doc("a"), doc("b", -3), doc("c", 7.5), doc("d", 0.5)])
    assert "".join(document.page_content for document in made.documents) == "cdba"
    assert made.layout.relevance == (1.0, 0.5, 0.01, 0.01)


def test_documents_come_back_as_equal_copies():
    given_documents = [doc("Ann \x00 did it.", 0.5, title="T", other=[1]), doc("Bob.", 0.9)]
    before = [document.model_copy(deep=True) for document in given_documents]
    made = assembler().assemble("Who?", given_documents)
    assert given_documents == before
    assert list(made.documents) == [before[1], before[0]]
    assert made.documents[0] is not given_documents[1]
    made.documents[0].metadata["new"] = 1
    assert given_documents == before


class TestBudget:
    def test_a_document_that_does_not_fit_is_skipped_for_a_smaller_one(self):
        documents = [doc("a" * 10, 0.9, id="a"), doc("b" * 50, 0.8, id="b"), doc("c" * 5, 0.7, id="c")]
        made = assembler().assemble("Who?", documents, budget_tokens=19)  # (10 + 2) + (5 + 2)
        assert made.ids == ("a", "c")
        assert made.dropped == (("b", "budget"),)
        assert made.truncated == ()
        assert assembler().assemble("Who?", documents, budget_tokens=18).ids == ("a",)

    def test_the_best_document_is_cut_if_it_does_not_fit_alone(self):
        documents = [doc("b", 0.1, id="b"), doc("áéíóú", 0.9, id="a", title="T")]
        made = assembler().assemble("Who?", documents, budget_tokens=2 + 2 + 7)
        assert made.truncated == ("a",)
        assert made.dropped == (("b", "budget"),)
        # 7 bytes end inside of the fourth letter.
        assert text_of(made, made.layout.texts[0]) == "áéí"
        assert made.documents[0].page_content == "áéíóú"
        assert made.layout.keys == (content_hash("T", "áéíóú"),), "what is kept of it is found by the document"

    def test_the_window_is_used_to_the_last_token(self):
        fixed = assembler().assemble("Who?", [doc("a" * 50)]).prompt_tokens
        assert assembler(fixed + 9).assemble("Who?", [doc("a" * 50)], max_new_tokens=9).truncated == ()
        made = assembler(fixed + 8).assemble("Who?", [doc("a" * 50, id="a")], max_new_tokens=9)
        assert made.truncated == ("a",)
        assert made.prompt_tokens == fixed - 1

    def test_a_budget_above_the_window_leaves_room_for_question_and_answer(self):
        documents = [doc("a" * 50, 0.9, id="a"), doc("b" * 50, 0.8, id="b")]
        fixed = assembler().assemble("Who?", documents[:1]).prompt_tokens
        for budget in (10**6, None):
            made = assembler(fixed + 9).assemble("Who?", documents, max_new_tokens=9, budget_tokens=budget)
            assert (made.ids, made.dropped, made.prompt_tokens) == (("a",), (("b", "budget"),), fixed)

    def test_a_budget_too_small_for_words_is_an_error(self):
        with pytest.raises(PromptTooLongError, match=r"^3 tokens are left .* raise budget_tokens") as error:
            assembler().assemble("Who?", [doc("abcdefgh")], budget_tokens=5)
        assert "\n" not in str(error.value)

    def test_a_question_beyond_the_window_is_an_error_before_any_document_is_read(self):
        encoder = RecordingEncoder()
        with pytest.raises(PromptTooLongError, match=r"max_tokens=10 more, but the context window has 200;"):
            Assembler(encoder, 200).assemble("w" * 200, [doc("Ann.")], max_new_tokens=10)
        assert "Ann." not in encoder.encoded

    def test_plain_chat_must_fit_too(self):
        tokens = assembler().assemble("Who?").prompt_tokens
        assert assembler(tokens + 5).assemble("Who?", max_new_tokens=5).prompt_tokens == tokens
        with pytest.raises(PromptTooLongError):
            assembler(tokens + 4).assemble("Who?", max_new_tokens=5)

    @given(
        st.lists(st.tuples(st.text("ab \n", min_size=1, max_size=8), st.sampled_from([0.1, 0.5, 0.9])), max_size=8),
        st.integers(6, 60),
        st.randoms(use_true_random=False),
    )
    def test_what_is_kept_does_not_depend_on_the_order_of_scored_documents(self, rows, budget, shuffler):
        documents = [doc("....." + text, score) for text, score in rows]
        shuffled = shuffler.sample(documents, len(documents))
        made, again = (assembler().assemble("Who?", some, budget_tokens=budget + 2) for some in (documents, shuffled))
        assert set(made.layout.keys) == set(again.layout.keys)
        assert sum(len(span) for span in made.layout.passages) <= budget + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"question": " \n\t"}, "at least one visible"),
        ({"question": None}, "question=None"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be >= 1"),
        ({"budget_tokens": 0}, "budget_tokens=0 must be >= 1"),
        ({"history": [{"role": "tool", "content": "x"}]}, "role 'tool' is not supported"),
        ({"history": [{"role": "user", "content": None}]}, "content is NoneType"),
        ({"documents": ["text"]}, r"documents\[0\] is str"),
        ({"documents": [Document.model_construct(page_content=3, metadata={})]}, "page_content is int"),
        ({"documents": [doc("a", float("nan"), id="x")]}, "document 'x': .*=nan must be a finite number"),
        ({"documents": [doc("a", True, id="x")]}, "must be a finite"),
        ({"documents": [doc("a", 10**400, id="x")]}, "must be a finite"),
        ({"order": "ends_frist"}, "Did you mean 'ends_first'"),
    ],
)
def test_wrong_arguments_are_named_on_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        assembler().assemble(**({"question": "Who?", "documents": [doc("Ann.")]} | arguments))
    assert "\n" not in str(error.value)


def test_context_window_must_be_positive():
    with pytest.raises(ConfigError, match="context_window=0"):
        assembler(0)


@pytest.mark.slow
def test_each_document_is_encoded_once_and_ten_thousand_take_no_time():
    encoder = RecordingEncoder()
    documents = [doc(f"document {i}", id=str(i)) for i in range(10_000)]
    made = Assembler(encoder, 10_000_000).assemble("Who?", documents, order="random", seed=3)
    assert len(made.ids) == 10_000
    assert sorted(text for text in encoder.encoded if text.startswith("document")) == sorted(
        document.page_content for document in documents
    )


def test_documents_beyond_the_budget_are_not_even_encoded():
    encoder = RecordingEncoder()
    documents = [doc(f"document {i}" + "." * 50) for i in range(1000)]
    Assembler(encoder, 100_000).assemble("Who?", documents, budget_tokens=63)
    assert sum(text.startswith("document") for text in encoder.encoded) == 1


@settings(max_examples=200)
@given(
    question=visible_texts(),
    documents=st.lists(st.tuples(texts(), texts(), st.none() | st.floats(-1, 2)), max_size=5),
    history=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), texts()), max_size=4),
    order=st.sampled_from(["relevance", "reverse", "ends_first", "original", "random"]),
    history_first=st.booleans(),
)
@pytest.mark.slow
def test_any_text_comes_back_from_its_span_and_forges_no_turn(question, documents, history, order, history_first):
    given_documents = [doc(text, score, title=title) for text, title, score in documents]
    messages = [{"role": role, "content": content} for role, content in history]
    template = PromptTemplate(history_first=history_first)
    made = assembler(template=template).assemble(question, given_documents, order=order, history=messages)
    layout = made.layout
    assert [text_of(made, span) for span in layout.texts] == [clean_text(d.page_content) for d in made.documents]
    assert text_of(made, layout.question) == clean_text(question)
    for span in (*layout.passages, layout.question):
        assert ToyEncoder.control_ids.isdisjoint(layout.tokens(span))
    assert len(made.documents) + len(made.dropped) == len(given_documents)
    # One turn per merged message and one for the answer: text opened none.
    plain = [role for role, _ in history if role != "system"] + ["user"]
    turns = sum(role != plain[i - 1] or i == 0 for i, role in enumerate(plain))
    if history_first or not layout.n_passages:
        turns += any(role == "system" for role, _ in history)
    else:  # passages before a message of the assistant are a turn of their own
        turns += plain[0] == "assistant"
    assert layout.token_ids.count(256) == turns + 1
    assert layout.token_ids.count(257) == turns


# Budgets per passage through the assembler. One token is one byte; a passage ends in a blank line, two tokens.


SENTENCES = "One two three. Four five six. Seven eight nine."  # ends after 14, 29 and 47 characters


def limited(**budget):
    return Assembler(ToyEncoder(), 4096, budget=PassageBudget(**budget))


def scored(*texts):
    return [
        Document(page_content=text, id=str(i), metadata={"relevance_score": 1 - i / 10})
        for i, text in enumerate(texts)
    ]


def words(made):
    decode = ToyEncoder().decode
    return [decode(made.layout.tokens(span)) for span in made.layout.texts]


def test_late_ranks_have_less_and_end_with_a_sentence():
    documents = scored(*(f"{i} {SENTENCES}" for i in "abc"))
    # 40 (1 + 0.5), 40, 40 (1 - 0.5), each less the separator of two: 58, 38 and 18 characters.
    made = limited(tokens=40, shrink=0.5, overflow="truncate").assemble("Who?", documents)
    assert words(made) == [f"a {SENTENCES}", "b One two three. Four five six.", "c One two three."]
    assert (made.truncated, made.dropped) == (("1", "2"), ())


def test_what_a_passage_may_have_goes_by_rank_and_not_by_place():
    documents = scored(*(f"{i} {SENTENCES}" for i in "abc"))
    made = {
        order: limited(tokens=40, shrink=0.5, overflow="truncate").assemble("Who?", documents, order=order)
        for order in ("relevance", "reverse", "ends_first", "random")
    }
    assert len({tuple(sorted(words(one))) for one in made.values()}) == 1
    assert made["reverse"].ids == ("2", "1", "0")


def test_dropping_leaves_out_what_is_longer_but_keeps_the_best_shortened():
    documents = scored("a" * 50, "b" * 50, "c" * 30)
    made = limited(tokens=40).assemble("Who?", documents)
    assert words(made) == ["a" * 38, "c" * 30]
    assert (made.truncated, made.dropped) == (("0",), (("1", "budget"),))


def test_truncating_fills_the_whole_budget():
    documents = scored(SENTENCES, SENTENCES.upper(), "c" * 30)
    made = limited(overflow="truncate").assemble("Who?", documents, budget_tokens=80)
    # 49 of 80, then 31: 29 characters and the separator.
    assert words(made) == [SENTENCES, "ONE TWO THREE. FOUR FIVE SIX."]
    assert (made.truncated, made.dropped) == (("1",), (("2", "budget"),))


def test_what_is_too_short_to_be_cut_is_left_out():
    documents = scored("a" * 30, "b" * 30)
    made = limited(overflow="truncate").assemble("Who?", documents, budget_tokens=32 + 5)
    assert (words(made), made.dropped) == (["a" * 30], (("1", "budget"),))
    made = limited(overflow="truncate").assemble("Who?", documents, budget_tokens=32 + 6)
    assert (words(made), made.dropped, made.truncated) == (["a" * 30, "b" * 4], (), ("1",))


def test_an_error_says_which_document_and_what_to_do():
    with pytest.raises(PromptTooLongError, match=r"document '1' takes 52 tokens and may take 40; raise the budget"):
        limited(tokens=40, overflow="error").assemble("Who?", scored("a" * 30, "b" * 50))
    assert limited(tokens=40, overflow="error").assemble("Who?", scored("a" * 30, "b" * 38)).dropped == ()


def test_a_random_order_is_that_of_the_seed():
    documents = scored(*"abcdef")
    for seed in (0, 7):
        made = Assembler(ToyEncoder(), 4096).assemble("Who?", documents, order="random", seed=seed)
        assert made.ids == tuple(map(str, permute("random", [None] * 6, seed)))
    assert permute("random", [None] * 6, 0) != permute("random", [None] * 6, 7)


def test_a_question_that_is_far_too_long_is_not_tokenised_whole():
    with pytest.raises(PromptTooLongError, match="question, history and template take"):
        Assembler(ToyEncoder(), 16).assemble("w" * 2 * (16 + 32))
    with pytest.raises(PromptTooLongError, match="question and history have 97 characters"):
        Assembler(ToyEncoder(), 16).assemble("w" * (2 * (16 + 32) + 1))


@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=12),
    st.integers(12, 80),
    st.floats(0, 1),
    st.sampled_from(["drop", "truncate"]),
    st.integers(20, 400),
)
def test_every_passage_keeps_its_limit_and_all_keep_the_budget(lengths, tokens, shrink, overflow, budget):
    documents = scored(*(f"{chr(65 + i)}" * length for i, length in enumerate(lengths)))
    rules = PassageBudget(tokens, shrink, overflow)
    limit = rules.limits(len(documents), budget)
    made = Assembler(ToyEncoder(), 4096, budget=rules).assemble("Who?", documents, budget_tokens=budget)
    for identity, span in zip(made.ids, made.layout.passages, strict=True):
        assert len(span) <= limit(int(identity))
    assert sum(map(len, made.layout.passages)) <= budget
    assert set(made.truncated) <= set(made.ids)
    assert sorted([*made.ids, *(dropped.id for dropped in made.dropped)]) == sorted(
        str(i) for i in range(len(lengths))
    )


class Counting(ToyEncoder):
    """Counts the characters that it encodes."""

    characters = 0

    def encode_text(self, text):
        self.characters += len(text)
        return super().encode_text(text)


def test_a_text_that_cannot_fit_is_not_tokenised_to_its_end():
    encoder = Counting()
    made = Assembler(encoder, 4096).assemble("Who?", [Document(page_content="word " * 1_000_000, id="long")])
    assert made.truncated == ("long",)
    assert made.layout.keys == (content_key(Document(page_content="word " * 1_000_000)),)
    assert encoder.characters < 300_000
    with pytest.raises(PromptTooLongError, match="5000000 characters"):
        Assembler(encoder, 4096).assemble("Who? " * 1_000_000)
    assert encoder.characters < 300_000
