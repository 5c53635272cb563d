"""RULER's tasks that need no data (Hsieh et al., 2024, arXiv:2404.06654), in words of our own.

As there, an answer is begun for chat models too, and scored by the share of the references that it contains.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Sequence

from ..schema import Question, Request, Sample, Task
from . import _words
from ._sample import Case, each, fit
from ._stream import stream
from ._text import GRASS, Filler, hide, join

SOURCE = "RULER (Hsieh et al., 2024, arXiv:2404.06654)"
METRIC = "string_match_all"

_N_NEEDLES = 4
_N_HOPS = 4

_N_COMMON = 10

# zeta(2): the exponent is RULER's
_ZETA_2 = 1.6449340668482264
_NOISE = "...."
_N_ASKED = 3

# tokens below which RULER's solved example would take too much of the prompt
_MIN_FOR_EXAMPLE = 1024

# tokens from which the words are repeated as often as in the paper
_MIN_FOR_ALL_REPEATS = 4096


def _distinct(n: int, draw: Callable[[random.Random], str], rng: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found[draw(rng)] = None
    return list(found)


def _number(rng: random.Random) -> str:
    return f"{rng.randrange(1_000_000, 10_000_000)}"


def _variable(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=5))


def _coded_word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=6))


def _niah(request: Request, case: Case, pairs: Sequence[tuple[str, str]], question: Question) -> Sample:
    needles = [(case.rng.random(), f"One of the special numbers of {key} is: {value}.") for key, value in pairs]
    filler = Filler(request.document, case.rng)
    start = (
        "Some special numbers are hidden in the following text. Remember them: you will be asked for them afterwards."
    )

    def make(n: int) -> Sample:
        return case.sample(METRIC, join([start, *hide(filler.take(n), needles)]), question)

    return fit(request, case, make)[0]


def _ask(names: Sequence[str], values: Sequence[str], max_tokens: int) -> Question:
    what = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
    if len(values) == 1:
        text, lead = f"What is the special number of {what} in the text?", f"The special number of {what} is"
    else:
        text, lead = f"What are all the special numbers of {what} in the text?", f"The special numbers of {what} are"
    return Question(f"Question: {text}", tuple(values), f"Answer: {lead}", lead_in_chat=True, max_tokens=max_tokens)


def _multikey(request: Request, case: Case) -> Sample:
    keys, values = _distinct(_N_NEEDLES, _words.key_name, case.rng), _distinct(_N_NEEDLES, _number, case.rng)
    return _niah(request, case, list(zip(keys, values, strict=True)), _ask(keys[:1], values[:1], 24))


def _multivalue(request: Request, case: Case) -> Sample:
    key, values = _words.key_name(case.rng), _distinct(_N_NEEDLES, _number, case.rng)
    return _niah(request, case, [(key, value) for value in values], _ask([key], values, 64))


def _multiquery(request: Request, case: Case) -> Sample:
    keys, values = _distinct(_N_NEEDLES, _words.key_name, case.rng), _distinct(_N_NEEDLES, _number, case.rng)
    return _niah(request, case, list(zip(keys, values, strict=True)), _ask(keys, values, 96))


def _chain(rng: random.Random, names: Sequence[str], value: str) -> list[tuple[float, str]]:
    """The assignments, each after the one that it needs, with their depths."""
    right = [value, *(f"VAR {name}" for name in names)]
    depths = sorted(rng.random() for _ in names)
    return [(depth, f"VAR {name} = {of}") for depth, name, of in zip(depths, names, right, strict=False)]


def _ask_chain(names: Sequence[str], value: str) -> Question:
    return Question(
        f"Question: Find all variables that are assigned the value {value} in the text above.",
        tuple(names),
        lead=f"Answer: The {len(names)} variables that are assigned the value {value} are:",
        lead_in_chat=True,
        max_tokens=40,
    )


def _variable_tracking(request: Request, case: Case) -> Sample:
    n_names = _N_HOPS + 1
    # of the solved example, and of the question
    names = _distinct(2 * n_names, _variable, case.rng)
    values = [f"{value}" for value in case.rng.sample(range(10_000, 100_000), 2)]
    start = "Track the chain of variable assignments that is hidden in the following text."
    example = ""
    if case.length >= _MIN_FOR_EXAMPLE:
        solved = _ask_chain(names[n_names:], values[1])
        lines = hide([GRASS] * 3, _chain(case.rng, names[n_names:], values[1]))
        answer = f"{solved.lead} {', '.join(solved.references)}"
        example = join([start, "\n".join(lines), f"{solved.text}\n{answer}"]) + "\n\n"
    chain = _chain(case.rng, names[:n_names], values[0])
    question = _ask_chain(names[:n_names], values[0])

    def make(n: int) -> Sample:
        return case.sample(METRIC, example + join([start, "\n".join(hide([GRASS] * n, chain))]), question)

    return fit(request, case, make)[0]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def _repeated(common: Sequence[str], n: int, others: Sequence[str], n_others: int, rng: random.Random) -> list[str]:
    words = [*list(common) * n, *list(others) * n_others]
    rng.shuffle(words)
    return words


def _common_words(request: Request, case: Case) -> Sample:
    words = list(_words.vocabulary())
    case.rng.shuffle(words)
    # an answer is searched for in what the model says: no word of which another is a part
    alone = (word for word in words if sum(word in other for other in words) == 1)
    common = list(itertools.islice(alone, 2 * _N_COMMON))
    words = [word for word in words if word not in common]
    long = case.length >= _MIN_FOR_ALL_REPEATS
    n_common, n_others = (30, 3) if long else (6, 1)
    start = "In the following numbered list some words appear more often than others. Remember those."
    question = Question(
        f"Question: What are the {_N_COMMON} most common words in the list above?",
        tuple(common[:_N_COMMON]),
        lead=f"Answer: The {_N_COMMON} most common words in the list are:",
        lead_in_chat=True,
        max_tokens=64,
    )
    example = ""
    if case.length >= _MIN_FOR_EXAMPLE:
        n_example = 30 if long else 10
        others, words = words[:n_example], words[n_example:]
        solved = _repeated(common[_N_COMMON:], *((10, others, 3) if long else (3, others, 1)), case.rng)
        answer = f"{question.text}\n{question.lead} {', '.join(common[_N_COMMON:])}"
        example = join([start, _numbered(solved), answer]) + "\n\n"
    seed = case.rng.getrandbits(64)

    # where there are not words enough for the length, all are repeated more often
    for times in itertools.count(1):

        def make(n: int, times: int = times) -> Sample:
            rng = random.Random(seed)
            shown = _repeated(common[:_N_COMMON], n_common * times, words[:n], n_others * times, rng)
            return case.sample(METRIC, example + join([start, _numbered(shown)]), question)

        sample, size = fit(request, case, make, minimum=_N_COMMON, maximum=len(words))
        if size < len(words):
            return sample
    raise AssertionError


def _frequent_words(request: Request, case: Case) -> Sample:
    rng, seed = random.Random(case.rng.getrandbits(64)), case.rng.getrandbits(64)
    seen: set[str] = set()

    def new_word() -> str:
        while (word := _coded_word(rng)) in seen:
            pass
        seen.add(word)
        return word

    coded = stream(new_word)
    start = "Read the following coded text and keep track of how often each coded word appears."
    lead = "Answer: The three coded words that appear most often are:"
    text = f"Question: Which three coded words appear most often in the text above? Ignore the dots '{_NOISE}'."

    def make(n: int) -> Sample:
        counts = [int(n / (rank**2 * _ZETA_2)) for rank in range(1, n + 1)]
        counts = [count for count in counts if count]
        names = [_NOISE, *coded(len(counts) - 1)]
        words = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        random.Random(seed).shuffle(words)
        question = Question(text, tuple(names[1 : 1 + _N_ASKED]), lead, lead_in_chat=True, max_tokens=48)
        return case.sample(METRIC, join([start, " ".join(words)]), question)

    # from 73 words on no two of the first five are equally frequent
    return fit(request, case, make, minimum=73)[0]


TASKS = (
    Task("niah-multikey", "four needles of different keys, one asked for", SOURCE, each("niah-multikey", _multikey)),
    Task("niah-multivalue", "four needles of one key, all asked for", SOURCE, each("niah-multivalue", _multivalue)),
    Task(
        "niah-multiquery",
        "four needles of different keys, all asked for",
        SOURCE,
        each("niah-multiquery", _multiquery),
    ),
    Task(
        "variable-tracking",
        "a chain of five variables, all asked for",
        SOURCE,
        each("variable-tracking", _variable_tracking),
    ),
    Task(
        "common-words",
        "the ten words of a list that are repeated most often",
        SOURCE,
        each("common-words", _common_words),
        retrieval=False,
    ),
    Task(
        "frequent-words",
        "the three most frequent words of a coded text",
        SOURCE,
        each("frequent-words", _frequent_words),
        retrieval=False,
    ),
)
