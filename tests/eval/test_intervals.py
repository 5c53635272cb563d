from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from snapkv_gguf.eval.intervals import Interval, binomial, mean, paired_difference

Draw = Callable[[np.random.Generator], np.ndarray]


def ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


def width(interval: Interval) -> float:
    return interval.high - interval.low


def covered(truth: float, interval: Callable[[np.random.Generator, int], Interval], repetitions: int = 1000) -> float:
    rng = np.random.default_rng(7)
    intervals = [interval(rng, seed) for seed in range(repetitions)]
    return sum(i.low <= truth <= i.high for i in intervals) / repetitions


def pairs(both: int, first: int, second: int, neither: int) -> tuple[list[int], list[int]]:
    """Right by both methods, by one only, by none."""
    return (
        [1] * both + [1] * first + [0] * second + [0] * neither,
        [1] * both + [0] * first + [1] * second + [0] * neither,
    )


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17, 1998, p. 857, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (0, 1, 0, 0.7935),  # z^2 / (1 + z^2)
    ],
)
def test_wilson(right: int, n: int, low: float, high: float) -> None:
    interval = binomial(right, n)
    assert (interval.estimate, interval.n) == (right / n, n)
    assert ends(interval) == pytest.approx((low, high), abs=5e-5)


def test_zeros_and_ones_get_wilsons() -> None:
    assert mean([1] * 8 + [0] * 2) == binomial(8, 10)
    assert mean([1.0] * 10, level=0.9) == binomial(10, 10, level=0.9)
    assert ends(mean([0, 0, 0])) == pytest.approx((0, 0.56150), abs=5e-6)  # 3.84146 / 6.84146


def test_equal_scores_get_a_width() -> None:
    # share of others 3.84146 / 6.84146 = 0.56150, half way to each end
    assert ends(mean([0.5] * 3)) == pytest.approx((0.5 - 0.28075, 0.5 + 0.28075), abs=5e-6)
    # one sample: 3.84146 / 4.84146 = 0.79345
    assert ends(mean([0.25])) == pytest.approx((0.25 * 0.20655, 0.25 + 0.75 * 0.79345), abs=5e-6)
    # zeros and ones are their limit
    assert ends(mean([1 - 1e-12] * 20)) == pytest.approx(ends(binomial(20, 20)))


def test_equal_values_beyond_scores_get_none() -> None:
    for interval in (mean([2.5] * 5), mean([2.5]), paired_difference([3, 4], [2, 3])):
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
    assert mean([2.5]).estimate == 2.5


def test_bootstrap_of_many_is_the_normal_interval() -> None:
    values = np.random.default_rng(3).normal(5, 2, 2000)
    error = 1.96 * values.std(ddof=1) / math.sqrt(2000)
    interval = mean(values.tolist())
    assert interval.estimate == pytest.approx(values.mean())
    assert ends(interval) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.1 * error)


def test_same_seed_same_interval() -> None:
    values = [0.1, 0.4, 0.35, 0.8, 0.2, 0.5, 0.9, 0.3, 0.6, 0.7]
    assert mean(values, seed=1) == mean(values, seed=1)
    assert mean(values, seed=1) != mean(values, seed=2)


def test_bootstrap_stays_within_the_values() -> None:
    for values in ([0.2, 0.8] * 5, [0.0, 0.3, 1.0] * 4, [1.0] * 19 + [0.9]):
        interval = mean(values)
        assert min(values) <= interval.low <= interval.estimate <= interval.high <= max(values)
        assert width(interval) > 0


@pytest.mark.parametrize(
    ("table", "level", "low", "high"),
    [
        # airway reactivity before and after a transplantation: Fagerland, Lydersen and Laake, Statistics in
        # Medicine 33, 2014, p. 2850
        ((1, 1, 7, 12), 0.95, -0.517, -0.026),
        # by scoreci.mp of the R package PropCIs, 25 and 28 of 618
        ((300, 28, 25, 265), 0.9, -0.0148, 0.0247),
    ],
)
def test_tango(table: tuple[int, int, int, int], level: float, low: float, high: float) -> None:
    interval = paired_difference(*pairs(*table), level=level)
    assert interval.estimate == pytest.approx((table[1] - table[2]) / sum(table))
    assert ends(interval) == pytest.approx((low, high), abs=5e-5 if level == 0.9 else 5e-4)
    # with the methods exchanged it is mirrored
    other = paired_difference(*reversed(pairs(*table)), level=level)
    assert ends(other) == pytest.approx((-interval.high, -interval.low))


def test_no_difference_is_not_certain() -> None:
    # z^2 / (n + z^2) = 3.84146 / 23.84146
    for a in ([1] * 20, [0] * 20, [1, 0] * 10, [0.5, 0.25] * 10):
        assert ends(paired_difference(a, a)) == pytest.approx((-0.16113, 0.16113), abs=5e-6)
    # Tango's limit with one difference is near that without
    one = paired_difference(*pairs(199, 1, 0, 0))
    assert one.low < 0 < one.high
    assert ends(one) == pytest.approx(ends(paired_difference([1] * 200, [1] * 200)), abs=0.015)


def test_every_sample_differs() -> None:
    # (n - z^2) / (n + z^2) = 16.15854 / 23.84146, the root of Tango's equation
    assert ends(paired_difference([1] * 20, [0] * 20)) == pytest.approx((0.67775, 1), abs=5e-6)
    assert ends(paired_difference([0] * 20, [1] * 20)) == pytest.approx((-1, -0.67775), abs=5e-6)
    # all but one
    almost = paired_difference(*pairs(0, 19, 0, 1))
    assert almost.low < 0.95 < almost.high < 1


