"""Question answering over many documents, in the form of RULER's, with facts made up for it.

Short biographies of invented people stand among paragraphs of real text; one of them holds the answer, the others are
of the same kind. What is asked can be known from the text alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..schema import Question, Request, Sample, Task
from . import _words
from ._sample import Case, each, fit
from ._stream import stream
from ._text import Filler, join

NAME = "qa"

_PROFESSIONS = (
    "botanist", "cartographer", "clockmaker", "composer", "engraver", "geologist", "glassblower", "historian",
    "inventor", "librarian", "linguist", "navigator", "painter", "photographer", "poet", "surveyor",
)  # fmt: skip
_INSTRUMENTS = (
    "accordion", "bagpipes", "banjo", "bassoon", "cello", "clarinet", "dulcimer", "flute", "guitar", "harp",
    "mandolin", "oboe", "piano", "trombone", "trumpet", "tuba", "viola", "zither",
)  # fmt: skip
_ANIMALS = ("cat", "dog", "donkey", "goat", "hawk", "horse", "parrot", "raven", "tortoise")
_PETS = (
    "Argus", "Biscuit", "Bramble", "Comfrey", "Domino", "Fidget", "Goblin", "Hopscotch", "Jumble", "Marmalade",
    "Mustard", "Nimbus", "Parsnip", "Pickle", "Pudding", "Quince", "Rascal", "Saffron", "Thimble", "Truffle",
)  # fmt: skip

# every other document needs a name of its own
_MAX_DOCUMENTS = len(_words.FIRST_NAMES) * len(_words.LAST_NAMES)


@dataclass(frozen=True)
class _Biography:
    name: str
    text: str
    questions: tuple[tuple[str, str], ...]  # with their answers


def _biography(rng: random.Random) -> _Biography:
    name = _words.person(rng)
    last = name.split()[1]
    birthplace = home = _words.town(rng)
    while home == birthplace:
        home = _words.town(rng)
    profession, instrument = rng.choice(_PROFESSIONS), rng.choice(_INSTRUMENTS)
    animal, pet = rng.choice(_ANIMALS), rng.choice(_PETS)
    born = rng.randrange(1780, 1900)
    sentences = [
        f"{last} settled in {home} in {born + rng.randrange(20, 40)} and never moved again.",
        f"In the evenings {last} played the {instrument}.",
        f"Visitors also remembered a {animal} called {pet}, which {last} took everywhere.",
    ]
    rng.shuffle(sentences)
    return _Biography(
        name,
        " ".join([f"{name} was {_with_article(profession)}, born in {birthplace} in {born}.", *sentences]),
        (
            (f"In which town was {name} born?", birthplace),
            (f"In which town did {name} settle?", home),
            (f"Which instrument did {name} play?", instrument),
            (f"What was the {animal} of {name} called?", pet),
        ),
    )


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _make(request: Request, case: Case) -> Sample:
    golden = _biography(case.rng)
    asked, answer = case.rng.choice(golden.questions)
    filler = Filler(request.document, case.rng, without=answer)
    place = case.rng.random()
    names = {golden.name}

    def distractor() -> str:
        # the answer stands in no other document, and nobody has two
        while (other := _biography(case.rng)).name in names or answer in other.text:
            pass
        names.add(other.name)
        return other.text

    distractors = stream(distractor)
    question = Question(
        f"Answer with a short phrase from the documents.\n\nQuestion: {asked}",
        (answer,),
        lead="Answer:",
        lead_in_chat=True,
        max_tokens=24,
    )

    def make(n: int) -> Sample:
        # real text and biographies by turns
        real, made_up = iter(filler.take(n)), iter(distractors(n // 2))
        documents = [next(made_up) if i % 2 else next(real) for i in range(n)]
        documents.insert(int(place * (n + 1)), golden.text)
        numbered = (f"Document {i}: {text}" for i, text in enumerate(documents, start=1))
        context = join(["Answer the question at the end from the following documents.", *numbered])
        return case.sample("string_match_any", context, question)

    return fit(request, case, make, minimum=2, maximum=_MAX_DOCUMENTS)[0]


TASK = Task(
    name=NAME,
    summary="a question that one of many documents answers",
    source="the form of RULER's QA (Hsieh et al., 2024, arXiv:2404.06654); the documents are made up",
    build=each(NAME, _make),
)
