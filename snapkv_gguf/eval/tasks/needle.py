"""Needle in a haystack: a code hidden in real text, by length and depth."""

from __future__ import annotations

from ... import haystack
from ..schema import Question, Request, Sample, Task, Value
from ._sample import Case, each, fit
from ._text import Filler, hide, join

NAME = "needle"


def _depths(request: Request) -> tuple[str, tuple[Value, ...]]:
    for depth in request.depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth={depth}: must be from 0 (the beginning of the text) to 1 (its end)")
    return "depth", request.depths


def _make(request: Request, case: Case) -> Sample:
    code = f"{case.rng.randrange(100_000, 1_000_000)}"
    filler = Filler(request.document, case.rng)
    needle = haystack.hidden_sentence(code)
    question = Question(haystack.QUESTION, (code,), lead=haystack.LEAD, max_tokens=24)
    depth = float(case.axis["depth"])

    def make(n: int) -> Sample:
        return case.sample("string_match_any", join(hide(filler.take(n), [(depth, needle)])), question)

    return fit(request, case, make)[0]


TASK = Task(
    name=NAME,
    summary="a six-digit code hidden at a depth of real text",
    source="G. Kamradt, LLMTest_NeedleInAHaystack (2023)",
    build=each(NAME, _make, axis=_depths),
    axis="depth",
)
