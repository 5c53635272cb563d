"""Random things of which more can be had without a change to the first ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def stream(draw: Callable[[], T]) -> Callable[[int], list[T]]:
    """A function that gives the first n draws."""
    drawn: list[T] = []

    def take(n: int) -> list[T]:
        while len(drawn) < n:
            drawn.append(draw())
        return drawn[:n]

    return take
