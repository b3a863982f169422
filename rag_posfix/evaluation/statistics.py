"""Statistics of paired observations: bootstrap intervals, paired tests, and corrections for multiple tests.

Observations are paired by question or query: a question is resampled or flipped as a whole.

Compares answers with the accepted ones, as SQuAD and Lost in the Middle do.
"""

from __future__ import annotations

import itertools
import math
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_posfix.errors import missing_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_EXACT_UP_TO = 16
_RESAMPLES = 10_000
_AT_ONCE = 2**20  # numbers in memory
_TIE = 1e-12  # sums of the same differences in another order differ by less


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def mean_if_known(values: Sequence[float | None]) -> float | None:
    """Return the arithmetic mean, or None if a value was not measured."""
    measured = [value for value in values if value is not None]
    return mean(measured) if len(measured) == len(values) else None


def overconfidence(confidences: Sequence[float | None], accuracies: Sequence[float]) -> float | None:
    """Return mean confidence minus mean accuracy; None if a confidence was not measured.

    Above 0 a model is surer of its answers than it is right. Source: Guo et al. (2017), On Calibration of Modern
    Neural Networks, section 2, https://arxiv.org/abs/1706.04599: the gap between confidence and accuracy, here of all
    answers in one bin. The confidence of a text is the geometric mean of the probabilities of its tokens.
    """
    confidence = mean_if_known(confidences)
    return None if confidence is None else confidence - mean(accuracies)


def bootstrap_interval(
    rows: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[float]], float],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic of column means, for example ``min`` (the worst position).

    ``rows`` has one row per question and one column per condition; whole rows are resampled, so that conditions stay
    paired. Cost: questions x conditions x resamples.
    """
    import numpy as np

    table = np.asarray(rows, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(table), size=(resamples, len(table)))
    values = [statistic(list(table[draw].mean(axis=0))) for draw in draws]
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference between two runs by one measure.

    Attributes:
        difference: Mean of a minus mean of b.
        ci95: 95 % interval of the difference, queries resampled.
        p_randomisation: Two-sided p of the paired randomisation test.
        p_t: Two-sided p of the paired t-test.
        p_holm: ``p_randomisation`` after Holm's correction over all comparisons by this measure.
        better: Number of queries on which a is higher.
        worse: Number of queries on which b is higher.
    """

    measure: str
    a: str
    b: str
    difference: float
    ci95: tuple[float, float]
    p_randomisation: float
    p_t: float
    p_holm: float
    better: int
    worse: int


def compare_all(measure: str, values: Mapping[str, Sequence[float]], seed: int = 0) -> list[Comparison]:
    """Compare each run with each one before it; every comparison draws the same resamples.

    Args:
        values: Run -> one value per query, the queries in the same order in every run.
    """
    pairs = [(a, b) for b, a in itertools.combinations(values, 2)]
    paired = [[x - y for x, y in zip(values[a], values[b], strict=True)] for a, b in pairs]
    chances = [randomisation_p(differences, seed=seed) for differences in paired]
    return [
        Comparison(
            measure=measure, a=a, b=b, difference=math.fsum(differences) / len(differences),
            ci95=difference_interval(differences, seed=seed), p_randomisation=chance, p_t=t_test_p(differences),
            p_holm=adjusted, better=sum(x > 0 for x in differences), worse=sum(x < 0 for x in differences),
        )
        for (a, b), differences, chance, adjusted in zip(pairs, paired, chances, holm(chances), strict=True)
    ]  # fmt: skip


