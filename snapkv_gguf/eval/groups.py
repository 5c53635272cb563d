"""Records of a run by method and budget, with their means, intervals and differences from the full cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from . import intervals
from .intervals import Interval
from .methods import FULL
from .schema import Record, Value
from .tasks import TASKS

if TYPE_CHECKING:
    from .report import Run

# rules to compare with, none to be recommended
_BASELINES = ("no-pooling", "shared", "first-recent", "random", "h2o")


@dataclass(frozen=True)
class Group:
    """Records of one method and budget.

    Attributes:
        run: Name.
        task: Name, or of several tasks what they have in common.
        fields: Values of the fields it was split by.
        method: Name.
        budget: As asked for.
        records: One per sample.
        full: Records of the full cache by sample, of the same run.
    """

    run: str
    task: str
    fields: tuple[Value | None, ...]
    method: str
    budget: int | float
    records: tuple[Record, ...]
    full: Mapping[str, Record] = field(repr=False)

    @property
    def n(self) -> int:
        return len(self.records)

    @property
    def prompt_tokens(self) -> float:
        """Mean."""
        return sum(record.prompt_tokens for record in self.records) / self.n

    @property
    def cells(self) -> float:
        """Mean."""
        return sum(record.cells for record in self.records) / self.n

    @property
    def ratio(self) -> float:
        """Prompt tokens by cells."""
        return self.prompt_tokens / self.cells if self.cells else math.nan

    def interval(self, name: str = "score") -> Interval | None:
        """Mean of a score, None where no sample has it."""
        found = _mean(tuple(record.scores[name] for record in self.records if name in record.scores), _is_share(name))
        # Student's t does not know that a divergence is not negative
        return replace(found, low=max(found.low, 0.0)) if found and name == "kl" else found

    def difference(self, name: str = "score") -> Interval | None:
        """Mean difference from the full cache on the same samples; None for the full cache and without pairs."""
        pairs = self._pairs(name)
        return _difference(pairs) if _is_share(name) else _mean(tuple(a - b for a, b in pairs), False)

    def quotient(self, name: str) -> Interval | None:
        """Geometric mean of the quotients by the full cache's value on the same samples."""
        return _exp([math.log(a / b) for a, b in self._pairs(name) if a > 0 and b > 0])

    def speedup(self) -> Interval | None:
        """Geometric mean of decode speed by the full cache's on the same samples."""
        own = [] if self.method == FULL else [r for r in self.records if r.sample in self.full]
        speeds = [(_speed(record), _speed(self.full[record.sample])) for record in own]
        return _exp([math.log(a / b) for a, b in speeds if a > 0 and b > 0])

    def pass_share(self) -> Interval | None:
        """Time of the pass by that of the prefill."""
        own = [] if self.method == FULL else [r for r in self.records if r.prefill_seconds > 0]
        return _mean(tuple(record.pass_ms / 1000 / record.prefill_seconds for record in own), False)

    def _pairs(self, name: str) -> tuple[tuple[float, float], ...]:
        if self.method == FULL:
            return ()
        pairs = (
            (record.scores.get(name, math.nan), self.full[record.sample].scores.get(name, math.nan))
            for record in self.records
            if record.sample in self.full
        )
        return tuple((a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b))


def _is_share(name: str) -> bool:
    return name not in ("kl", "perplexity")


def _speed(record: Record) -> float:
    return record.decode_tokens / record.decode_seconds if record.decode_seconds > 0 else 0.0


@functools.lru_cache(maxsize=100_000)
def _mean(values: tuple[float, ...], share: bool) -> Interval | None:
    """Mean of scores from 0 to 1 (share) or of any numbers: what is known of equal scores is not of equal numbers."""
    values = tuple(value for value in values if math.isfinite(value))
    if not values:
        return None
    if not share and math.isclose(min(values), max(values), rel_tol=1e-12):
        return Interval(values[0], math.nan, math.nan, len(values))
    return intervals.mean(values, scores=share)


@functools.lru_cache(maxsize=100_000)
def _difference(pairs: tuple[tuple[float, float], ...]) -> Interval | None:
    return intervals.paired_difference([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None


def _exp(logarithms: Sequence[float]) -> Interval | None:
    found = _mean(tuple(logarithms), False)
    return found and Interval(math.exp(found.estimate), math.exp(found.low), math.exp(found.high), found.n)


def axis(task: str, records: Iterable[Record]) -> str | None:
    """Field by which a task is split, besides the length."""
    if task in TASKS:
        return TASKS[task].axis
    return next((name for record in records for name in record.fields if name != "length"), None)


def is_retrieval(task: str) -> bool:
    """Whether the answer stands in the text."""
    return TASKS[task].retrieval if task in TASKS else True


def tasks(runs: Iterable[Run], score: str = "score") -> list[str]:
    """Tasks with a score of that name, in the order of the runs."""
    return list(dict.fromkeys(r.task for run in runs for r in run.records if score in r.scores))


def methods(run: Run) -> list[str]:
    """Methods of a run, the full cache first, then as configured."""
    found = list(dict.fromkeys(record.method for record in run.records))
    asked = [name for name in run.config.get("methods", []) if name in found]
    return list(dict.fromkeys([*(name for name in found if name == FULL), *asked, *found]))


def recommended(run: Run) -> str | None:
    """The method whose budget is to be chosen: ``snapkv``, or the first that is no baseline."""
    names = [name for name in methods(run) if name != FULL]
    named = [name for name in names if name == "snapkv"] or [name for name in names if name not in _BASELINES]
    return next(iter(named or names), None)


def groups(run: Run, names: Sequence[str], by: Sequence[str] = (), label: str | None = None) -> list[Group]:
    """Records of some tasks by method and budget.

    Args:
        names: Tasks, pooled.
        by: Fields to split by.
        label: What the tasks are called together, the first one's name if None.
    """
    records = [record for record in run.records if record.task in names]
    full = {record.sample: record for record in records if record.method == FULL}
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        fields = tuple(record.fields.get(name) for name in by)
        found.setdefault((fields, record.method, record.budget), []).append(record)
    order = methods(run)
    return [
        Group(run.name, label or names[0], fields, method, budget, tuple(found[fields, method, budget]), full)
        for fields, method, budget in sorted(
            found, key=lambda key: ([sortable(v) for v in key[0]], order.index(key[1]), budget_key(key[2]))
        )
    ]


def sortable(value: Value | None) -> tuple[bool, float, str]:
    """Numbers by size, then text."""
    return (False, value, "") if isinstance(value, (int, float)) else (True, 0.0, str(value))


def budget_key(budget: int | float) -> tuple[bool, float]:
    """To sort by: numbers of cells, then shares of the prompt."""
    return (isinstance(budget, float) and budget < 1, budget)


def budget_text(budget: int | float) -> str:
    """As asked for: cells, or percent of the prompt."""
    if isinstance(budget, float) and budget < 1:
        return f"{100 * budget:.3g} %" if budget else "all"
    return f"{budget:g}" if budget else "all"
