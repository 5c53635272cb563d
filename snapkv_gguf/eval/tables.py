"""Tables of runs, as one structure that the report shows and the documentation takes as Markdown.

Every table states the mean number of prompt tokens and the compression ratio: prompt tokens by KV cells after the pass,
both summed over the samples.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..config import MAX_CELLS, SnapKV
from . import intervals
from . import methods as known_methods
from .intervals import Interval
from .methods import FULL
from .schema import Record, Value
from .tasks import TASKS

if TYPE_CHECKING:
    from .report import Run

# how much lower than the full cache's a mean score may be
MARGIN = 0.05

# rules to compare with, none to be recommended
_BASELINES = ("no-pooling", "shared", "first-recent", "random", "h2o")

# a full cache below it fails the task, with it or without
_LOW = 0.5

# samples of a task below which a recommendation says so
_FEW = 10


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Attributes:
        title: What is in it.
        header: Names of the columns.
        rows: As wide as the header.
        n_labels: Columns on the left that name the row; the others are numbers.
        note: How to read it.
        shades: Of heat maps, [row][column] from 0 to 1, None where nothing is shaded; the size of ``rows``.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_labels: int = 1
    note: str = ""
    shades: tuple[tuple[float | None, ...], ...] | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.title!r}: a row of {len(row)} cells under {len(self.header)} columns")

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        rule = ["---"] * self.n_labels + ["---:"] * (len(self.header) - self.n_labels)
        lines = [[_escape(cell) for cell in row] for row in (self.header, *self.rows)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:])) + "\n"


def _escape(text: str) -> str:
    text = re.sub(r"[\\`*\[\]<>&|~]", r"\\\g<0>", " ".join(text.split()))
    # within a word it is no emphasis
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


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
            found, key=lambda key: ([_sortable(v) for v in key[0]], order.index(key[1]), budget_key(key[2]))
        )
    ]


def _sortable(value: Value | None) -> tuple[bool, float, str]:
    """Numbers by size, then text."""
    return (False, value, "") if isinstance(value, (int, float)) else (True, 0.0, str(value))


def budget_key(budget: int | float) -> tuple[bool, float]:
    """To sort by: numbers of cells, then shares of the prompt."""
    return (isinstance(budget, float) and budget < 1, budget)


# --- text of a cell


def budget_text(budget: int | float) -> str:
    """As asked for: cells, or percent of the prompt."""
    if isinstance(budget, float) and budget < 1:
        return f"{100 * budget:.3g} %" if budget else "all"
    return f"{budget:g}" if budget else "all"


def interval_text(interval: Interval | None, sign: str = "", digits: int = 3) -> str:
    """``0.900 (0.745 to 0.966)``; nothing for None, the estimate alone where the ends are not known."""
    if interval is None:
        return ""
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return f"{interval.estimate:{sign}.{digits}f}"
    estimate, low, high = (f"{x:{sign}.{digits}f}" for x in (interval.estimate, interval.low, interval.high))
    return f"{estimate} ({low} to {high})"


def _difference_text(group: Group, name: str = "score") -> str:
    found = group.difference(name)
    text = interval_text(found, "+")
    return text if found is None or found.n == group.n else f"{text}, {found.n} pairs"


def _value_text(value: Value | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, (int, float)) else value


def _size(group: Group) -> tuple[str, ...]:
    return (str(group.n), f"{group.prompt_tokens:.0f}", f"{group.cells:.0f}", f"{group.ratio:.2f}")


_SIZE = ("n", "prompt tokens", "cells", "compression")

_ABOUT_INTERVALS = "In parentheses: 95 % interval. Difference: from the full cache on the same samples, paired."


# --- tables


def _build(
    runs: Sequence[Run],
    found: Iterable[Group],
    title: str,
    labels: Sequence[tuple[str, Callable[[Group], str]]],
    columns: Sequence[tuple[str, Callable[[Group], str]]],
    note: str,
) -> Table:
    """One line per group: labels, method, budget, columns, sizes; columns that are empty everywhere are left out."""
    kept = list(found)
    labels = [
        *([("run", lambda group: group.run)] if len(runs) > 1 else []),
        *labels,
        ("method", lambda group: group.method),
        ("budget", lambda group: budget_text(group.budget)),
    ]
    columns = [(name, text) for name, text in columns if any(text(group) for group in kept)]
    return Table(
        title,
        (*(name for name, _ in labels), *(name for name, _ in columns), *_SIZE),
        tuple((*(text(g) for _, text in labels), *(text(g) for _, text in columns), *_size(g)) for g in kept),
        n_labels=len(labels),
        note=note,
    )


_SCORES = (("score", lambda group: interval_text(group.interval())), ("difference", _difference_text))


def overview(runs: Sequence[Run]) -> Table:
    """Mean score of each task by method and budget, all lengths and axes pooled."""
    found = [group for task in tasks(runs) for run in runs for group in groups(run, [task]) if group.interval()]
    note = f"All lengths pooled. {_ABOUT_INTERVALS}"
    return _build(runs, found, "Score by task", [("task", lambda group: group.task)], _SCORES, note)


def _task_means(run: Run, names: Sequence[str]) -> dict[tuple[str, int | float], dict[str, float]]:
    """Mean score of each task, by method and budget, in the order of the columns of a table."""
    found: dict[tuple[str, int | float], dict[str, float]] = {}
    for task in names:
        for group in groups(run, [task]):
            mean = _estimate(group)
            if mean is not None:
                found.setdefault((group.method, group.budget), {})[task] = mean
    order = methods(run)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), budget_key(item[0][1]))))


def _mean_of_tasks(means: Mapping[str, float], names: Sequence[str]) -> str:
    """Each task with the same weight; nothing where one is missing."""
    return f"{sum(means.values()) / len(names):.2f}" if len(means) == len(names) else ""


def by_method(run: Run) -> Table:
    """Mean score of each task, a column for each method and budget; at the end all tasks, each with the same weight."""
    names = tasks([run])
    found = _task_means(run, names)
    several = len({budget for _, budget in found}) > 2
    rows = []
    for task in names:
        n = max(group.n for group in groups(run, [task]))
        rows.append((task, str(n), *(f"{means[task]:.2f}" if task in means else "" for means in found.values())))
    if len(names) > 1:
        rows.append(("mean of tasks", "", *(_mean_of_tasks(means, names) for means in found.values())))
    pooled = {(group.method, group.budget): group for group in groups(run, names)} if names else {}
    for i, name in enumerate(_SIZE[1:], start=1):
        rows.append((name, "", *(_size(pooled[column])[i] for column in found)))
    header = [f"{method}, {budget_text(budget)}" if several and budget else method for method, budget in found]
    return Table("Score by task and method", ("task", "n", *header), tuple(rows))


def by_budget(run: Run) -> Table:
    """Mean score of all tasks, each with the same weight, and divergence in running text: a column for each budget."""
    names = tasks([run])
    means = {key: _mean_of_tasks(found, names) for key, found in _task_means(run, names).items()}
    kl = {
        (group.method, group.budget): _number_text(group.interval("kl"))
        for task in tasks([run], "kl")
        for group in groups(run, [task])
    }
    every = groups(run, list(dict.fromkeys(record.task for record in run.records)))
    budgets = sorted({group.budget for group in every if group.method != FULL}, key=budget_key)
    columns = [(text, budget) for text in (means, kl) if text for budget in budgets]
    rows = []
    for method in methods(run):
        # the full cache has no budget, it is the same in every column
        cells = [text.get((method, 0 if method == FULL else budget), "") for text, budget in columns]
        rows.append((method, *cells))
    sized = {group.budget: group for group in every if group.method != FULL}
    for i, name in enumerate(_SIZE[1:], start=1):
        rows.append((name, *(_size(sized[budget])[i] for _, budget in columns)))
    title = f"Mean score of {_count(len(names), 'task')}" + (", KL of running text" if kl else "")
    header = [f"{'KL' if text is kl else 'score'}, {budget_text(budget)}" for text, budget in columns]
    return Table(title, ("method", *header), tuple(rows))


def _number_text(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.estimate:.3f}"


def scores(runs: Sequence[Run], task: str) -> Table:
    """Mean score of one task by length, axis, method and budget."""
    split = axis(task, (record for run in runs for record in run.records if record.task == task))
    by = ["length", *([split] if split else [])]
    labels = [(name, _field_text(i)) for i, name in enumerate(by)]
    found = [group for run in runs for group in groups(run, [task], by) if group.interval()]
    return _build(runs, found, f"Score: {task}", labels, _SCORES, _ABOUT_INTERVALS)


def _field_text(i: int) -> Callable[[Group], str]:
    return lambda group: _value_text(group.fields[i])


def running_text(runs: Sequence[Run]) -> Table | None:
    """Divergence, equal tokens and perplexity of running text; None if there is none."""
    found = [
        group
        for task in tasks(runs, "kl")
        for run in runs
        for group in groups(run, [task], ["length"])
        if group.method != FULL
    ]
    if not found:
        return None
    columns = (
        ("KL, nats per token", lambda group: interval_text(group.interval("kl"), digits=4)),
        ("same top token", lambda group: interval_text(group.interval("same_top"))),
        ("perplexity by full cache's", lambda group: interval_text(group.quotient("perplexity"))),
    )
    labels = [("task", lambda group: group.task), ("length", _field_text(0))]
    note = (
        "The next tokens of a text after a pass, against the full cache: mean Kullback-Leibler divergence, share of "
        "tokens with the same most likely next one, geometric mean of the quotients of perplexity. "
        "In parentheses: 95 % interval."
    )
    return _build(runs, found, "Running text", labels, columns, note)


def questions(runs: Sequence[Run]) -> Table | None:
    """Scores of the first and the following questions about one document; None if none follow."""
    names = sorted({name for run in runs for r in run.records for name in r.scores if re.fullmatch(r"score_\d+", name)})
    found = [
        group
        for task in dict.fromkeys(task for name in names for task in tasks(runs, name))
        for run in runs
        for group in groups(run, [task], ["length"])
    ]
    if not found:
        return None
    columns: list[tuple[str, Callable[[Group], str]]] = [("question 1", _score_text("score"))]
    for name in sorted(names, key=lambda name: int(name[6:])):
        columns.append((f"question {name[6:]}", _score_text(name)))
        columns.append((f"question {name[6:]}, read again", _score_text(f"reread_{name[6:]}")))
    labels = [("task", lambda group: group.task), ("length", _field_text(0))]
    note = (
        "The pass sees the first question only. The following ones are asked of the compacted cache, and once more "
        "with the document read again for each. In parentheses: 95 % interval."
    )
    return _build(runs, found, "Several questions about one document", labels, columns, note)


def _score_text(name: str) -> Callable[[Group], str]:
    return lambda group: interval_text(group.interval(name))


def heat_maps(runs: Sequence[Run], task: str, names: Sequence[str] | None = None) -> list[Table]:
    """Mean score by length and depth, a table per run, method and budget; below it the sizes.

    Args:
        names: Methods, all if None.
    """
    maps = []
    for run in runs:
        found: dict[tuple[str, int | float], dict[tuple[Value | None, ...], Group]] = {}
        for group in groups(run, [task], ["length", "depth"]):
            if group.interval() and (names is None or group.method in names):
                found.setdefault((group.method, group.budget), {})[group.fields] = group
        pooled = {(group.method, group.budget, group.fields[0]): group for group in groups(run, [task], ["length"])}
        for (method, budget), cells in found.items():
            maps.append(_heat_map(run.name if len(runs) > 1 else "", task, method, budget, cells, pooled))
    return maps


def by_depth(run: Run, task: str = "needle") -> Table:
    """Mean score by length and depth, a column for each method and budget."""
    found: dict[tuple[str, int | float], dict[tuple[Value | None, ...], Group]] = {}
    for group in groups(run, [task], ["length", "depth"]):
        found.setdefault((group.method, group.budget), {})[group.fields] = group
    pooled = {(group.method, group.budget): group for group in groups(run, [task])}
    rows = []
    for length, depth in dict.fromkeys(fields for cells in found.values() for fields in cells):
        of = [cells.get((length, depth)) for cells in found.values()]
        n = max(group.n for group in of if group)
        means = ("" if mean is None else f"{mean:.2f}" for mean in map(_estimate, of))
        rows.append((_value_text(length), _percent(depth), str(n), *means))
    for i, name in enumerate(_SIZE[1:], start=1):
        rows.append((name, "", "", *(_size(pooled[column])[i] for column in found)))
    header = (f"{method}, {budget_text(budget)}" if budget else method for method, budget in found)
    return Table(f"Score by depth: {task}", ("length", "depth", "n", *header), tuple(rows), n_labels=2)


def _heat_map(
    run: str,
    task: str,
    method: str,
    budget: int | float,
    cells: Mapping[tuple[Value | None, ...], Group],
    pooled: Mapping[tuple[str, int | float, Value | None], Group],
) -> Table:
    lengths = sorted({length for length, _ in cells}, key=_sortable)
    depths = sorted({depth for _, depth in cells}, key=_sortable)
    rows: list[tuple[str, ...]] = []
    shades: list[tuple[float | None, ...]] = []
    for depth in depths:
        means = [_estimate(cells.get((length, depth))) for length in lengths]
        rows.append((_percent(depth), *("" if mean is None else f"{mean:.2f}" for mean in means)))
        shades.append((None, *means))
    sizes = [pooled[method, budget, length] for length in lengths]
    for name, texts in zip(_SIZE, zip(*map(_size, sizes), strict=True), strict=True):
        rows.append((name, *texts))
        shades.append((None,) * (len(lengths) + 1))
    title = ", ".join(text for text in (run, task, method, "" if method == FULL else budget_text(budget)) if text)
    return Table(title, ("depth", *map(_value_text, lengths)), tuple(rows), shades=tuple(shades))


def _estimate(group: Group | None) -> float | None:
    interval = group.interval() if group else None
    return interval.estimate if interval else None


def _percent(value: Value | None) -> str:
    return f"{100 * value:.0f} %" if isinstance(value, (int, float)) else _value_text(value)


def speed(runs: Sequence[Run]) -> Table:
    """Costs as they came up with the samples, by length, method and budget."""
    found = []
    for run in runs:
        names = list(dict.fromkeys(record.task for record in run.records))
        if names:
            found += [g for g in groups(run, names, ["length"], "all") if g.speedup() or g.pass_share()]
    columns: list[tuple[str, Callable[[Group], str]]] = [
        ("decode speed by full cache's", lambda group: interval_text(group.speedup(), digits=2)),
        ("pass, % of prefill", lambda group: _percent_text(group.pass_share())),
        ("pass, ms", lambda group: f"{sum(r.pass_ms for r in group.records) / group.n:.1f}"),
    ]
    for part in ("score_ms", "select_ms", "move_ms"):
        columns.append((f"{part[:-3]}, ms", _part_text(part)))
    note = (
        "Of the samples of all tasks: geometric mean of the quotients of decode speed on the same sample, mean share "
        "of the pass. Short answers are decoded in few steps: the measurement of its own, where there is one, is more "
        "exact. In parentheses: 95 % interval."
    )
    return _build(runs, found, "Cost in the samples", [("length", _field_text(0))], columns, note)


def _percent_text(share: Interval | None) -> str:
    if share is None:
        return ""
    return interval_text(Interval(100 * share.estimate, 100 * share.low, 100 * share.high, share.n), digits=2)


def _part_text(part: str) -> Callable[[Group], str]:
    def text(group: Group) -> str:
        values = [record.parts_ms[part] for record in group.records if part in record.parts_ms]
        return f"{sum(values) / len(values):.1f}" if values else ""

    return text


def cost(runs: Sequence[Run]) -> Table | None:
    """The measurements of cost.json, fields of :class:`snapkv_gguf.bench.Depth`; None if no run has them."""
    columns: tuple[tuple[str, str, float, int], ...] = (
        # header, field, factor, digits
        ("decode speed by full cache's", "speedup", 1, 2),
        ("by a short prompt's", "of_short", 1, 2),
        ("capture, % of prefill", "capture_cost", 100, 2),
        ("pass, % of prefill", "pass_share", 100, 2),
        ("pass, ms", "pass_ms", 1, 1),
        ("score, ms", "score_ms", 1, 1),
        ("select, ms", "select_ms", 1, 1),
        ("move, ms", "move_ms", 1, 1),
        ("decode full, tokens/s", "decode_full", 1, 1),
        ("decode compacted, tokens/s", "decode_compacted", 1, 1),
        ("K and V before, MiB", "bytes_before", 2**-20, 1),
        ("K and V after, MiB", "bytes_after", 2**-20, 1),
        ("prompt tokens", "prompt_tokens", 1, 0),
        ("cells", "cells_after", 1, 0),
    )
    several = len(runs) > 1
    rows = []
    for run in runs:
        for entry in run.cost:
            values = [
                f"{factor * entry[name]:.{digits}f}" if name in entry else "" for _, name, factor, digits in columns
            ]
            ratio = entry["prompt_tokens"] / entry["cells_after"]
            labels = (str(entry["method"]), budget_text(entry["budget"]))
            rows.append((*([run.name] if several else []), *labels, *values, f"{ratio:.2f}"))
    if not rows:
        return None
    header = (*(["run"] if several else []), "method", "budget", *(column[0] for column in columns), "compression")
    note = (
        "The full and the compacted cache took turns, batch by batch and block by block; one repetition. "
        "Ratios carry over, speeds do not."
    )
    return Table("Cost, measured on its own", header, tuple(rows), n_labels=3 if several else 2, note=note)


# --- what budget to choose


@dataclass(frozen=True)
class Choice:
    """The smallest budgets of a method that do for a task.

    Attributes:
        shown: From which on the whole interval of the difference is above the margin at every larger budget too.
        likely: The same of the estimate alone.
        full: Mean score of the full cache.
        groups: By rising number of cells.
    """

    run: str
    task: str
    method: str
    shown: Group | None
    likely: Group | None
    full: Interval | None
    groups: tuple[Group, ...] = field(repr=False)

    @property
    def full_is_low(self) -> bool:
        return self.full is not None and self.full.estimate < _LOW


def choose(run: Run, method: str, margin: float = MARGIN) -> list[Choice]:
    """What budgets do for each task, all lengths pooled."""
    found = []
    for task in tasks([run]):
        every = groups(run, [task])
        own = sorted((g for g in every if g.method == method and g.difference()), key=lambda group: group.cells)
        if not own:
            continue
        full = next((group.interval() for group in every if group.method == FULL), None)
        shown = _from(own, lambda difference: difference.low >= -margin)
        likely = _from(own, lambda difference: difference.estimate >= -margin)
        found.append(Choice(run.name, task, method, shown, likely, full, tuple(own)))
    return found


def _from(rising: Sequence[Group], does: Callable[[Interval], bool]) -> Group | None:
    best = None
    for group in reversed(rising):
        difference = group.difference()
        if difference is None or not does(difference):
            break
        best = group
    return best


def choices(runs: Sequence[Run], names: Callable[[Run], Iterable[str]], margin: float = MARGIN) -> Table:
    """The smallest budget for each task and method.

    Args:
        names: Methods of a run.
    """
    several = len(runs) > 1
    rows = []
    for run in runs:
        for method in names(run):
            for choice in choose(run, method, margin):
                # the sizes are those of the budget that is named, the largest one if none is
                group = choice.shown or choice.likely or choice.groups[-1]
                cells = (
                    budget_text(choice.shown.budget) if choice.shown else "none",
                    budget_text(choice.likely.budget) if choice.likely else "none",
                    interval_text(choice.full),
                    budget_text(group.budget),
                    _difference_text(group),
                    *_size(group),
                )
                rows.append((*([run.name] if several else []), choice.task, method, *cells))
    header = ("task", "method", "shown from", "by estimate from", "full cache", "at budget", "difference", *_SIZE)
    note = (
        f"Shown: the 95 % interval of the paired difference from the full cache stays above -{margin:g} at this budget "
        "and all larger ones measured. By estimate: the estimate does, whatever its interval. Each interval holds on "
        "its own: of twenty, one is expected to miss. The columns on the right are of the budget under 'at budget'."
    )
    title = f"Smallest budget that loses no more than {margin:g}"
    return Table(title, (*(["run"] if several else []), *header), tuple(rows), n_labels=3 if several else 2, note=note)


def headline(run: Run, margin: float = MARGIN) -> list[str]:
    """Sentences: what budget to choose, and how sure that is."""
    method = recommended(run)
    found = choose(run, method, margin) if method else []
    if not method or not found:
        return [
            "No task was answered with both the full cache and a compacted one, so there is no budget to recommend."
        ]
    low = [choice.task for choice in found if choice.full_is_low]
    found = [choice for choice in found if not choice.full_is_low]
    if not found:
        return [f"The full cache itself scores below {_LOW:g} on {_join(low)}, so there is no budget to recommend."]
    sentences = _advice(method, found, margin)
    few = [choice.task for choice in found if choice.groups[0].n < _FEW]
    if few:
        sentences.append(f"With fewer than {_FEW} samples of {_join(few)}, this is a first look.")
    if low:
        sentences.append(f"Left out: {_join(low)}, where the full cache itself scores below {_LOW:g}.")
    named = max((choice.likely or choice.groups[-1] for choice in found), key=lambda group: group.cells)
    return sentences + _beyond_scores(run, method, named.budget)


def _beyond_scores(run: Run, method: str, budget: int | float) -> list[str]:
    """What else happens at a budget: to later questions and to running text."""
    sentences = []
    at = [r for r in run.records if r.method == method and r.budget == budget]
    again = [r.scores[name] for r in at for name in r.scores if name.startswith("reread_")]
    later = [r.scores[name] for r in at for name in r.scores if name.startswith("score_")]
    if again and later:
        sentences.append(
            f"Later questions about the same document, at {budget_text(budget)}: mean score "
            f"{sum(later) / len(later):.2f}, and {sum(again) / len(again):.2f} with the document read again."
        )
    for task in tasks([run], "kl"):
        for group in groups(run, [task]):
            kl, same = group.interval("kl"), group.interval("same_top")
            if (group.method, group.budget) == (method, budget) and kl and same:
                sentences.append(
                    f"Running text, at {budget_text(budget)}: {interval_text(kl)} nats per token from the full cache, "
                    f"the same most likely token in {100 * same.estimate:.0f} % of the cases."
                )
    return sentences


def _advice(method: str, found: Sequence[Choice], margin: float) -> list[str]:
    n = _count(len(found), "task")
    where = "the only task" if len(found) == 1 else f"each of the {n}"
    shown = [choice.shown for choice in found if choice.shown]
    likely = [choice.likely for choice in found if choice.likely]
    if len(shown) == len(found):
        return [
            f"{method} with a budget of {_largest(shown)} loses no more than {margin:g} of the score on {where}.",
            "The 95 % intervals of the difference from the full cache stay above that, here and at all larger budgets.",
        ]
    if len(likely) == len(found):
        unsure = [choice.task for choice in found if not choice.shown]
        return [
            f"By estimate, {method} with a budget of {_largest(likely)} loses no more than {margin:g} of the score "
            f"on {where}.",
            f"This is not shown: for {_join(unsure)} the 95 % interval reaches further down. More samples would tell.",
        ]
    lost = [choice for choice in found if not choice.likely]
    sentences = [
        f"No measured budget of {method} does for all {n}: at {_largest([c.groups[-1] for c in lost])}, the largest, "
        f"it loses more than {margin:g} of the score on {_join([choice.task for choice in lost])}."
    ]
    if likely:
        sentences.append(
            f"On {_join([choice.task for choice in found if choice.likely])}, {_largest(likely)} does by estimate; "
            f"the intervals show it for {len(shown)} of {len(likely)}."
        )
    return sentences


def _largest(groups: Sequence[Group]) -> str:
    """The budget of the group with the most cells."""
    return _budget_phrase(max(groups, key=lambda group: group.cells))


def _budget_phrase(group: Group) -> str:
    text = budget_text(group.budget)
    text = f"{text} of the prompt" if text.endswith("%") else f"{text} cells"
    return f"{text} (compression {group.ratio:.1f})"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# --- ablations

DIMENSIONS = ("window", "kernel", "pool", "recent")

Setting = tuple[int, int, str, int | float]  # in the order of DIMENSIONS


@dataclass(frozen=True)
class Ablation:
    """Settings that differ from the base in one dimension, the base among them.

    Attributes:
        dimension: One of ``DIMENSIONS``, or the kernel with another pooling than the base's.
        base: Method name of the base.
        settings: (value, method name) by rising value.
    """

    dimension: str
    base: str
    settings: tuple[tuple[int | float | str, str], ...]


def parse_setting(method: str) -> Setting | None:
    """Window, kernel, pool and recent part; None for other rules than SnapKV's."""
    try:
        config = known_methods.parse(method, MAX_CELLS)
    except ValueError:  # of another version
        return None
    return _setting(config) if config is not None and config.rule == "snapkv" else None


