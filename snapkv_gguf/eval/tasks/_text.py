"""Real text, and sentences hidden in it."""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from ... import haystack

# characters: longer paragraphs are divided, so that a text can be made of any length and things hidden at any depth
_MAX_PIECE = 480

# share of letters and spaces: tables, grammar and code have fewer
_MIN_LETTERS = 0.8

# what Mohtashami and Jaggi (2023, arXiv:2305.16300), RULER and InfiniteBench fill their texts with
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Filler:
    """Paragraphs of real text in an order of their own, repeated if more are needed than there are."""

    def __init__(self, document: Path | None, rng: random.Random, without: str | None = None) -> None:
        paragraphs = [p for p in _divided(document) if without is None or not any(without in piece for piece in p)]
        if not paragraphs:
            raise ValueError(f"document {document}: each of its paragraphs has {without!r}; give another one")
        rng.shuffle(paragraphs)
        self._pieces = [piece for paragraph in paragraphs for piece in paragraph]

    def take(self, n: int) -> list[str]:
        return [self._pieces[i % len(self._pieces)] for i in range(n)]


def hide(pieces: Sequence[str], hidden: Sequence[tuple[float, str]]) -> list[str]:
    """The pieces with more between them, each at the boundary that is nearest to its depth.

    Args:
        pieces: Of the text.
        hidden: Depth, a share of the characters of the text from 0 (before it) to 1 (after it), and what is put there.
            What comes to the same boundary keeps its order.
    """
    ends = [0, *accumulate(map(len, pieces))]
    at: dict[int, list[str]] = {}
    for depth, sentence in hidden:
        after = min(bisect.bisect_left(ends, depth * ends[-1]), len(pieces))
        nearer = after > 0 and depth * ends[-1] - ends[after - 1] < ends[after] - depth * ends[-1]
        at.setdefault(after - nearer, []).append(sentence)
    found = list(at.get(0, []))
    for i, piece in enumerate(pieces, start=1):
        found += [piece, *at.get(i, [])]
    return found


def join(paragraphs: Sequence[str]) -> str:
    return "\n\n".join(paragraphs)


@lru_cache(maxsize=4)
def _divided(document: Path | None) -> tuple[tuple[str, ...], ...]:
    paragraphs = haystack.real_paragraphs(document)
    if document is None:
        paragraphs = [paragraph for paragraph in paragraphs if _is_prose(paragraph)]
    return tuple(tuple(_pieces(paragraph)) for paragraph in paragraphs)


def _is_prose(paragraph: str) -> bool:
    return sum(c.isalpha() or c == " " for c in paragraph) >= _MIN_LETTERS * len(paragraph)


def _pieces(paragraph: str) -> Iterator[str]:
    """The paragraph, divided between its sentences where it is too long, or between words where a sentence is."""
    piece = ""
    for sentence in re.split(r"(?<=[.!?:;])\s+", paragraph):
        for part in _cut(sentence):
            if piece and len(piece) + len(part) >= _MAX_PIECE:
                yield piece
                piece = ""
            piece = f"{piece} {part}".lstrip()
    if piece:
        yield piece


def _cut(sentence: str) -> Iterator[str]:
    while len(sentence) > _MAX_PIECE:
        end = sentence.rfind(" ", 0, _MAX_PIECE)
        end = end if end > 0 else _MAX_PIECE
        yield sentence[:end]
        sentence = sentence[end:].lstrip()
    yield sentence
