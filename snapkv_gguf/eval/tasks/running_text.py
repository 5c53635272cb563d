"""Running text: how far the next tokens after a pass are from those of the full cache."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from ... import haystack
from ..schema import N_NEXT, Request, Sample, Task
from ._sample import Case

NAME = "text"

# of the text, beyond what is needed, so that it is not counted token by token
_SPARE = 1.02

_SPACE = re.compile(r"\s")


def _stretches(request: Request, length: int, rng: random.Random) -> Iterator[str]:
    """Stretches of the text with different beginnings, each of at least length + N_NEXT tokens and little more."""
    need = length + N_NEXT
    if request.document is None:
        parts, what = haystack.topics(), "the text that ships with Python"
    else:
        parts = [part for part in re.split(r"\n\s*\n", haystack.read_document(request.document)) if part.strip()]
        what = f"document {request.document}"
    text = "\n\n".join(parts)
    starts = [0]
    for part in parts[:-1]:
        starts.append(starts[-1] + len(part) + 2)
    rng.shuffle(starts)
    found, too_late = 0, len(text)
    for start in starts:
        if start >= too_late:
            continue
        # the topics are in alphabetical order, so that after the last may come the first
        cyclic = request.document is None
        stretch = _beginning(f"{text[start:]}\n\n{text[:start]}" if cyclic else text[start:], need, request)
        if stretch is not None:
            found += 1
            yield stretch
        elif cyclic:
            break
        else:
            too_late = start
    raise ValueError(
        f"length={length}: {what} has {found} stretches of the {need} tokens that it takes ({N_NEXT} of them to "
        "compare); give a smaller length, fewer samples or a longer document"
    )


def _beginning(text: str, n_tokens: int, request: Request) -> str | None:
    """As much of the text as has n_tokens or little more, None if it has fewer."""
    end = n_tokens
    while True:
        cut = text[: _word_end(text, end)]
        counted = request.count(cut)
        if counted >= n_tokens:
            return cut
        if len(cut) == len(text):
            return None
        end = len(cut) + 1 + int(len(cut) * (_SPARE * n_tokens / max(counted, 1) - 1))


def _word_end(text: str, end: int) -> int:
    space = _SPACE.search(text, end)
    return space.start() if space else len(text)


def _build(request: Request) -> Iterator[Sample]:
    for length in dict.fromkeys(request.lengths):
        stretches = _stretches(request, length, request.rng(NAME, length))
        for index in range(request.n_samples):
            case = Case(NAME, length, index, request.rng(NAME, length, index))
            yield case.sample("divergence", next(stretches))


TASK = Task(
    name=NAME,
    summary=f"the next {N_NEXT} tokens of running text against those of the full cache",
    source="Kullback-Leibler divergence, equal greedy tokens and perplexity, as llama.cpp's llama-perplexity",
    build=_build,
    retrieval=False,
)
