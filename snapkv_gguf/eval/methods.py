"""What is compared: the full cache, SnapKV, and other rules, all through the same pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

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

# a probe that is the sample's question, also where the prompt does not end with it
QUESTION = "{question}"

_SETTING = re.compile(r"w(\d+)-(max|avg)(\d+)-r(\d+(?:\.\d*)?|\.\d+)(-shared)?")

_CHUNKS = re.compile(r"(.+?)\+(\d+|budget)((?::(?:probe\d+|question|packed))*)")

# what the names of methods may end with, for users
CHUNKS = "NAME+CHUNK[:probeN|:question][:packed]"


def parse(name: str, budget: int | float) -> SnapKV | None:
    """The settings of a method, None for the full cache.

    Args:
        name: One of :data:`NAMES`, or like ``w16-max21-r0.5``: window, pooling and its width, recent part (a share of
            the budget with a point, else cells), with ``-shared`` at the end one selection for all layers and heads.
            With ``+512`` at the end the prompt is read in budget + 512 cells, in chunks; ``+budget`` for as many as the
            budget; then ``:probe16`` for another probe than the default, ``:question`` for the question itself wherever
            it stands in the prompt, ``:packed`` for packed positions.
        budget: Cells (int), or a share of the prompt (float).

    Raises:
        ValueError: Not of this form, or out of range.
    """
    if name == FULL:
        return None
    if name in _NAMED:
        return _NAMED[name](budget)
    chunks = _CHUNKS.fullmatch(name)
    if chunks is not None:
        return _in_chunks(name, chunks, budget)
    match = _SETTING.fullmatch(name)
    if match is None:
        raise ValueError(f"method {name!r}: must be one of {', '.join(NAMES)}, or like w16-max21-r0.5, or {CHUNKS}")
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


def _in_chunks(name: str, match: re.Match[str], budget: int | float) -> SnapKV:
    base, chunk, options = match.groups()
    config = parse(base, budget)
    if config is None or config.chunk is not None:
        raise ValueError(f"method {name!r}: must be {CHUNKS}, of another method than {base!r}")
    if not isinstance(budget, int):
        raise ValueError(f"method {name!r}: needs a budget in cells, not {budget}")
    probe: int | str = config.probe
    for option in options.split(":"):
        if option == "question":
            probe = QUESTION
        elif option.startswith("probe"):
            probe = int(option.removeprefix("probe"))
    found = replace(
        config,
        chunk=budget if chunk == "budget" else int(chunk),
        probe=probe,
        positions="packed" if "packed" in options.split(":") else "true",
    )
    if isinstance(probe, int) and (found.chunk or 0) <= probe:
        raise ValueError(f"method {name!r}: the chunk must be more than the probe of {probe} tokens")
    return found


def cells(config: SnapKV) -> int:
    """That a method reads a prompt in; 0 for all."""
    return 0 if config.chunk is None else int(config.budget) + config.chunk


def expand(names: Iterable[str], budgets: Iterable[int | float]) -> dict[tuple[str, int | float], SnapKV | None]:
    """Every method with every budget, the full cache once and first, with budget 0."""
    sizes = list(budgets)
    found: dict[tuple[str, int | float], SnapKV | None] = {(FULL, 0): None}
    for name in names:
        if name != FULL:
            found |= {(name, size): parse(name, size) for size in sizes}
    return found
