"""Tables of runs, as one structure that the report shows and the documentation takes as Markdown.

Every table states the mean number of prompt tokens and the compression ratio: prompt tokens by KV cells after the pass,
both summed over the samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .ablations import ablations, kinds
from .advice import MARGIN, choose
from .groups import Group, axis, budget_key, budget_text, groups, methods, sortable, tasks
from .intervals import Interval, interval_text
from .methods import FULL
from .schema import Value

if TYPE_CHECKING:
    from .report import Run


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
    noun = "task" if len(names) == 1 else "tasks"
    title = f"Mean score of {len(names)} {noun}" + (", KL of running text" if kl else "")
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
    lengths = sorted({length for length, _ in cells}, key=sortable)
    depths = sorted({depth for _, depth in cells}, key=sortable)
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
