"""Confidence intervals, two-sided, 95 % unless another level is asked for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Values = NDArray[np.float64]

# numbers in memory at a time: resamples in a batch times values
_BATCH = 1_000_000

# values below which resamples, which do not leave their range, say too little
_FEW = 10

_ANY = (-math.inf, math.inf)


@dataclass(frozen=True)
class Interval:
    """An estimate from ``n`` samples with its interval, whose ends are nan where the samples say nothing about them."""

    estimate: float
    low: float
    high: float
    n: int


def interval_text(interval: Interval | None, sign: str = "", digits: int = 3) -> str:
    """``0.900 (0.745 to 0.966)``; nothing for None, the estimate alone where the ends are not known."""
    if interval is None:
        return ""
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return f"{interval.estimate:{sign}.{digits}f}"
    estimate, low, high = (f"{x:{sign}.{digits}f}" for x in (interval.estimate, interval.low, interval.high))
    return f"{estimate} ({low} to {high})"


def binomial(right: int, n: int, *, level: float = 0.95) -> Interval:
    """Of a share, by Wilson's score interval (1927).

    Raises:
        ValueError: No samples, or more right than there are.
    """
    _check(n, level)
    if not 0 <= right <= n:
        raise ValueError(f"right={right}: must be between 0 and n={n}")
    ends = stats.binomtest(right, n).proportion_ci(level, method="wilson")
    return Interval(right / n, float(ends.low), float(ends.high), n)


def mean(
    values: Sequence[float], *, scores: bool = True, level: float = 0.95, resamples: int = 4000, seed: int = 0
) -> Interval:
    """Of a mean: Wilson's interval of zeros and ones, else the bootstrap.

    Equal values from 0 to 1 are taken for scores. Their interval says how many others could have been missed: the
    share that Wilson allows, of none in n, times the distance to 0 and to 1. Other equal values get none.

    Args:
        values: One per sample, independent.
        scores: Whether values that all lie from 0 to 1 are scores, which cannot lie elsewhere.
        level: Share of intervals that hold the true mean.
        resamples: Of the bootstrap.
        seed: The same seed gives the same interval.

    Raises:
        ValueError: No values, or some that are not finite.
    """
    array = _array("values", values, level)
    if _binary(array):
        return binomial(int(array.sum()), len(array), level=level)
    if np.ptp(array) == 0:
        return _constant(array, level, (0, 1) if 0 <= array[0] <= 1 else None)
    return _bootstrap(
        array, level, resamples, seed, (0, 1) if scores and array.min() >= 0 and array.max() <= 1 else _ANY
    )


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, level: float = 0.95, resamples: int = 4000, seed: int = 0
) -> Interval:
    """Of the mean of ``a`` minus the mean of ``b``, two methods on the same samples.

    Zeros and ones: Tango's score interval (Statistics in Medicine 17, 1998, p. 891), which has a width even where no
    sample differs, z^2 / (n + z^2) to both sides. Other values: the bootstrap of the differences; equal differences
    of scores from 0 to 1 get Tango's width, equal differences of other values no interval.

    Args:
        a: One value per sample.
        b: Those of the same samples in the same order.
        level: Share of intervals that hold the true difference.
        resamples: Of the bootstrap.
        seed: The same seed gives the same interval.

    Raises:
        ValueError: No values, of different number, or some that are not finite.
    """
    first, second = _array("a", a, level), _array("b", b, level)
    if len(first) != len(second):
        raise ValueError(f"a has {len(first)} values, b {len(second)}: must be of the same samples, in the same order")
    differences = first - second
    scores = min(first.min(), second.min()) >= 0 and max(first.max(), second.max()) <= 1
    if np.ptp(differences) == 0:
        return _constant(differences, level, (-1, 1) if scores else None)
    if _binary(first) and _binary(second):
        return _tango(int((differences > 0).sum()), int((differences < 0).sum()), len(differences), level)
    return _bootstrap(differences, level, resamples, seed, (-1, 1) if scores else _ANY)


def _check(n: int, level: float) -> None:
    if n < 1:
        raise ValueError(f"n={n}: an interval needs at least one sample")
    if not 0 < level < 1:
        raise ValueError(f"level={level}: must be between 0 and 1 (both excluded), such as 0.95")


def _array(name: str, values: Sequence[float], level: float) -> Values:
    array = np.asarray(values, dtype=np.float64)
    _check(array.size, level)
    if not np.isfinite(array).all():
        bad = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{name}[{bad}]={array[bad]}: must be finite; leave out samples that have no value")
    return array


def _binary(values: Values) -> bool:
    return bool(np.isin(values, (0, 1)).all())


def _z(level: float) -> float:
    return float(stats.norm.isf((1 - level) / 2))


def _constant(values: Values, level: float, bounds: tuple[float, float] | None) -> Interval:
    """Of n equal values within bounds: as if the share of others that Wilson allows, of none in n, were at a bound.

    Of zeros or ones this is Wilson's interval itself, of differences of such it is Tango's.
    """
    n, value = len(values), float(values[0])
    if bounds is None:
        return Interval(value, math.nan, math.nan, n)
    lowest, highest = bounds
    others = _z(level) ** 2 / (n + _z(level) ** 2)
    return Interval(value, value - others * (value - lowest), value + others * (highest - value), n)


def _tango(more: int, less: int, n: int, level: float) -> Interval:
    """Of ``(more - less) / n``, where neither is ``n`` and not both are 0: the differences for which the score test
    is just passed."""
    z, estimate = _z(level), (more - less) / n

    def excess(difference: float) -> float:
        # share of "less" that is most likely, given the difference (Tango's equation for q21)
        linear = (2 * n - more + less) * difference - more - less
        constant = -less * difference * (1 - difference)
        share = (math.sqrt(max(linear**2 - 8 * n * constant, 0)) - linear) / (4 * n)
        variance = n * (2 * share + difference * (1 - difference))
        return (more - less - n * difference) ** 2 - z**2 * variance

    low, high = (float(optimize.brentq(excess, estimate, end)) for end in (-1, 1))
    return Interval(estimate, low, high, n)


def _bootstrap(values: Values, level: float, resamples: int, seed: int, within: tuple[float, float] = _ANY) -> Interval:
    """The expanded percentile interval: at a level raised by Student's t, without which few values get too short a one
    (Hesterberg, The American Statistician 69, 2015, p. 371). Of very few, Student's t itself."""
    n = len(values)
    if n < _FEW:
        half = float(stats.t.isf((1 - level) / 2, n - 1) * values.std(ddof=1) / math.sqrt(n))
        mean = float(values.mean())
        return Interval(mean, max(within[0], mean - half), min(within[1], mean + half), n)
    tail = float(stats.norm.sf(math.sqrt(n / (n - 1)) * stats.t.isf((1 - level) / 2, n - 1)))
    # of values that hardly differ it warns about the standard error, which is not used
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        ends = stats.bootstrap(
            (values,),
            np.mean,
            method="percentile",
            confidence_level=min(1 - 2 * tail, 1 - 1e-12),
            n_resamples=resamples,
            batch=max(1, _BATCH // n),
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return Interval(float(values.mean()), float(ends.low), float(ends.high), n)
