"""Figures of the report: small panels as SVG that take their colours from the page."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import ablations, groups
from .groups import Group
from .intervals import Interval
from .methods import FULL, NAMES

if TYPE_CHECKING:
    from .report import Run

# series colours on the page, --series-0 and so on
N_COLOURS = 8
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))

# drawn with these, then replaced by what the page has: figures are right in light and dark
_TEXT, _GRID = "#0d0c0b", "#0d0c0a"
_SERIES = tuple(f"#0e0c{i:02x}" for i in range(N_COLOURS))

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "snapkv",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _TEXT,
    "axes.labelcolor": _TEXT,
    "text.color": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}

# inches, of a panel and of one of the ablations, which stand four in a row
_SIZE = (4.2, 2.9)
_SMALL = (3.3, 2.7)


@dataclass(frozen=True)
class Key:
    """Line of a legend.

    Attributes:
        label: Text.
        colour: Index of the series colour, None for the text colour.
        marker: Index of the marker, None for none.
        dash: Index of the line style.
    """

    label: str
    colour: int | None
    marker: int | None
    dash: int

    @property
    def svg(self) -> str:
        """A piece of the line."""
        figure, axes = _figure((0.42, 0.16))
        axes.set_position((0, 0, 1, 1))
        axes.set_axis_off()
        axes.plot([0, 1, 2], [0, 0, 0], **_line(self), markevery=[1])
        axes.set_ylim(-1, 1)
        return _svg(figure, tight=False)


@dataclass(frozen=True)
class Panel:
    """One figure.

    Attributes:
        title: Above it.
        alt: What it shows, in words and numbers.
        svg: The element.
    """

    title: str
    alt: str
    svg: str


@dataclass(frozen=True)
class Chart:
    """Panels that share a legend."""

    keys: tuple[Key, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class _Curve:
    key: Key
    x: Sequence[float]
    y: Sequence[Interval]


def curve_methods(run: Run) -> list[str]:
    """Methods that are drawn: all if they are few, else without those of the ablations but their base."""
    names = groups.methods(run)
    if len(names) <= N_COLOURS + 1:
        return names
    varied = {name for each in ablations.ablations(run) for _, name in each.settings if name != each.base} - {*NAMES}
    return [name for name in names if name not in varied][: N_COLOURS + 1]


def quality(runs: Sequence[Run]) -> Chart:
    """Score against budget, a panel per task; divergence of running text at the end."""
    keys = _keys(runs)
    panels = [_budget_panel(runs, keys, task, "score", "score", (-0.03, 1.03)) for task in groups.tasks(runs)]
    for task in groups.tasks(runs, "kl"):
        panels.append(_budget_panel(runs, keys, task, "kl", "KL, nats per token", (0, None)))
        panels.append(_budget_panel(runs, keys, task, "same_top", "same top token", (None, 1.01)))
    return Chart(tuple(keys.values()), tuple(panels))


def _keys(runs: Sequence[Run]) -> dict[tuple[str, str], Key]:
    """By run and method: colour and marker tell methods, line styles tell runs."""
    names = list(dict.fromkeys(name for run in runs for name in curve_methods(run) if name != FULL))
    keys = {}
    for i, run in enumerate(runs):
        for method in curve_methods(run):
            label = f"{run.name}: {method}" if len(runs) > 1 else method
            dash = i % len(_DASHES)
            if method == FULL:
                keys[run.name, method] = Key(label, None, None, dash if len(runs) > 1 else 1)
            else:
                colour = names.index(method)
                keys[run.name, method] = Key(label, colour % N_COLOURS, colour % len(_MARKERS), dash)
    return keys


def _budget_panel(
    runs: Sequence[Run],
    keys: Mapping[tuple[str, str], Key],
    task: str,
    score: str,
    label: str,
    limits: tuple[float | None, float | None],
) -> Panel:
    curves: list[_Curve] = []
    levels: list[tuple[Key, Interval]] = []
    ticks: dict[str, float] = {}
    for run in runs:
        by_method: dict[str, list[tuple[Group, Interval]]] = {}
        for group in groups.groups(run, [task]):
            interval = group.interval(score)
            if interval is not None and (run.name, group.method) in keys:
                by_method.setdefault(group.method, []).append((group, interval))
        for method, points in by_method.items():
            key = keys[run.name, method]
            if method == FULL:
                # its divergence from itself says nothing
                levels += [(key, interval) for _, interval in points if score == "score"]
                continue
            points.sort(key=lambda point: point[0].cells)
            for group, _ in points:
                ticks.setdefault(groups.budget_text(group.budget), group.cells)
            curves.append(_Curve(key, [g.cells for g, _ in points], [interval for _, interval in points]))
    figure, axes = _figure()
    for key, interval in levels:
        axes.axhline(interval.estimate, **{**_line(key), "marker": None})
        if math.isfinite(interval.low) and math.isfinite(interval.high):
            axes.axhspan(interval.low, interval.high, color=_TEXT, alpha=0.07, linewidth=0)
    _draw(axes, curves, spread=0.035)
    _budget_axis(axes, ticks)
    axes.set(xlabel="budget", ylabel=label, ylim=limits if score != "kl" else (0, _top(curves)))
    alt = f"{label} of {task} against budget. {_alt(curves, levels, ticks)}"
    title = task if score == "score" else f"{task}: {label}"
    return Panel(title, alt, _svg(figure))


def _alt(curves: Iterable[_Curve], levels: Iterable[tuple[Key, Interval]], ticks: Mapping[str, float]) -> str:
    names = {cells: name for name, cells in ticks.items()}
    parts = [f"{key.label}: {interval.estimate:.2f}" for key, interval in levels]
    for curve in curves:
        points = ", ".join(
            f"{y.estimate:.2f} at {names.get(x, f'{x:.0f}')}" for x, y in zip(curve.x, curve.y, strict=True)
        )
        parts.append(f"{curve.key.label}: {points}")
    return "; ".join(parts) + "."


def speed(runs: Sequence[Run]) -> Chart:
    """Decode speed by that of the full cache and share of the pass, against budget; a curve per prompt length.

    Of the measurements of their own where a run has them, else of the samples.
    """
    points: dict[tuple[str, str, str], list[tuple[float, Interval, Interval]]] = {}
    names: dict[float, str] = {}
    for run in runs:
        for method, length, budget, cells, ratio, share in _speeds(run):
            points.setdefault((run.name, method, length), []).append((cells, ratio, share))
            names.setdefault(cells, groups.budget_text(budget))
    lengths = list(dict.fromkeys(length for _, _, length in points))
    order = [run.name for run in runs]
    keys: dict[str, Key] = {}
    panels = []
    for method in dict.fromkeys(method for _, method, _ in points):
        curves: list[list[_Curve]] = [[], []]
        for (run_name, name, length), found in points.items():
            if name != method:
                continue
            i = lengths.index(length)
            label = f"{run_name}: {length} tokens" if len(runs) > 1 else f"{length} tokens"
            key = Key(label, i % N_COLOURS, i % len(_MARKERS), order.index(run_name) % len(_DASHES))
            keys[label] = key
            found.sort(key=lambda point: point[0])
            x = [point[0] for point in found]
            curves[0].append(_Curve(key, x, [ratio for _, ratio, _ in found]))
            curves[1].append(_Curve(key, x, [share for _, _, share in found]))
        for label, unit, kind in (
            ("decode speed", "times the full cache's", curves[0]),
            ("pass", "% of the prefill", curves[1]),
        ):
            figure, axes = _figure()
            _draw(axes, kind, spread=0)
            if kind is curves[0]:
                axes.axhline(1, color=_TEXT, linestyle=_DASHES[1], linewidth=1)
            ticks = {names[x]: x for curve in kind for x in curve.x}
            _budget_axis(axes, ticks)
            axes.set(xlabel="budget", ylabel=unit, ylim=(0, _top(kind)))
            panels.append(Panel(f"{label}: {method}", f"{label}, {unit}. {_alt(kind, (), ticks)}", _svg(figure)))
    return Chart(tuple(keys.values()), tuple(panels))


def _speeds(run: Run) -> Iterator[tuple[str, str, int | float, float, Interval, Interval]]:
    """Method, length, budget, cells, quotient of speeds, share of the pass in percent."""
    if run.cost:
        for entry in run.cost:
            ratio, share = (Interval(v, v, v, 1) for v in (entry["speedup"], 100 * entry["pass_share"]))
            yield (
                str(entry["method"]), str(entry["prompt_tokens"]), entry["budget"], entry["cells_after"], ratio, share
            )  # fmt: skip
        return
    method = groups.recommended(run)
    names = list(dict.fromkeys(record.task for record in run.records))
    for group in groups.groups(run, names, ["length"]) if names else []:
        quotient, part = group.speedup(), group.pass_share()
        if group.method == method and quotient is not None and part is not None:
            percent = Interval(100 * part.estimate, 100 * part.low, 100 * part.high, part.n)
            yield group.method, str(group.fields[0]), group.budget, group.cells, quotient, percent


def ablation(run: Run) -> list[tuple[str, Chart]]:
    """By half of the tasks, a panel per dimension and a curve per budget."""
    charts = []
    for label, score, names in ablations.kinds(run):
        by_setting: dict[str, dict[str, Interval]] = {}
        for group in groups.groups(run, names):
            interval = group.interval(score)
            if interval is not None and group.method != FULL:
                by_setting.setdefault(group.method, {})[groups.budget_text(group.budget)] = interval
        budgets = list(dict.fromkeys(budget for found in by_setting.values() for budget in found))
        keys = [Key(f"budget {b}", i % N_COLOURS, i % len(_MARKERS), 0) for i, b in enumerate(budgets)]
        panels = []
        for each in ablations.ablations(run):
            values = [value for value, name in each.settings if name in by_setting]
            if len(values) < 2:
                continue
            curves = []
            for key, budget in zip(keys, budgets, strict=True):
                points = [
                    (i, by_setting[name][budget])
                    for i, (_, name) in enumerate(one for one in each.settings if one[1] in by_setting)
                    if budget in by_setting[name]
                ]
                if points:
                    curves.append(_Curve(key, [i for i, _ in points], [interval for _, interval in points]))
            figure, axes = _figure(_SMALL)
            _draw(axes, curves, spread=0.06, linear=True)
            texts = [value if isinstance(value, str) else f"{value:g}" for value in values]
            axes.set_xticks(range(len(texts)), texts)
            axes.set(xlabel=each.dimension, ylabel="score" if score == "score" else "KL", xlim=(-0.4, len(texts) - 0.6))
            axes.set_ylim(*((-0.03, 1.03) if score == "score" else (0, _top(curves))))
            ticks = {text: float(i) for i, text in enumerate(texts)}
            alt = f"{label} by {each.dimension}, all else as {each.base}. {_alt(curves, (), ticks)}"
            panels.append(Panel(each.dimension, alt, _svg(figure)))
        if panels:
            charts.append((label, Chart(tuple(keys), tuple(panels))))
    return charts


def _draw(axes: Any, curves: Sequence[_Curve], spread: float, linear: bool = False) -> None:
    """Curves with their intervals, side by side where they would hide each other."""
    for i, curve in enumerate(curves):
        shift = (i - (len(curves) - 1) / 2) * spread
        x = [value + shift if linear else value * 2**shift for value in curve.x]
        estimates = [y.estimate for y in curve.y]
        errors = [
            [max(0.0, y.estimate - y.low) for y in curve.y],
            [max(0.0, y.high - y.estimate) for y in curve.y],
        ]
        line = _line(curve.key)
        axes.errorbar(x, estimates, yerr=errors, **line, elinewidth=1, capsize=0, label=curve.key.label)


def _budget_axis(axes: Any, ticks: Mapping[str, float]) -> None:
    """A logarithmic axis with the budgets at the cells that they leave."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks.values()), list(ticks))
    axes.minorticks_off()
    if ticks:
        axes.set_xlim(min(ticks.values()) / 1.3, max(ticks.values()) * 1.3)


