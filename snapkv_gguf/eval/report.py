"""One HTML file about one or several runs: tables, figures, what was kept of a prompt, the answers.

It needs nothing but itself: no network, no fonts, no other files.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from . import ablations, advice, groups, methods, plots, records, tables
from .schema import Record

_TEMPLATES = files(__package__) / "templates"

# characters of JSON, of all runs together, so that the file stays below 5 MB
_MAX_ANSWERS = 1_500_000
_MAX_KEPT = 1_500_000

# characters of one answer
_MAX_ANSWER = 600


@dataclass(frozen=True)
class Run:
    """A folder of results.

    Attributes:
        folder: Where it is.
        name: Of the run.
        info: ``run.json``.
        records: ``records.jsonl``, the last one of each sample, method and budget.
        kept: ``kept.json``, None if there is none.
        cost: ``cost.json``, empty if there is none.
    """

    folder: Path
    name: str
    info: Mapping[str, Any]
    records: tuple[Record, ...]
    kept: Mapping[str, Any] | None = None
    cost: tuple[Mapping[str, Any], ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        return _mapping(self.info.get("config"))

    @property
    def model(self) -> Mapping[str, Any]:
        return _mapping(self.info.get("model"))

    @property
    def model_name(self) -> str:
        return str(self.model.get("name") or self.model.get("file") or "unknown model")

    @property
    def finished(self) -> bool:
        return bool(self.info.get("finished", False))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def load(folder: Path) -> Run:
    """Read a folder of results.

    A last line of ``records.jsonl`` that is cut off is left out: the process may have been killed while it wrote.

    Raises:
        FileNotFoundError: No such folder, or not one of a run.
        ValueError: A file is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; give one that snapkv eval wrote")
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"{folder}: holds no run.json, so it is no run; give a folder that snapkv eval wrote")
    info = _read_json(folder / "run.json")
    if not isinstance(info, dict):
        raise ValueError(f"{folder / 'run.json'}: must be an object, is {type(info).__name__}")
    kept = _read_json(folder / "kept.json") if (folder / "kept.json").is_file() else None
    cost = _read_json(folder / "cost.json") if (folder / "cost.json").is_file() else []
    if kept is not None:
        _check_kept(folder / "kept.json", kept)
    _check_cost(folder / "cost.json", cost)
    name = str(info.get("name") or folder.resolve().name)
    return Run(folder, name, info, records.read(folder / records.FILE), kept, tuple(cost))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error}); restore it or run snapkv eval again") from error


