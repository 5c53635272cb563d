"""In-context learning from many examples: what counts is spread over the whole prompt, not in one place of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ..schema import Question, Request, Sample, Task, Value
from ._sample import Case, each, fit
from ._stream import stream
from ._text import join
from ._topics import TOPICS

CLASSIFICATION, LIST_FUNCTIONS = "icl-classification", "list-functions"

# labels that say what they mean, and labels that only the examples explain
VARIANTS = ("topics", "made-up")

_MADE_UP = (
    "blicket", "brolin", "cofa", "dax", "drimble", "fep", "flumen", "gazzer", "glorp", "hesk", "jaffin", "kiv",
    "lorp", "mib", "nurf", "ozzel", "plonk", "quib", "rell", "snib", "toma", "vorp", "wug", "zup",
)  # fmt: skip

_SENTENCES = (
    "The {} was left next to the {}.",
    "Nobody had noticed the {} until somebody asked for the {}.",
    "We talked about the {} and the {} for most of the evening.",
    "She wrote a short note about the {} and another about the {}.",
    "After the {} came the {}, as everyone had expected.",
    "They asked for the {} but were shown the {} instead.",
    "His first question was about the {}, his second about the {}.",
    "There was more to say about the {} than about the {}.",
    "It all began with the {} and ended with the {}.",
    "Someone had made a drawing of the {} beside the {}.",
    "You will hear about the {} first and then about the {}.",
    "Without the {} nobody would have thought of the {}.",
)

# tokens that an example takes, times the examples that a label is meant to have
_LENGTH_PER_LABEL = 20 * 24
_MIN_LABELS = 4


def _variants(request: Request) -> tuple[str, tuple[Value, ...]]:
    return "variant", VARIANTS


def _sentence(rng: random.Random, topic: str) -> str:
    return rng.choice(_SENTENCES).format(*rng.sample(TOPICS[topic], 2))


def _classification(request: Request, case: Case) -> Sample:
    rng = case.rng
    n_labels = min(len(TOPICS), max(_MIN_LABELS, case.length // _LENGTH_PER_LABEL))
    topics = rng.sample(sorted(TOPICS), n_labels)
    labels = topics if case.axis["variant"] == "topics" else rng.sample(_MADE_UP, n_labels)
    asked = rng.randrange(n_labels)
    query = _sentence(rng, topics[asked])
    round_: list[int] = []

    def example() -> str:
        # all labels in turn, in another order each time, so that they are equally frequent
        if not round_:
            round_.extend(rng.sample(range(n_labels), n_labels))
        label = round_.pop()
        while (sentence := _sentence(rng, topics[label])) == query:
            pass
        return f"Sentence: {sentence}\nLabel: {labels[label]}"

    examples = stream(example)
    question = Question(
        f"Sentence: {query}",
        (labels[asked],),
        lead="Label:",
        lead_in_chat=True,
        max_tokens=8,
        choices=tuple(sorted(labels)),
    )
    start = "Each sentence has a label. Learn the labels from the examples and give the label of the last sentence."

    def make(n: int) -> Sample:
        return case.sample("first_line", join([start, *examples(n)]), question)

    # each label at least twice
    return fit(request, case, make, minimum=2 * n_labels)[0]


@dataclass(frozen=True)
class ListFunction:
    """A function of a list of numbers from 0 to 99."""

    name: str
    apply: Callable[[list[int]], list[int]]


LIST_FUNCTION_KINDS = (
    ListFunction("reverse", lambda x: x[::-1]),
    ListFunction("sort", sorted),
    ListFunction("sort-descending", lambda x: sorted(x, reverse=True)),
    ListFunction("drop-first", lambda x: x[1:]),
    ListFunction("drop-last", lambda x: x[:-1]),
    ListFunction("first-two", lambda x: x[:2]),
    ListFunction("repeat-first", lambda x: [x[0], *x]),
    ListFunction("swap-ends", lambda x: [x[-1], *x[1:-1], x[0]]),
    ListFunction("rotate", lambda x: [*x[1:], x[0]]),
    ListFunction("evens", lambda x: [v for v in x if v % 2 == 0]),
    ListFunction("odds", lambda x: [v for v in x if v % 2]),
    ListFunction("above-50", lambda x: [v for v in x if v > 50]),
    ListFunction("add-1", lambda x: [v + 1 for v in x]),
    ListFunction("add-10", lambda x: [v + 10 for v in x]),
    ListFunction("double", lambda x: [2 * v for v in x]),
    ListFunction("largest", lambda x: [max(x)]),
)


def _list_functions(request: Request, case: Case) -> Sample:
    rng = case.rng
    # all functions in turn, for samples enough
    first = request.rng(LIST_FUNCTIONS, case.length).randrange(len(LIST_FUNCTION_KINDS))
    function = LIST_FUNCTION_KINDS[(first + case.index) % len(LIST_FUNCTION_KINDS)]

    def numbers() -> list[int]:
        return [rng.randrange(100) for _ in range(rng.randrange(4, 7))]

    def telling() -> list[int]:
        while not (output := function.apply(query := numbers())) or output == query:
            pass
        return query

    query = telling()

    def example() -> str:
        while (given := numbers()) == query:
            pass
        return f"Input: {given}\nOutput: {function.apply(given)}"

    examples = stream(example)
    question = Question(
        f"Input: {query}", (str(function.apply(query)),), lead="Output:", lead_in_chat=True, max_tokens=40
    )
    start = (
        "Each output is made from its input by the same rule. Learn the rule from the examples and give the output for "
        "the last input."
    )

    def make(n: int) -> Sample:
        context = join([start, *examples(n)])
        return case.sample("first_line", context, question, function=function.name)

    return fit(request, case, make, minimum=4)[0]


TASKS = (
    Task(
        CLASSIFICATION,
        "the label of a sentence, learnt from many examples",
        "many-label in-context classification, as in LongICLBench (Li et al., 2024, arXiv:2404.02060); made up",
        each(CLASSIFICATION, _classification, axis=_variants),
        retrieval=False,
        axis="variant",
    ),
    Task(
        LIST_FUNCTIONS,
        "a function of lists, learnt from many inputs and outputs",
        "list functions (Rule, 2020, The child as hacker; BIG-bench, arXiv:2206.04615); made up",
        each(LIST_FUNCTIONS, _list_functions),
        retrieval=False,
    ),
)
