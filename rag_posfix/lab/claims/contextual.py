"""Text 3: what positions that follow the content do better than positions that count tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import process_time
from typing import Any

import torch

from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.evaluation.figures import draw_numbers
from rag_posfix.evaluation.record import ExperimentRecord, Progress, counted
from rag_posfix.lab.claims.base import Claim, Condition, Evidence, by_probe, exact, trained_decoder
from rag_posfix.lab.contextual_maps import COUNTERS, above_others, gates_by_kind
from rag_posfix.lab.encodings import Decoder, DecoderShape, Encoding, create_encoding
from rag_posfix.lab.experiment import RunConfig, TrainingSettings, draw_laboratory, run_laboratory
from rag_posfix.lab.probing.base import estimate
from rag_posfix.lab.probing.score_advantage import ScoreAdvantage
from rag_posfix.lab.probing.word_counting import WordCounting
from rag_posfix.lab.tasks import TASKS


def compare_encodings(
    task: str, tested: Callable[[Mapping[str, Any]], Encoding], *encodings: str
) -> Callable[..., Evidence]:
    """Return a measurement that trains decoders with encodings, and compares a tested one with each, seed by seed.

    Its numbers are the measure of each encoding and split, and that of the tested one less that of each other.

    Args:
        tested: Returns the encoding for the sizes of the task; ``operations`` are the steps of its sequences.
    """

    def measure(
        _: None, progress: Progress, *, seeds: int, steps: int, examples: int, width: int, layers: int, **sizes: Any
    ) -> Evidence:
        settings = TrainingSettings(
            steps, evaluate_every=steps, patience=0, examples=examples, width=width, layers=layers
        )
        chosen = [*map(_parsed, encodings), tested(sizes)]
        of_task = {"steps" if name == "operations" else name: value for name, value in sizes.items()}
        record = run_laboratory(
            TASKS.create(MethodSpec(task, of_task)), chosen, seeds=seeds, settings=settings, progress=progress
        )
        names = {each: each.name if [e.name for e in chosen].count(each.name) == 1 else each.label for each in chosen}
        values = {
            (names[encoding], split): torch.tensor(
                record.summary["encodings"][encoding.label]["splits"][split]["values"]
            )
            for encoding in chosen
            for split in record.summary["splits"]
        }
        numbers = {f"{name}, {split}": estimate(measured) for (name, split), measured in values.items()}
        for (name, split), measured in values.items():
            if name != (best := names[chosen[-1]]):
                numbers[f"{best} less {name}, {split}"] = estimate(values[best, split] - measured)
        return Evidence(numbers, partial(draw_laboratory, record.head))

    return measure


def _parsed(text: str) -> Encoding:
    spec = parse_method(text, "encoding", "p_max=16")
    return create_encoding(spec.name, spec.parameters)


def cope(_: Mapping[str, Any]) -> Encoding:
    """Return CoPE with few positions."""
    return create_encoding("cope", {"p_max": 16})


def attention_costs(_: None, progress: Progress, *, tokens: int, batch: int, width: int, repeats: int) -> Evidence:
    """Measure a training step of a layer with RoPE, and with CoPE of few and of many positions.

    Time is the processor time of the forward and the backward pass on this machine; memory the bytes that the forward
    pass keeps for the backward pass, which do not depend on the machine.
    """
    shape = DecoderShape(vocabulary=64, layers=1, width=width)
    ids = torch.randint(64, (batch, tokens), generator=torch.Generator().manual_seed(0))
    encodings = {ROPE: ("rope", {}), FEW: ("cope", {"p_max": 8}), MANY: ("cope", {"p_max": tokens})}
    decoders = {name: Decoder(create_encoding(*spec), shape) for name, spec in encodings.items()}
    kept = {name: _kept_bytes(decoder, ids) for name, decoder in decoders.items()}
    times: dict[str, list[float]] = {name: [] for name in decoders}
    with progress("training steps") as report:
        for number in counted(range(repeats + 1), report):
            for name, decoder in decoders.items():
                begun = process_time()
                decoder(ids)[0].float().logsumexp(dim=-1).sum().backward()
                if number:  # the first loads what the others use
                    times[name].append(process_time() - begun)
    spent = {name: torch.tensor(values) for name, values in times.items()}
    numbers = {}
    for over, under in ((FEW, ROPE), (MANY, FEW)):
        numbers[f"time, {over} over {under}"] = estimate(spent[over] / spent[under])
        numbers[f"memory, {over} over {under}"] = exact(kept[over] / kept[under])
    title = f"a layer of {width} channels, {batch} x {tokens} tokens"
    return Evidence(numbers, partial(draw_numbers, numbers, title, "ratio"))


def _kept_bytes(decoder: Decoder, ids: torch.Tensor) -> int:
    """Return the bytes of the different tensors that a forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = decoder(ids)[0]
    del output
    return sum(kept.values())