def _setting(config: SnapKV) -> Setting:
    return config.window, config.kernel, config.pool, config.recent


def ablations(run: Run) -> list[Ablation]:
    """What is varied one at a time around the default preset, or around the setting with the most neighbours."""
    settings: dict[Setting, str] = {}
    for name in methods(run):
        parsed = parse_setting(name)
        if parsed is not None:
            settings.setdefault(parsed, name)
    if len(settings) < 2:
        return []
    default = _setting(SnapKV())
    base = (
        default if default in settings else max(settings, key=lambda one: sum(_differ(one, s) == 1 for s in settings))
    )
    pools = dict.fromkeys([base[2], *sorted(pool for _, _, pool, _ in settings)])
    around = [(name, i, base) for i, name in enumerate(DIMENSIONS)]
    around[2:2] = [(f"kernel, {pool}", 1, (*base[:2], pool, base[3])) for pool in pools if pool != base[2]]
    found = []
    for dimension, i, centre in around:
        varied = [
            (one[i], name) for one, name in settings.items() if one[:i] + one[i + 1 :] == centre[:i] + centre[i + 1 :]
        ]
        if len(varied) > 1:
            found.append(
                Ablation(dimension, settings[base], tuple(sorted(varied, key=lambda each: _sortable(each[0]))))
            )
    return found


