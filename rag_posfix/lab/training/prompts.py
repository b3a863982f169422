"""Prompts of training samples, their answers' logits and losses, and prompts packed into one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.errors import ConfigError, PlanConflictError
from rag_posfix.generation.model.one_pass import TRAINABLE, AnsweredPrompt, can_share_pass, forward_with_answers
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.generation.prefill.per_passage import resolve
from rag_posfix.lab.training.data.make_data import Sample
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan


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
        answer = (*self._encoder.encode_answer(sample.answers[0]), self._end)
        prompt = self._assembler.assemble(
            sample.question, sample.documents(), order="original", max_new_tokens=len(answer)
        )  # fmt: skip
        missing = len(sample.passages) - len(prompt.documents)
        if missing:
            raise ConfigError(
                f"sample {sample.id}: {missing} of {len(sample.passages)} passages repeat or do not fit into the "
                f"context window of {self._assembler.context_window} tokens; make data with a lower --max-tokens"
            )
        return TrainingPrompt(prompt.layout, answer)


def end_of_answer(encoder: Tokenizer) -> int:
    """Return the token that ends an answer: what the chat template writes after one."""
    mark = "\ue000"
    chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": mark}]
    after = encoder.encode_template(encoder.render_chat(chat, open_answer=False).rpartition(mark)[2])
    for token in (*after[:1], *sorted(encoder.eos_ids)):
        if token in encoder.eos_ids:
            return token
    raise ConfigError("the tokenizer has no token that ends an answer; use a model whose tokenizer has an eos_token")


def answered_prompt(loaded: LoadedModel, layout: Layout, plan: Plan, answer: Sequence[int]) -> AnsweredPrompt:
    """Return a prompt and its answer as a plan has the model read them.

    Args:
        plan: The plan that a mitigation made for the prompt.
        answer: The tokens of the answer, that which ends it included.
    """
    if len(plan.rows) > 1 or plan.calibration is not None or plan.blend is not None or plan.draft is not None:
        raise PlanConflictError(
            f"a plan with {len(plan.rows)} rows, a calibration or a blend has no training forward; {TRAINABLE}"
        )
    row = resolve(plan.rows[0], layout, loaded.device)
    return AnsweredPrompt(row.layout.token_ids, row.positions, row.overrides, answer)


def answer_logits(loaded: LoadedModel, layout: Layout, plan: Plan, answer: Sequence[int]) -> Tensor:
    """Return the logits of each token of an answer under a plan, (len(answer), V).

    They equal those of inference under the same plan, up to rounding, and gradients flow through them.

    Args: those of ``answered_prompt``.
    """
    return forward_with_answers(loaded, [answered_prompt(loaded, layout, plan, answer)])[0]


def answer_loss(logits: Tensor, answer: Sequence[int]) -> Tensor:
    """Return the mean cross-entropy of the tokens of an answer.

    Shapes:
        logits: (len(answer), V). returns: ().
    """
    return cross_entropy(logits.float(), logits.new_tensor(answer, dtype=torch.long))


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the mean divergence of a student from its teacher on the tokens of an answer.

    Source: Pos2Distill (2025), section 3 (retrieval), https://arxiv.org/abs/2508.15709
    Formula: T^2 mean_t KL(softmax(teacher_t / T) || softmax(student_t / T)).

    Shapes:
        student, teacher: (tokens, V). returns: ().
    """
    targets = log_softmax(teacher.float() / temperature, dim=-1)
    log_probs = log_softmax(student.float() / temperature, dim=-1)
    return kl_div(log_probs, targets, reduction="batchmean", log_target=True) * temperature**2


def packs(loaded: LoadedModel, prompts: Sequence[AnsweredPrompt], most_tokens: int) -> list[list[int]]:
    """Return the numbers of the prompts of each pass; a prompt goes into the first pass that has room for it.

    Args:
        most_tokens: Most tokens of a pass. A prompt with more is a pass of its own, and so is one that cannot share a
            pass (``can_share_pass``); with 0 all are.
    """
    passes: list[list[int]] = []
    free_tokens: list[int] = []
    for number, prompt in enumerate(prompts):
        shares = can_share_pass(loaded, prompt)
        pass_index = next(
            (index for index, left in enumerate(free_tokens) if shares and prompt.n_tokens <= left), len(passes)
        )
        if pass_index == len(passes):
            passes.append([])
            free_tokens.append(most_tokens if shares else 0)
        passes[pass_index].append(number)
        free_tokens[pass_index] -= prompt.n_tokens
    return passes


def read_packed(
    loaded: LoadedModel, prompts: Sequence[AnsweredPrompt], most_tokens: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield the numbers of the prompts of a pass, and the logits of each of their answers, (len(answer), V).

    Args: those of ``packs``.
    """
    for numbers in packs(loaded, prompts, most_tokens):
        yield numbers, forward_with_answers(loaded, [prompts[number] for number in numbers])
