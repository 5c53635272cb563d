"""Settings of SnapKV that differ from a base in one dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import MAX_CELLS, SnapKV
from . import methods as known_methods
from .groups import is_retrieval, methods, sortable, tasks

if TYPE_CHECKING:
    from .report import Run

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
            found.append(Ablation(dimension, settings[base], tuple(sorted(varied, key=lambda each: sortable(each[0])))))
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