def _differ(a: Setting, b: Setting) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def kinds(run: Run) -> list[tuple[str, str, list[str]]]:
    """Halves of the ablations: name, score and tasks."""
    found = tasks([run])
    halves = [
        ("retrieval tasks", "score", [task for task in found if is_retrieval(task)]),
        ("other tasks", "score", [task for task in found if not is_retrieval(task)]),
        ("running text, KL", "kl", tasks([run], "kl")),
    ]
    return [half for half in halves if half[2]]


def ablation(runs: Sequence[Run]) -> Table | None:
    """Every setting that is varied, by half and budget; None if there is none."""
    found = []
    for run in runs:
        varied = {name for each in ablations(run) for _, name in each.settings}
        for label, score, names in kinds(run):
            found += [
                (score, group)
                for group in groups(run, names, label=label)
                if group.method in varied and group.interval(score)
            ]
    if not found:
        return None
    score_of = {id(group): score for score, group in found}
    columns: tuple[tuple[str, Callable[[Group], str]], ...] = (
        ("score, or KL", lambda group: interval_text(group.interval(score_of[id(group)]))),
        ("difference", lambda group: _difference_text(group, score_of[id(group)])),
    )
    note = f"All samples of the tasks pooled, each with the same weight. {_ABOUT_INTERVALS}"
    return _build(runs, [g for _, g in found], "Ablations", [("tasks", lambda group: group.task)], columns, note)


def all_tables(runs: Sequence[Run]) -> list[Table]:
    """Every table of the report but the heat maps."""
    found: list[Table | None] = [
        choices(runs, lambda run: [name for name in methods(run) if name != FULL]),
        overview(runs),
        *(scores(runs, task) for task in tasks(runs)),
        ablation(runs),
        questions(runs),
        running_text(runs),
        speed(runs),
        cost(runs),
    ]
    return [table for table in found if table is not None and table.rows]
