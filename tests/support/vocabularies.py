"""Small vocabularies of every kind that decoder models have, trained on the demo's passages and the chat templates."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.demo_data import load_passages
from tests.support.chat_templates import FAMILIES

LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
UNDERSCORE = "\u2581"


@cache
def corpus():
    passages = [f"{one.metadata.get('title', '')}\n{one.page_content}\n\n" for one in load_passages()]
    template = PromptTemplate()
    prompt = f"{template.opening}{template.question_prefix}Who?{template.answer_cue}"
    return [*passages, *[prompt] * 20, *(family.jinja for family in FAMILIES.values())]


def byte_level(*splits, add_prefix_space=False, use_regex=True):
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    ))  # fmt: skip
    return tokenizer


def sentence_piece(normalizer=None, pre_tokenizer=None, *, size=700, lines_apart=True, strips=True):
    """A BPE with byte fallback; its pieces reach across no space, and across line breaks unless ``lines_apart``."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    lines = [pre_tokenizers.Split("\n", "isolated")] if lines_apart else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*lines, pre_tokenizers.Metaspace(prepend_scheme="never")])
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", *bytes_], show_progress=False
    ))  # fmt: skip
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] == "<unk>"]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    steps = [decoders.Replace(UNDERSCORE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(corpus(), trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>", initial_alphabet=[*"“”Éé漢字"],
        show_progress=False,
    ))  # fmt: skip
    return tokenizer


def spaces(*first):
    return normalizers.Sequence([*first, normalizers.Replace(" ", UNDERSCORE)])


@cache
def base(name):
    return MAKERS[name]()


MAKERS = {
    # GPT-2's words; digits alone, as SmolLM2 has them.
    "gpt-2": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    # Llama 3, Qwen, GPT-4: marks take the line breaks behind them.
    "llama-3": lambda: byte_level(pre_tokenizers.Split(Regex(LLAMA_3_WORDS), "isolated"), use_regex=False),
    "byte-level, space first": lambda: byte_level(add_prefix_space=True),
    # Llama 2 and Mistral as first released: a normaliser puts a space first, and nothing splits words.
    "llama-2": lambda: sentence_piece(spaces(normalizers.Prepend(UNDERSCORE))),
    "metaspace always": lambda: sentence_piece(None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace first": lambda: sentence_piece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace never": lambda: sentence_piece(None, pre_tokenizers.Metaspace(prepend_scheme="never"), strips=False),
    "gemma": lambda: sentence_piece(spaces(), pre_tokenizers.Split(UNDERSCORE, "merged_with_previous"), strips=False),
    # Nothing keeps pieces from reaching across line breaks, so no border around a passage is certain.
    "no borders": lambda: sentence_piece(spaces(normalizers.Prepend(UNDERSCORE)), size=1500, lines_apart=False),
    "unigram": unigram,
}

VOCABULARIES = tuple(MAKERS)


def stock_tokenizer(vocabulary, family):
    """Return transformers' own tokenizer of a vocabulary, with the chat template and control tokens of a family."""
    template = FAMILIES[family]
    backend = Tokenizer.from_str(base(vocabulary).to_str())
    backend.add_special_tokens(
        [AddedToken(name, normalized=False, rstrip=template.rstrip) for name in template.controls]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template.jinja)