def _top(curves: Sequence[_Curve]) -> float:
    """Of an axis from 0 on."""
    ends = [end for curve in curves for y in curve.y for end in (y.estimate, y.high) if math.isfinite(end)]
    return 1.08 * max(ends, default=0.0) or 1.0


def _line(key: Key) -> dict[str, Any]:
    return {
        "color": _TEXT if key.colour is None else _SERIES[key.colour],
        "marker": None if key.marker is None else _MARKERS[key.marker],
        "linestyle": _DASHES[key.dash],
    }


def _figure(size: tuple[float, float] = _SIZE) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size)
        return figure, figure.add_subplot()


def _svg(figure: Any, tight: bool = True) -> str:
    """The element alone, hidden from screen readers: the page has the alternative text."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context(_STYLE):
        if tight:
            figure.set_layout_engine("constrained")
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # matplotlib before 3.8 writes the shorthand
    svg = re.sub(r"font: (?:\w+ )*([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    # many figures share a page, and a marker defined in a hidden one would be missing from the others
    digest = hashlib.sha256(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'(?<=id=")(?=[mp][0-9a-f]+")|(?<=#)(?=[mp][0-9a-f]{10})', f"{digest}-", svg)
    for i, colour in enumerate(_SERIES):
        svg = svg.replace(colour, f"var(--series-{i})")
    svg = svg.replace(_TEXT, "currentColor").replace(_GRID, "var(--grid)")
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)
