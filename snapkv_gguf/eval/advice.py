"""What budget to choose, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .groups import Group, budget_text, groups, recommended, tasks
from .intervals import Interval, interval_text
from .methods import FULL

if TYPE_CHECKING:
    from .report import Run

# how much lower than the full cache's a mean score may be
MARGIN = 0.05

# a full cache below it fails the task, with it or without
_LOW = 0.5

# samples of a task below which a recommendation says so
_FEW = 10


@dataclass(frozen=True)
class Choice:
    """The smallest budgets of a method that do for a task.

    Attributes:
        shown: From which on the whole interval of the difference is above the margin at every larger budget too.
        likely: The same of the estimate alone.
        full: Mean score of the full cache.
        groups: By rising number of cells.
    """

    run: str
    task: str
    method: str
    shown: Group | None
    likely: Group | None
    full: Interval | None
    groups: tuple[Group, ...] = field(repr=False)

    @property
    def full_is_low(self) -> bool:
        return self.full is not None and self.full.estimate < _LOW


def choose(run: Run, method: str, margin: float = MARGIN) -> list[Choice]:
    """What budgets do for each task, all lengths pooled."""
    found = []
    for task in tasks([run]):
        every = groups(run, [task])
        own = sorted((g for g in every if g.method == method and g.difference()), key=lambda group: group.cells)
        if not own:
            continue
        full = next((group.interval() for group in every if group.method == FULL), None)
        shown = _from(own, lambda difference: difference.low >= -margin)
        likely = _from(own, lambda difference: difference.estimate >= -margin)
        found.append(Choice(run.name, task, method, shown, likely, full, tuple(own)))
    return found


def _from(rising: Sequence[Group], does: Callable[[Interval], bool]) -> Group | None:
    best = None
    for group in reversed(rising):
        difference = group.difference()
        if difference is None or not does(difference):
            break
        best = group
    return best


def headline(run: Run, margin: float = MARGIN) -> list[str]:
    """Sentences: what budget to choose, and how sure that is."""
    method = recommended(run)
    found = choose(run, method, margin) if method else []
    if not method or not found:
        return [
            "No task was answered with both the full cache and a compacted one, so there is no budget to recommend."
        ]
    low = [choice.task for choice in found if choice.full_is_low]
    found = [choice for choice in found if not choice.full_is_low]
    if not found:
        return [f"The full cache itself scores below {_LOW:g} on {_join(low)}, so there is no budget to recommend."]
    sentences = _advice(method, found, margin)
    few = [choice.task for choice in found if choice.groups[0].n < _FEW]
    if few:
        sentences.append(f"With fewer than {_FEW} samples of {_join(few)}, this is a first look.")
    if low:
        sentences.append(f"Left out: {_join(low)}, where the full cache itself scores below {_LOW:g}.")
    named = max((choice.likely or choice.groups[-1] for choice in found), key=lambda group: group.cells)
    return sentences + _beyond_scores(run, method, named.budget)


def _beyond_scores(run: Run, method: str, budget: int | float) -> list[str]:
    """What else happens at a budget: to later questions and to running text."""
    sentences = []
    at = [r for r in run.records if r.method == method and r.budget == budget]
    again = [r.scores[name] for r in at for name in r.scores if name.startswith("reread_")]
    later = [r.scores[name] for r in at for name in r.scores if name.startswith("score_")]
    if again and later:
        sentences.append(
            f"Later questions about the same document, at {budget_text(budget)}: mean score "
            f"{sum(later) / len(later):.2f}, and {sum(again) / len(again):.2f} with the document read again."
        )
    for task in tasks([run], "kl"):
        for group in groups(run, [task]):
            kl, same = group.interval("kl"), group.interval("same_top")
            if (group.method, group.budget) == (method, budget) and kl and same:
                sentences.append(
                    f"Running text, at {budget_text(budget)}: {interval_text(kl)} nats per token from the full cache, "
                    f"the same most likely token in {100 * same.estimate:.0f} % of the cases."
                )
    return sentences


def _advice(method: str, found: Sequence[Choice], margin: float) -> list[str]:
    n = _count(len(found), "task")
    where = "the only task" if len(found) == 1 else f"each of the {n}"
    shown = [choice.shown for choice in found if choice.shown]
    likely = [choice.likely for choice in found if choice.likely]
    if len(shown) == len(found):
        return [
            f"{method} with a budget of {_largest(shown)} loses no more than {margin:g} of the score on {where}.",
            "The 95 % intervals of the difference from the full cache stay above that, here and at all larger budgets.",
        ]
    if len(likely) == len(found):
        unsure = [choice.task for choice in found if not choice.shown]
        return [
            f"By estimate, {method} with a budget of {_largest(likely)} loses no more than {margin:g} of the score "
            f"on {where}.",
            f"This is not shown: for {_join(unsure)} the 95 % interval reaches further down. More samples would tell.",
        ]
    lost = [choice for choice in found if not choice.likely]
    sentences = [
        f"No measured budget of {method} does for all {n}: at {_largest([c.groups[-1] for c in lost])}, the largest, "
        f"it loses more than {margin:g} of the score on {_join([choice.task for choice in lost])}."
    ]
    if likely:
        sentences.append(
            f"On {_join([choice.task for choice in found if choice.likely])}, {_largest(likely)} does by estimate; "
            f"the intervals show it for {len(shown)} of {len(likely)}."
        )
    return sentences


def _largest(groups: Sequence[Group]) -> str:
    """The budget of the group with the most cells."""
    return _budget_phrase(max(groups, key=lambda group: group.cells))


def _budget_phrase(group: Group) -> str:
    text = budget_text(group.budget)
    text = f"{text} of the prompt" if text.endswith("%") else f"{text} cells"
    return f"{text} (compression {group.ratio:.1f})"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