def randomisation_p(differences: Sequence[float], *, resamples: int = _RESAMPLES, seed: int = 0) -> float:
    """Return the two-sided p of the paired randomisation test (Fisher's, by flipping signs).

    Under the hypothesis that both runs are the same, each difference has either sign with equal chance. p is the share
    of sign patterns whose mean is at least as far from 0 as the one found. With up to 16 differences other than 0 all
    patterns are counted and p is exact; above, ``resamples`` are drawn and p = (1 + as far) / (1 + drawn), which is
    never 0. Source: Smucker, Allan, Carterette (2007), A comparison of statistical significance tests for information
    retrieval evaluation, section 2.1.
    """
    import numpy as np

    values = np.asarray([x for x in differences if x != 0.0])
    if values.size == 0:
        return 1.0

    def count_as_far(bits: NDArray[np.integer]) -> int:
        """Count the patterns of 0 (keep) and 1 (flip) whose sum is as far from 0 as the sum of all."""
        sums = np.abs((1.0 - 2.0 * bits) @ values)
        return int((sums >= abs(values.sum()) - _TIE * float(np.abs(values).sum())).sum())

    if values.size <= _EXACT_UP_TO:
        # All patterns, the sign of the first fixed: the other half mirrors it, and the test is two-sided.
        patterns = np.arange(2 ** (values.size - 1))[:, None] >> np.arange(values.size)[None, :]
        return count_as_far(patterns & 1) / len(patterns)
    generator = np.random.default_rng(seed)
    at_once = max(1, _AT_ONCE // values.size)
    as_far = 0
    for start in range(0, resamples, at_once):
        size = (min(at_once, resamples - start), values.size)
        as_far += count_as_far(generator.integers(0, 2, size=size, dtype=np.int8))
    return (1 + as_far) / (1 + resamples)


def t_test_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of the paired t-test; 1 for fewer than two queries or no difference at all."""
    count = len(differences)
    average = math.fsum(differences) / count if count else 0.0
    if count < 2 or average == 0.0:
        return 1.0
    variance = math.fsum((x - average) ** 2 for x in differences) / (count - 1)
    if variance <= (_TIE * average) ** 2:  # the same difference everywhere
        return 0.0
    try:
        from scipy.stats import t
    except ImportError as error:
        raise missing_extra("scipy", "eval") from error
    return float(2 * t.sf(abs(average) / math.sqrt(variance / count), count - 1))


def difference_interval(
    differences: Sequence[float], groups: Sequence[str] | None = None, *, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean, queries resampled.

    Args:
        groups: The query of each difference, where a query has several; they are resampled together.
    """
    import numpy as np

    values = np.asarray(differences, dtype=float)
    labels = np.arange(values.size) if groups is None else np.unique(groups, return_inverse=True)[1]
    sums, counts = np.bincount(labels, weights=values), np.bincount(labels)
    generator = np.random.default_rng(seed)
    means: list[float] = []
    at_once = max(1, _AT_ONCE // sums.size)
    for start in range(0, resamples, at_once):
        drawn = generator.integers(0, sums.size, size=(min(at_once, resamples - start), sums.size))
        means += (sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)).tolist()
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    try:
        from scipy.stats import binomtest
    except ImportError as error:
        raise missing_extra("scipy", "eval") from error
    interval = binomtest(count, total).proportion_ci(0.95, "wilson")
    return float(interval.low), float(interval.high)


def mcnemar_p(method_scores: Sequence[float], baseline_scores: Sequence[float]) -> float:
    """Return the exact two-sided p-value of McNemar's test for paired outcomes of 0 and 1.

    Formula: of the n pairs that differ, k favour one side; p = min(1, 2 sum_(i <= min(k, n - k)) C(n, i) / 2^n).
    """
    pairs = list(zip(method_scores, baseline_scores, strict=True))
    better = sum(a > b for a, b in pairs)
    worse = sum(a < b for a, b in pairs)
    n = better + worse
    tail: int = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction: the chance of one false alarm or more in the whole family.

    With m values sorted upwards, the i-th (from 0) becomes the largest of (m - j) p_j over j <= i, at most 1. Source:
    Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    result = [1.0] * len(chances)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        highest = max(highest, min(1.0, (len(chances) - rank) * chances[index]))
        result[index] = highest
    return result


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_SPACES = re.compile(
    "[\u0e01-\u0ecd\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\uff10-\uff19\uff21-\uff3a\uff41-\uff5a\uff66-\uff9f]"  # full-width digits and letters, half-width Kana
)
_SURPLUS_SPACE = re.compile(f"(?<={_NO_SPACES.pattern}) | (?={_NO_SPACES.pattern})")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str, unspaced: bool | None = None) -> str:
    """Return ``text`` in lower case without punctuation, articles and surplus spaces, as SQuAD compares answers.

    A text of a script without spaces (Chinese, Japanese, Thai, ...) is compared in Unicode's NFKC form, without the
    punctuation of any script, and without the spaces next to characters of such a script.

    Args:
        unspaced: Whether the text is compared so; None for a text with characters of such a script.
    """
    unspaced = is_unspaced(text) if unspaced is None else unspaced
    if unspaced:
        text = unicodedata.normalize("NFKC", text)
        text = "".join(" " if unicodedata.category(character).startswith("P") else character for character in text)
    words = " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
    return _SURPLUS_SPACE.sub("", words) if unspaced else words


def is_unspaced(text: str) -> bool:
    """Return whether a text has characters of a script without spaces, or full-width ones as next to such a script."""
    return _NO_SPACES.search(text) is not None


def first_line(text: str) -> str:
    """Return the text before the first line break, as Lost in the Middle scores it."""
    return text.split("\n", 1)[0].strip()


def best_subspan_em(answer: str, accepted: Sequence[str]) -> float:
    """Return 1.0 if ``answer`` contains any accepted answer after normalisation, else 0.0.

    Source: Liu et al. (2024), Lost in the Middle, section 2.2, https://arxiv.org/abs/2307.03172. Their scripts cut the
    answer at the first line break before this; use ``first_line`` for that.
    Differs: an accepted answer, such as ``3.5``, is also compared as unspaced where the answer is in such a script.
    """
    return float(any(_holds(answer, candidate) for candidate in accepted))


def _holds(answer: str, accepted: str) -> bool:
    unspaced = is_unspaced(answer) or is_unspaced(accepted)
    text = normalize(answer, unspaced)
    # Its own form too: 1,000 is also 1000 next to Chinese characters.
    return any(form and form in text for form in (normalize(accepted), normalize(accepted, unspaced)))