def _check_kept(path: Path, kept: Any) -> None:
    try:
        n = len(kept["tokens"])
        for each in kept["maps"]:
            positions = [p for layer in each["layers"] for head in layer["heads"] for p in head]
            if not all(isinstance(p, int) and 0 <= p < n for p in positions):
                raise ValueError(f"{path}: a kept position is not within the {n} tokens of the sample")
            str(each["method"]), float(each["budget"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no map of kept tokens ({error!r}); remove it or run snapkv eval again") from error


def _check_cost(path: Path, cost: Any) -> None:
    needed = ("method", "budget", "prompt_tokens", "cells_after", "speedup", "pass_share")
    for entry in cost if isinstance(cost, list) else [cost]:
        missing = [name for name in needed if not isinstance(entry, dict) or name not in entry]
        if missing:
            raise ValueError(f"{path}: no field {', '.join(missing)}; remove it or run snapkv eval again")


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write the report of one run, or of several side by side.

    Raises:
        ImportError: No jinja2 or matplotlib.
        ValueError: No runs.
    """
    if not runs:
        raise ValueError("no runs to report on: give at least one folder that snapkv eval wrote")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_html(distinct(runs)), encoding="utf-8")


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs with names that differ."""
    seen: dict[str, int] = {}
    found = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        found.append(run if seen[run.name] == 1 else replace(run, name=f"{run.name} ({seen[run.name]})"))
    return found


def _html(runs: Sequence[Run]) -> str:
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the report needs {error.name}: pip install 'snapkv-gguf[eval]'") from error
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (_TEMPLATES / name).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["shade"] = shade
    environment.filters["plain"] = _plain
    return environment.get_template("report.html").render(_context(runs))


def _context(runs: Sequence[Run]) -> dict[str, Any]:
    drawn = {run.name: plots.curve_methods(run) for run in runs}
    depths = [
        task
        for task in groups.tasks(runs)
        if any(r.task == task and "depth" in r.fields for run in runs for r in run.records)
    ]
    answers = _answers(runs)
    kept = _kept(runs)
    return {
        "runs": runs,
        "title": " and ".join(dict.fromkeys(run.model_name for run in runs)),
        "css": (_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        "js": (_TEMPLATES / "report.js").read_text(encoding="utf-8"),
        "margin": advice.MARGIN,
        "headlines": [(run, advice.headline(run)) for run in runs],
        "choices": tables.choices(runs, lambda run: [name for name in [groups.recommended(run)] if name]),
        "all_choices": tables.choices(runs, lambda run: [n for n in groups.methods(run) if n != methods.FULL]),
        "heat_maps": [
            (task, [each for run in runs for each in _heat_maps(runs, run, task, drawn[run.name])]) for task in depths
        ],
        "quality": plots.quality(runs),
        "overview": tables.overview(runs),
        "scores": [tables.scores(runs, task) for task in groups.tasks(runs)],
        "speed": plots.speed(runs),
        "speed_table": tables.speed(runs),
        "cost_table": tables.cost(runs),
        "ablations": [(run, each[0].base, plots.ablation(run)) for run in runs if (each := ablations.ablations(run))],
        "ablation_table": tables.ablation(runs),
        "questions": tables.questions(runs),
        "text": tables.running_text(runs),
        "kept": kept,
        "answers": answers,
        "methods": {
            name: methods.DESCRIPTIONS[name] for name in methods.NAMES if any(name in groups.methods(r) for r in runs)
        },
        "how": [(run, _how(run)) for run in runs],
    }


def _heat_maps(runs: Sequence[Run], run: Run, task: str, names: Sequence[str]) -> list[tables.Table]:
    found = tables.heat_maps([run], task, names)
    return [replace(each, title=f"{run.name}, {each.title}") for each in found] if len(runs) > 1 else found


def shade(value: float | None) -> str:
    """Style of a cell of a heat map: a map that colour-blind readers can read, and text that stands out from it."""
    if value is None:
        return ""
    from matplotlib import colormaps

    red, green, blue, _ = colormaps["RdYlBu"](min(1.0, max(0.0, value)), bytes=True)
    # relative luminance, WCAG 2.1; 0.179 has equal contrast to black and to white
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (int(v) / 255 for v in (red, green, blue))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return f"background:#{red:02x}{green:02x}{blue:02x};color:{'#000' if luminance > 0.179 else '#fff'}"


def _plain(value: Any) -> str:
    """A value of the configuration, as text."""
    if isinstance(value, (list, tuple)) and all(isinstance(one, (str, int, float)) for one in value):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _how(run: Run) -> list[tuple[str, Any]]:
    """How it was run, name and value."""
    info = run.info
    found = [("command", info.get("command")), ("seed", info.get("seed"))]
    found += [(f"{name}", info.get(name)) for name in ("version",)]
    for group in ("model", "pin", "machine"):
        found += [(f"{group}: {name}", value) for name, value in _mapping(info.get(group)).items()]
    found += [(f"configuration: {name}", value) for name, value in run.config.items()]
    for i, session in enumerate(info.get("sessions") or [], 1):
        value = session
        if isinstance(session, Mapping):
            value = f"{session.get('started', '?')} to {session.get('ended') or 'interrupted'}"
            if "machine" in session and session["machine"] != info.get("machine"):
                value += f", on {_plain(session['machine'])}"
        found.append((f"session {i}", value))
    return [(name, value) for name, value in found if value is not None]


# --- data for the page's own script


def _kept(runs: Sequence[Run]) -> dict[str, Any]:
    """What was kept, by run: {"runs": [{"run", "sample", "tokens", "maps"}], "left_out": maps that had no room}.

    A map has ``sets``, distinct sets of positions as bits (base64, lowest bit first), and ``layers``,
    [layer, [index into sets per head]].
    """
    found = []
    left_out, size = 0, 0
    for run in runs:
        if run.kept is None:
            continue
        tokens = [str(piece) for piece in run.kept["tokens"]]
        preferred = groups.recommended(run)
        maps = []
        for each in sorted(run.kept["maps"], key=lambda one: one["method"] != preferred):
            packed = _packed(each, len(tokens))
            length = len(json.dumps(packed))
            if size + length > _MAX_KEPT:
                left_out += 1
                continue
            size += length
            maps.append(packed)
        if maps:
            found.append({"run": run.name, "sample": run.kept.get("sample", ""), "tokens": tokens, "maps": maps})
    return {"runs": found, "left_out": left_out}


def _packed(each: Mapping[str, Any], n: int) -> dict[str, Any]:
    sets: dict[str, int] = {}
    layers = []
    for layer in each["layers"]:
        heads = [sets.setdefault(_bits(positions, n), len(sets)) for positions in layer["heads"]]
        layers.append([layer["layer"], heads])
    return {
        "method": each["method"],
        "budget": groups.budget_text(each["budget"]),
        "layers": layers,
        "sets": list(sets),
    }


def _bits(positions: Sequence[int], n: int) -> str:
    bits = bytearray((n + 7) // 8)
    for position in positions:
        bits[position >> 3] |= 1 << (position & 7)
    return base64.b64encode(bits).decode("ascii")


def _answers(runs: Sequence[Run]) -> dict[str, Any]:
    """Answers by sample, evenly thinned out where they are too many.

    {"samples", "total": how many there were, "several": whether of several runs}; a sample is
    {"run", "task", "sample", "fields", "references", "rows"}, a row [method, budget, score, answers].
    """
    samples: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        order = groups.methods(run)
        for record in sorted(
            (r for r in run.records if r.answers), key=lambda r: (order.index(r.method), groups.budget_key(r.budget))
        ):
            entry = samples.setdefault(
                (run.name, record.sample),
                {
                    "run": run.name,
                    "task": record.task,
                    "sample": record.sample,
                    "fields": ", ".join(f"{name} {_number(value)}" for name, value in record.fields.items()),
                    "references": [_cut(text) for text in record.references],
                    "rows": [],
                },
            )
            score = record.scores.get("score")
            shown = round(score, 4) if score is not None and math.isfinite(score) else None
            entry["rows"].append(
                [record.method, groups.budget_text(record.budget), shown, [_cut(text) for text in record.answers]]
            )
    every = sorted(samples.values(), key=lambda entry: list(samples).index((entry["run"], entry["sample"])))
    size = sum(len(json.dumps(entry)) for entry in every)
    step = max(1.0, size / _MAX_ANSWERS)
    kept = [every[int(i * step)] for i in range(int(len(every) / step))]
    return {"samples": kept, "total": len(every), "several": len(runs) > 1}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_ANSWER else f"{text[:_MAX_ANSWER]} …"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
