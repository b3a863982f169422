"""Prompts and answers of training samples, in the tokens of a model, as the pipeline makes prompts."""

from __future__ import annotations

from dataclasses import dataclass

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.plan.layout import Layout
from rag_posfix.training.data.sample import Sample


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt, and the answer that is trained.

    Attributes:
        layout: The prompt.
        answer: The tokens of the answer and the one that ends it.
    """

    layout: Layout
    answer: tuple[int, ...]


class PromptMaker:
    """Makes the prompts of samples for a model, with the template and the tokens of the pipeline.

    Args:
        encoder: The model's tokenizer.
    """

    def __init__(self, encoder: Tokenizer, context_window: int) -> None:
        self._encoder = encoder
        self._assembler = Assembler(encoder, context_window)
        self._end = end_of_answer(encoder)

    def make(self, sample: Sample) -> TrainingPrompt:
        """Return the prompt of a sample with its passages in their order."""
        answer = (*self._encoder.encode_text(sample.answers[0]), self._end)
        made = self._assembler.assemble(
            sample.question, sample.documents(), order="original", max_new_tokens=len(answer)
        )  # fmt: skip
        missing = len(sample.passages) - len(made.documents)
        if missing:
            raise ConfigError(
                f"sample {sample.id}: {missing} of {len(sample.passages)} passages repeat or do not fit into the "
                f"context window of {self._assembler.context_window} tokens; make data with a lower --max-tokens"
            )
        return TrainingPrompt(made.layout, answer)


def end_of_answer(encoder: Tokenizer) -> int:
    """Return the token that ends an answer: what the chat template writes after one."""
    mark = "\ue000"
    chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": mark}]
    after = encoder.encode_template(encoder.render_chat(chat, open_answer=False).rpartition(mark)[2])
    for token in (*after[:1], *sorted(encoder.eos_ids)):
        if token in encoder.eos_ids:
            return token
    raise ConfigError("the tokenizer has no token that ends an answer; use a model whose tokenizer has an eos_token")
