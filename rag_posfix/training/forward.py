"""The training forward: a plan in, a loss out. Masks and positions are those of the plan, as in inference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from rag_posfix.errors import PlanConflictError
from rag_posfix.generation.model.one_pass import AnsweredPrompt, forward_with_answers
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.rows import resolve
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan


def answered_prompt(loaded: LoadedModel, layout: Layout, plan: Plan, answer: Sequence[int]) -> AnsweredPrompt:
    """Return a prompt and its answer as a plan has the model read them.

    Args:
        plan: The plan that a mitigation made for the prompt.
        answer: The tokens of the answer, that which ends it included.
    """
    if len(plan.rows) > 1 or plan.calibration is not None or plan.blend is not None or plan.draft is not None:
        raise PlanConflictError(
            f"a plan with {len(plan.rows)} rows, a calibration or a blend has no training forward; train under none, "
            "parallel_windows, set_prompting or parallel_encoding"
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
