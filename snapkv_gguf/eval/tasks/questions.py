"""Several questions about one document: the pass is made for the first, which the prompt ends with."""

from __future__ import annotations

from ... import haystack
from ..schema import Question, Request, Sample, Task
from . import _words
from ._sample import Case, each, fit
from ._text import Filler, hide, join

NAME = "questions"

# of the text, that the facts keep from both ends
_MARGIN = 0.1


def _make(request: Request, case: Case) -> Sample:
    rng = case.rng
    code, keeper, village = f"{rng.randrange(100_000, 1_000_000)}", _words.person(rng), _words.town(rng)
    # unlike each other in kind and words, so that what is kept for one is of no use to the others
    facts = [
        (haystack.hidden_sentence(code), Question(haystack.QUESTION, (code,), haystack.LEAD, max_tokens=24)),
        (
            f"The lighthouse has been looked after for many years by {keeper}.",
            Question(
                "Question: Who looks after the lighthouse?",
                (keeper,),
                lead="Answer: The lighthouse is looked after by",
                max_tokens=24,
            ),
        ),
        (
            f"According to an old map, the treasure lies under a mill in {village}.",
            Question(
                "Question: In which village does the treasure lie?",
                (village,),
                lead="Answer: The treasure lies in",
                max_tokens=24,
            ),
        ),
    ]
    rng.shuffle(facts)
    hidden = [(rng.uniform(_MARGIN, 1 - _MARGIN), sentence) for sentence, _ in facts]
    filler = Filler(request.document, rng)

    def make(n: int) -> Sample:
        return case.sample("string_match_any", join(hide(filler.take(n), hidden)), *(question for _, question in facts))

    return fit(request, case, make)[0]


TASK = Task(
    name=NAME,
    summary="three questions about one document, the pass made for the first",
    source="the limit that Li et al. (2024, arXiv:2404.14469) and their reviewers name: one pass serves one question",
    build=each(NAME, _make),
)