ROPE, FEW, MANY = "RoPE", "CoPE with 8 positions", "CoPE with a position per token"
SOFTMAX = "cope:gate=softmax:p_max=16"


def lab_sizes(**sizes: Any) -> dict[str, Any]:
    """Return the sizes of a short run of ``compare_encodings``."""
    return {"seeds": 3, "examples": 256, "width": 64, "layers": 2, **sizes}


def bound_agreement(record: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """Return the share of heads of which the bound says rightly whether they lose the word in the tested range."""
    longest = record.summary["distances"][-1] - 1

    def lost(distance: float | None) -> bool:
        return distance is not None and distance <= longest

    agree = [
        float(lost(row["predicted"]) == lost(row["measured"])) for row in record.summary["by_head"] if row["D"] > 0
    ]
    median = record.summary["median_measured_over_predicted"]
    return {
        "heads that the bound predicts": estimate(torch.tensor(agree)),
        "heads that prefer the word": exact(len(agree) / record.summary["heads"]),
        **({} if median is None else {"median of measured over predicted": exact(median)}),
    }


def counting_numbers(record: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """Return the share of right answers, and the same less that of the best constant answer."""
    constant = record.summary["right with one constant answer"]
    correct = torch.tensor([float(row["kind"] == "right") for row in record.rows])
    return {
        "right": estimate(correct),
        "one constant answer": exact(constant),
        "right less constant": estimate(correct - constant),
    }


def gates(_: None, progress: Progress, *, steps: int, p_max: int, length: int, texts: int) -> Evidence:
    """Train CoPE on text, choose the heads that count sentences and paragraphs, and test them on other texts."""
    settings = TrainingSettings(steps, evaluate_every=steps, examples=2)
    encoding = create_encoding("cope", {"p_max": p_max})
    config = RunConfig(TASKS.create(MethodSpec("language", {"length": length})), encoding, settings, seed=0)
    decoder = trained_decoder(config, progress)
    fitted = gates_by_kind(decoder, texts, length)
    tested = [gates_by_kind(decoder, 1, length, seed) for seed in range(texts, 2 * texts)]
    numbers = {}
    for name, kind in COUNTERS.items():
        best = int(above_others(fitted, kind).flatten().argmax())
        numbers[f"gate on {name} less that on others"] = estimate(
            torch.stack([above_others(each, kind).flatten()[best] for each in tested])
        )
    return Evidence(numbers, partial(draw_numbers, numbers, f"{texts} other texts", "difference of mean gates"))


def better(others: Sequence[str], split: str) -> tuple[Condition, ...]:
    """Return the conditions that CoPE has a lower measure than each other encoding."""
    return tuple(Condition(f"cope less {name}, {split}", below=0) for name in others)


CONTEXTUAL = (
    Claim(
        3, "word-counting",
        "Language models do not count a word in the last sentence: attention cannot address sentences.",
        by_probe(WordCounting, counting_numbers), (Condition("right less constant", below=0.1),), {"limit": 40},
        {"limit": 200}, see="What the answers are the count of.",
        beware="A model can fail for other reasons, such as not following the question.",
    ),
    Claim(
        3, "bound",
        "A word is lost beyond the distance D / d at which its score advantage is used up by positions.",
        by_probe(ScoreAdvantage, bound_agreement), (Condition("heads that the bound predicts", above=0.8),),
        {"strings": 8, "farthest": 32}, {"strings": 64, "farthest": 512},
        see="Scores by distance in one head, and predicted and measured crossings.",
        beware="The share says whether a head loses the word in the tested range, not at which distance.",
    ),
    Claim(
        3, "flip-flop",
        "With fewer writes than in training, CoPE makes fewer errors in flip-flop than RoPE and learned positions.",
        compare_encodings("flip_flop", cope, "learned", "rope"), better(("learned", "rope"), "sparse"),
        lab_sizes(steps=400, pairs=8, ignored=0.4),
        {"steps": 10_000, "width": 256, "layers": 4, "pairs": 256, "ignored": 0.8}, reads_model=False,
        see="The error in percent by encoding and split, each seed a mark.",
        beware="Small decoders and few seeds; compare only if the error in the distribution is near 0.",
    ),
    Claim(
        3, "selective-copy",
        "With another number of blanks than in training, CoPE copies and RoPE and learned positions fail.",
        compare_encodings("selective_copy", cope, "learned", "rope"),
        (*better(("learned", "rope"), "sparse"), Condition("cope, sparse", below=20)),
        lab_sizes(steps=800, tokens=8, blanks=8),
        {"steps": 10_000, "width": 256, "layers": 4, "tokens": 256, "blanks": 256}, reads_model=False,
        see="The error in percent by encoding and split, each seed a mark.",
        beware="Compare only if the error in the distribution is near 0.",
    ),
    Claim(
        3, "language",
        "CoPE has a lower perplexity than RoPE and relative positions, more so in contexts five times as long.",
        compare_encodings("language", cope, "rope", "shaw"),
        (*better(("rope", "shaw"), "in"), *better(("rope", "shaw"), "x5")),
        lab_sizes(seeds=2, steps=400, length=48, examples=64),
        {"seeds": 3, "steps": 10_000, "width": 256, "layers": 4, "length": 512}, reads_model=False,
        see="The perplexity by encoding and length, each seed a mark.",
        beware="Generated text of 45 words, not Wikitext; both ends of an interval over two seeds are the seeds.",
    ),
    Claim(
        3, "gates", "Gates of CoPE open on the ends of sentences and of paragraphs: heads count them.", gates,
        tuple(Condition(f"gate on {name} less that on others", above=0.1) for name in COUNTERS),
        {"steps": 400, "p_max": 8, "length": 48, "texts": 16},
        {"steps": 10_000, "p_max": 8, "length": 128, "texts": 64}, reads_model=False,
        see="How far the mean gate on an end is above that on the next kind of word, in heads chosen on other "
        "texts.", beware="A difference of 1 is a perfect counter; one of 0.1 is a tendency.",
    ),
    Claim(
        3, "counting", "CoPE counts operations on variables better than learned and relative positions.",
        compare_encodings("counting", cope, "learned", "shaw"), better(("learned", "shaw"), "sparse"),
        lab_sizes(steps=2000, operations=24), {"steps": 10_000, "operations": 512}, reads_model=False,
        see="The error in percent by encoding and split, each seed a mark.",
        beware="Compare only if the error in the distribution is near 0; sparse has twice the steps that do nothing.",
    ),
    Claim(
        3, "cost", "Gates and positions of CoPE cost time and memory, and a small p_max limits both.", attention_costs,
        (
            Condition(f"time, {FEW} over {ROPE}", above=1), Condition(f"memory, {FEW} over {ROPE}", above=1),
            Condition(f"time, {MANY} over {FEW}", above=1), Condition(f"memory, {MANY} over {FEW}", above=1),
        ),
        {"tokens": 512, "batch": 4, "width": 64, "repeats": 8}, {"tokens": 1024, "width": 256, "repeats": 16},
        reads_model=False, see="Time and memory of a training step, over those of what it is compared with.",
        beware="Times are of this machine; memory is what the forward pass keeps, and CoPE computes its scores again.",
    ),
    Claim(
        3, "sigmoid-gates", "Gates that do not compete (sigmoid) count, and softmax gates do not.",
        compare_encodings("selective_copy", cope, SOFTMAX),
        (Condition(f"cope:p_max=16 less {SOFTMAX}, sparse", below=0),),
        lab_sizes(steps=800, tokens=8, blanks=8),
        {"steps": 10_000, "width": 256, "layers": 4, "tokens": 256, "blanks": 256}, reads_model=False,
        see="The error in percent by kind of gates and split, each seed a mark.",
        beware="Softmax gates sum to 1, so that their positions never exceed 1: they cannot count by construction.",
    ),
)  # fmt: skip
