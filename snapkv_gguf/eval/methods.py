"""What is compared: the full cache, SnapKV, and other rules, all through the same pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..config import Pool, SnapKV

FULL = "full"

# from the budget; but for first-recent, which is nothing else, all keep the default's recent part
_NAMED: dict[str, Callable[[int | float], SnapKV]] = {
    "snapkv": lambda budget: SnapKV(budget=budget),
    "paper": SnapKV.paper,
    "no-pooling": lambda budget: SnapKV(budget=budget, kernel=1),
    "shared": lambda budget: SnapKV(budget=budget, rule="shared"),
    "first-recent": lambda budget: SnapKV(budget=budget, recent=0, rule="first-recent"),
    "random": lambda budget: SnapKV(budget=budget, rule="random"),
    "h2o": lambda budget: SnapKV(budget=budget, rule="h2o"),
}

NAMES = (FULL, *_NAMED)

# what one of NAMES is, for tables
DESCRIPTIONS = {
    FULL: "full cache",
    "snapkv": "SnapKV, the default preset",
    "paper": "SnapKV as in its paper: window 32, average over 5, no recent part",
    "no-pooling": "the default preset without pooling",
    "shared": "one selection for all layers and heads: what dropping whole cells would give",
    "first-recent": "the first 4 and the most recent cells (StreamingLLM)",
    "random": "recent cells and random ones",
    "h2o": "recent cells and those with the most attention of all prompt tokens (H2O)",
}

_SETTING = re.compile(r"w(\d+)-(max|avg)(\d+)-r(\d+(?:\.\d*)?|\.\d+)(-shared)?")


def parse(name: str, budget: int | float) -> SnapKV | None:
    """The settings of a method, None for the full cache.

    Args:
        name: One of :data:`NAMES`, or like ``w16-max21-r0.5``: window, pooling and its width, recent part (a share of
            the budget with a point, else cells), with ``-shared`` at the end one selection for all layers and heads.
        budget: Cells (int), or a share of the prompt (float).

    Raises:
        ValueError: Not of this form, or out of range.
    """
    if name == FULL:
        return None
    if name in _NAMED:
        return _NAMED[name](budget)
    match = _SETTING.fullmatch(name)
    if match is None:
        raise ValueError(f"method {name!r}: must be one of {', '.join(NAMES)}, or like w16-max21-r0.5")
    window, pool, kernel, recent, shared = match.groups()
    kind: Pool = "max" if pool == "max" else "avg"
    return SnapKV(
        budget=budget,
        window=int(window),
        kernel=int(kernel),
        pool=kind,
        recent=float(recent) if "." in recent else int(recent),
        rule="shared" if shared else "snapkv",
    )


def expand(names: Iterable[str], budgets: Iterable[int | float]) -> dict[tuple[str, int | float], SnapKV | None]:
    """Every method with every budget, the full cache once and first, with budget 0."""
    sizes = list(budgets)
    found: dict[tuple[str, int | float], SnapKV | None] = {(FULL, 0): None}
    for name in names:
        if name != FULL:
            found |= {(name, size): parse(name, size) for size in sizes}
    return found
