"""Needle in a haystack: a code hidden in real text, by length and depth, asked for after the text or before it."""

from __future__ import annotations

from dataclasses import replace

from ... import haystack
from ..schema import Question, Request, Sample, Task, Value
from ._sample import Case, each, fit
from ._text import Filler, hide, join

_LATER = "Answer the question that stands before the text."


def _depths(request: Request) -> tuple[str, tuple[Value, ...]]:
    for depth in request.depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth={depth}: must be from 0 (the beginning of the text) to 1 (its end)")
    return "depth", request.depths


def _make(request: Request, case: Case) -> Sample:
    return _hidden(request, case, Question(haystack.QUESTION, (), lead=haystack.LEAD, max_tokens=24))


def _make_first(request: Request, case: Case) -> Sample:
    question = Question(_LATER, (), lead=haystack.LEAD, max_tokens=24, asks=haystack.QUESTION)
    return _hidden(request, case, question, f"{haystack.QUESTION}\n\n")


def _hidden(request: Request, case: Case, question: Question, before: str = "") -> Sample:
    code = f"{case.rng.randrange(100_000, 1_000_000)}"
    filler = Filler(request.document, case.rng)
    needle = haystack.hidden_sentence(code)
    asked = replace(question, references=(code,))
    depth = float(case.axis["depth"])

    def make(n: int) -> Sample:
        text = join(hide(filler.take(n), [(depth, needle)]))
        return case.sample("string_match_any", f"{before}{text}", asked)

    return fit(request, case, make)[0]


TASKS = (
    Task(
        name="needle",
        summary="a six-digit code hidden at a depth of real text",
        source="G. Kamradt, LLMTest_NeedleInAHaystack (2023)",
        build=each("needle", _make, axis=_depths),
        axis="depth",
    ),
    Task(
        name="question-first",
        summary="the same, with the question before the text instead of after it",
        source="needle, turned round: what is read before is chosen for a question that the end does not repeat",
        build=each("question-first", _make_first, axis=_depths),
        axis="depth",
    ),
)
