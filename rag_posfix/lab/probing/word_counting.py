"""Probe of counting a word in the last of two sentences, which needs attention to sentences and not to words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch

from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column, whiskers
from rag_posfix.evaluation.record import Progress, counted
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe, estimate, shown
from rag_posfix.lab.probing.subject import LanguageModel, Subject, language_model
from rag_posfix.parameters import Integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SENTENCES = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.",
    "Once or twice she had peeped into the book her sister was reading, but it had no pictures in it.",
    "There was nothing so very remarkable in that, nor did Alice think it so very much out of the way to hear the "
    "Rabbit say to itself that it would be late.",
    "When the Rabbit actually took a watch out of its pocket, and looked at it, and then hurried on, Alice started to "
    "her feet.",
    "In another moment down went Alice after it, never once considering how in the world she was to get out again.",
    "Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look "
    "about her and to wonder what was going to happen next.",
    "First, she tried to look down and make out what she was coming to, but it was too dark to see anything.",
    "Then she looked at the sides of the well, and noticed that they were filled with cupboards and book-shelves.",
    "Here and there she saw maps and pictures hung upon pegs, and the cupboards were on the sides.",
    "She took down a jar from one of the shelves as she passed, and to her great disappointment the jar was empty.",
    "She did not like to drop the jar for fear of killing somebody, so she put the jar into one of the cupboards as "
    "she fell past it.",
)
"""Sentences after Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I, in places shortened."""

MOST = 9
KINDS = ("right", "count of both sentences", "count of the first sentence", "another number")


@dataclass(frozen=True, slots=True)
class CountingPrompt:
    """A question for the count of a word in the last of two sentences.

    Attributes:
        text: Both sentences and the question.
        word: The word.
        last: How often the last sentence has it.
        first: How often the first sentence has it.
    """

    text: str
    word: str
    last: int
    first: int


def counting_prompts() -> list[CountingPrompt]:
    """Return a prompt for each pair of neighbouring sentences and each word of the first of them.

    The first sentence has every word that is asked for, so that a count of both sentences is wrong. Words that the
    last sentence does not have are subsampled to the number of prompts of the most frequent other count.
    """
    prompts = [prompt for first, last in pairwise(SENTENCES) for prompt in _pair(first, last)]
    absent = [prompt for prompt in prompts if not prompt.last]
    size = max(Counter(prompt.last for prompt in prompts if prompt.last).values())
    sampled = {absent[index * len(absent) // size] for index in range(size)}
    return [prompt for prompt in prompts if prompt.last or prompt in sampled]


def _pair(first: str, last: str) -> Iterator[CountingPrompt]:
    """Yield a prompt for each word of the first of two sentences."""
    first_words, last_words = (re.findall(r"[a-z]+", text.lower()) for text in (first, last))
    for word in dict.fromkeys(first_words):
        if len(word) > 1 and first_words.count(word) + last_words.count(word) <= MOST:
            question = f'How many times is the word "{word}" in the last sentence? Answer with a number.'
            yield CountingPrompt(
                f"{first} {last}\n\n{question}", word, last_words.count(word), first_words.count(word)
            )


@PROBES.register("word-counting")
@dataclass(frozen=True)
class WordCounting(MeasuredProbe):
    """Count a word in the last of two sentences; does the first leak?

    The answer is the most likely of the numbers 0 to 9 as the next token. It is wrong in a telling way if it is the
    count of both sentences, or that of the first.

    Source: Golovneva et al. (2024), Contextual Position Encoding, section 3, https://arxiv.org/abs/2405.18719
    Formula: answer = argmax over n in 0..9 of log p(n | prompt).
    Differs from the paper: many short questions on eleven sentences instead of one long text, and numbers are scored
        and not generated.

    Args:
        limit: Most prompts; they are taken evenly from all.
    """

    name: ClassVar[str] = "word-counting"
    caption: ClassVar[str] = (
        "Which count the answers equal; do not conclude that wrong answers come from attention alone, as a model may "
        "fail to follow the question."
    )
    reads_text: ClassVar[bool] = True
    small: ClassVar[Mapping[str, int]] = {"limit": 40}

    limit: Annotated[int, Integer(1)] = 80

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Ask every prompt; see ``Probe.run``."""
        model = language_model(subject, self.name)
        all_prompts = counting_prompts()
        count = min(self.limit, len(all_prompts))
        prompts = [all_prompts[index * len(all_prompts) // count] for index in range(count)]
        with progress("asking") as report:
            rows = [_row(model, prompt) for prompt in counted(prompts, report)]
        shares = {kind: estimate(torch.tensor([float(row["kind"] == kind) for row in rows])) for kind in KINDS}
        answers = [row["answer"] for row in rows]
        constant = max(range(MOST + 1), key=lambda number: sum(row["last"] == number for row in rows))
        return Found(
            {
                "prompts": len(rows),
                "shares": shares,
                "most frequent answer": max(set(answers), key=answers.count),
                "share of the most frequent answer": max(map(answers.count, answers)) / len(answers),
                "right with one constant answer": sum(row["last"] == constant for row in rows) / len(rows),
                "log-probability of the right number": sum(row["log_probability"] for row in rows) / len(rows),
            },
            rows,
        )

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return bars of what the answers are."""
        summary = head["summary"]
        figure, (axes,) = new_column(1)
        measured = list(summary["shares"].values())
        values = [share["value"] for share in measured]
        axes.barh(
            list(summary["shares"]),
            values,
            xerr=whiskers(measured),
            color=OTHER_COLORS[1],
            ecolor="#222222",
            capsize=3,
        )
        axes.axvline(
            summary["right with one constant answer"], color="#000000", linestyle=":", label="one constant answer"
        )
        axes.invert_yaxis()
        x = f"share of {summary['prompts']} answers, 95 % interval"
        finish_axes(axes, f"{head['model']}\nword in the last sentence", x, "")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per kind of answer."""
        rows = [(kind, shown(share)) for kind, share in head["summary"]["shares"].items()]
        return [("answer", f"share, n = {head['summary']['prompts']}"), *rows]


def _row(model: LanguageModel, prompt: CountingPrompt) -> dict[str, Any]:
    """Return the answer to a prompt, and the kind of count that it equals."""
    encoder = model.engine.encoder
    prompt_ids = encoder.encode_template(encoder.render_chat([{"role": "user", "content": prompt.text}]))
    numbers = [encoder.encode_text(f"Answer: {number}") for number in range(MOST + 1)]
    before = numbers[0][:-1]  # a number is one token in every tokenizer that splits digits
    logits = model.read(torch.tensor([[*prompt_ids, *before]]))[0, -1].cpu()
    scores = logits.log_softmax(dim=-1)[torch.tensor([ids[-1] for ids in numbers])]
    answer = int(scores.argmax())
    counts = {"right": prompt.last, KINDS[1]: prompt.first + prompt.last, KINDS[2]: prompt.first}
    return {
        "word": prompt.word,
        "last": prompt.last,
        "first": prompt.first,
        "answer": answer,
        "kind": next((kind for kind, count in counts.items() if count == answer), KINDS[3]),
        "log_probability": float(scores[prompt.last]),
    }
