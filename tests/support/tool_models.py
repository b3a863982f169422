"""Tiny random models whose chat templates write tools as released models do; the Jinja programs are written anew."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.tokenizer import Tokenizer
from tests.support.tiny import loaded_model, stock_model
from tests.support.vocabularies import base

_FOLDER = Path(__file__).resolve().parents[1] / "data" / "tool_templates"
QWEN, LLAMA, MISTRAL = ((_FOLDER / f"{name}.jinja").read_bytes().decode() for name in ("qwen", "llama", "mistral"))
ELEMENTS = QWEN.replace('{"name": "{{ c.function.name }}", "arguments": ', "<{{ c.function.name }}>").replace(
    "{{ c.function.arguments | tojson }}}", "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}"
)
"""Writes calls as elements, not as JSON."""
THINKING = QWEN.replace(
    "{{ m.content }}{% endif %}", "{{ m.content.split('</think>')[-1].strip() }}{% endif %}"
).replace("{{ m.content }}<|im_end|>", "{{ m.content.split('</think>')[-1].lstrip('\\n') }}<|im_end|>")
"""Leaves thoughts out."""

CONTROLS = {
    QWEN: ("<|im_start|>", "<|im_end|>"),
    ELEMENTS: ("<|im_start|>", "<|im_end|>"),
    THINKING: ("<|im_start|>", "<|im_end|>"),
    LLAMA: ("<|start|>", "<|end|>", "<|eot|>"),
    MISTRAL: (
        "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ),
}  # fmt: skip


def stock_tool_tokenizer(template):
    """Return transformers' own tokenizer; the marks of Qwen's calls are added tokens that are not special."""
    backend = Backend.from_str(base("llama-3").to_str())
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROLS[template]])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<tool_call>", "</tool_call>")])
    end = {LLAMA: "<|eot|>", MISTRAL: "</s>"}.get(template, "<|im_end|>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token=end)


def tool_engine(template=QWEN):
    """Return a random model with a chat template for tools. It writes nonsense where nothing constrains it."""
    encoder = Tokenizer(stock_tool_tokenizer(template))
    model = loaded_model(vocab_size=encoder.vocab_size, max_position_embeddings=2048)
    return Engine(model, encoder, "tiny", "tiny")


def save_chat_model(folder):
    """Write such a model as a folder that from_pretrained reads, and return the folder."""
    tokenizer = stock_tool_tokenizer(QWEN)
    stock_model(vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