def test_pairs_matter() -> None:
    rng = np.random.default_rng(5)
    a = rng.uniform(0, 1, 60)
    b = np.clip(a - rng.uniform(0, 0.1, 60), 0, 1)
    interval = paired_difference(a.tolist(), b.tolist())
    # the difference is 0.05, its deviation 0.1 / sqrt(12); each mean alone is uncertain by 0.07
    assert interval.estimate == pytest.approx((a - b).mean())
    assert 0.035 < interval.low < interval.estimate < interval.high < 0.065


@pytest.mark.parametrize(
    "interval",
    [
        lambda n: binomial(n // 4, n),
        lambda n: mean([0.1, 0.2, 0.6, 0.9] * (n // 4)),
        lambda n: mean([0.3] * n),
        lambda n: paired_difference([1, 1, 0, 0] * (n // 4), [0, 1, 0, 0] * (n // 4)),
        lambda n: paired_difference([0.1, 0.9, 0.3, 0.3] * (n // 4), [0.2, 0.3, 0.4, 0.1] * (n // 4)),
        lambda n: paired_difference([0, 1] * (n // 2), [0, 1] * (n // 2)),
    ],
)
def test_more_samples_narrower(interval: Callable[[int], Interval]) -> None:
    widths = [width(interval(n)) for n in (8, 16, 40, 100, 400)]
    assert widths == sorted(widths, reverse=True)
    # as the root of n, or faster where all are equal
    assert widths[-1] < 1.2 * widths[-2] / 2
    assert [interval(n).n for n in (8, 400)] == [8, 400]


def test_higher_level_wider() -> None:
    a, b = [0.1, 0.5, 0.9, 0.3, 0.7] * 4, [0.2, 0.1, 0.8, 0.3, 0.9] * 4
    for interval in (
        lambda level: binomial(3, 10, level=level),
        lambda level: mean(a, level=level),
        lambda level: mean([0.5] * 5, level=level),
        lambda level: paired_difference(a, b, level=level),
        lambda level: paired_difference(*pairs(5, 3, 1, 4), level=level),
    ):
        assert width(interval(0.8)) < width(interval(0.95)) < width(interval(0.99))


@pytest.mark.parametrize(
    ("truth", "draw"),
    [
        (0.5, lambda rng: rng.uniform(0, 1, 25)),
        (2 / 7, lambda rng: rng.beta(2, 5, 25)),
        (1.0, lambda rng: rng.exponential(1, 40)),  # skewed, as KL divergences are
        (0.0, lambda rng: rng.normal(0, 1, 8)),  # few
        (0.25, lambda rng: rng.choice([0, 0.25, 0.5], 30)),
        (0.7, lambda rng: rng.binomial(1, 0.7, 30).astype(float)),
        (0.9, lambda rng: rng.binomial(1, 0.9, 50).astype(float)),
    ],
)
def test_coverage_of_means(truth: float, draw: Draw) -> None:
    share = covered(truth, lambda rng, seed: mean(draw(rng).tolist(), resamples=1000, seed=seed))
    assert 0.92 <= share <= 0.98


def test_coverage_at_another_level() -> None:
    share = covered(0.5, lambda rng, seed: mean(rng.uniform(0, 1, 25).tolist(), level=0.8, resamples=1000, seed=seed))
    assert 0.76 <= share <= 0.84


@pytest.mark.parametrize(("first", "second"), [(0.2, 0.1), (0.1, 0.1), (0.3, 0.02)])
def test_coverage_of_paired_zeros_and_ones(first: float, second: float) -> None:
    def interval(rng: np.random.Generator, seed: int) -> Interval:
        kind = rng.choice(3, 50, p=[first, second, 1 - first - second])
        same = rng.integers(0, 2, 50)
        a, b = (
            np.where(kind == 0, 1, np.where(kind == 1, 0, same)),
            np.where(kind == 0, 0, np.where(kind == 1, 1, same)),
        )
        return paired_difference(a.tolist(), b.tolist())

    assert 0.92 <= covered(first - second, interval) <= 0.98


def test_coverage_of_paired_scores() -> None:
    def interval(rng: np.random.Generator, seed: int) -> Interval:
        a = rng.uniform(0.2, 1, 30)
        b = a - rng.choice([0, 0, 0.2], 30)  # a third of the samples lose 0.2
        return paired_difference(a.tolist(), b.tolist(), resamples=1000, seed=seed)

    assert 0.92 <= covered(0.2 / 3, interval) <= 0.98


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: binomial(0, 0), "n=0: an interval needs at least one sample"),
        (lambda: binomial(11, 10), "right=11: must be between 0 and n=10"),
        (lambda: binomial(-1, 10), "right=-1"),
        (lambda: mean([]), "n=0"),
        (lambda: mean([0.5], level=95), "level=95: must be between 0 and 1"),
        (lambda: mean([0.5, math.nan]), r"values\[1\]=nan: must be finite"),
        (lambda: paired_difference([1, 0], [1]), "a has 2 values, b 1"),
        (lambda: paired_difference([1, 0], [1, math.inf]), r"b\[1\]=inf"),
    ],
)
def test_refused(call: Callable[[], Interval], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_few_values_of_any_size(n: int) -> None:
    """Such as divergences: a bootstrap would not leave their range, and hold the truth half of the time for two."""
    rng = np.random.default_rng(n)
    found = [mean(list(rng.normal(7, 2, n)), scores=False) for _ in range(1000)]
    assert 0.93 <= np.mean([one.low <= 7 <= one.high for one in found]) <= 0.97
    # of 1, 2 and 3: 2 -/+ 4.303 / sqrt(3)
    known = mean([1.0, 2.0, 3.0], scores=False)
    assert (known.low, known.high) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-3)
    # scores stay scores
    assert (mean([0.0, 0.9, 1.0]).low, mean([0.0, 0.9, 1.0]).high) == (0, 1)
