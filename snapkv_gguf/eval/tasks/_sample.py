"""What the tasks share: one sample at a time, and its size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..schema import Question, Request, Sample, Value

# tokens of a prompt that are left to the chat template
TEMPLATE_MARGIN = 64

# share of the length at which a prompt is long enough
_FULL = 0.98


@dataclass(frozen=True)
class Case:
    """Which sample of a request.

    Attributes:
        task: Its task.
        length: Tokens of the prompt that are aimed at.
        index: Of the samples that differ in nothing but chance.
        rng: Of this sample alone.
        axis: Depth or variant, if the task has such.
    """

    task: str
    length: int
    index: int
    rng: random.Random
    axis: Mapping[str, Value] = field(default_factory=dict)

    def sample(self, metric: str, context: str, *questions: Question, **fields: Value) -> Sample:
        """The sample with this text and these questions; ``fields`` come after the length and the axis."""
        name = "-".join([self.task, str(self.length), *(_short(v) for v in self.axis.values()), str(self.index)])
        return Sample(
            id=name,
            task=self.task,
            metric=metric,
            context=context,
            questions=questions,
            fields={"length": self.length, **self.axis, **fields},
        )


def each(
    task: str,
    make: Callable[[Request, Case], Sample],
    axis: Callable[[Request], tuple[str, tuple[Value, ...]]] | None = None,
) -> Callable[[Request], Iterator[Sample]]:
    """``Task.build`` of a task whose samples are made by ``make``, n_samples per length and value of the axis."""

    def build(request: Request) -> Iterator[Sample]:
        key, values = axis(request) if axis is not None else ("", ())
        axes: list[dict[str, Value]] = [{key: value} for value in dict.fromkeys(values)] or [{}]
        for length in dict.fromkeys(request.lengths):
            for point in axes:
                for index in range(request.n_samples):
                    rng = request.rng(task, length, *map(_short, point.values()), index)
                    yield make(request, Case(task, length, index, rng, point))

    return build


def prompt_text(sample: Sample) -> str:
    """The prompt without a chat template: context, first question and the beginning of its answer."""
    if not sample.questions:
        return sample.context
    question = sample.questions[0]
    return "\n".join(filter(None, [f"{sample.context}\n\n{question.text}", question.lead]))


def fit(
    request: Request, case: Case, make: Callable[[int], Sample], minimum: int = 1, maximum: int | None = None
) -> tuple[Sample, int]:
    """The sample of the largest size whose prompt leaves TEMPLATE_MARGIN of the length, or of one that nearly fills it.

    Args:
        make: The sample of a size (paragraphs, lines or whatever the task counts), the same for the same size.
        minimum: Smallest size that makes sense.
        maximum: Largest size there is.

    Returns:
        The sample and its size.

    Raises:
        ValueError: The length is too short for the smallest size.
    """
    limit = case.length - TEMPLATE_MARGIN

    def tokens(size: int) -> tuple[Sample, int]:
        sample = make(size)
        return sample, request.count(prompt_text(sample))

    low = minimum
    best, n_low = tokens(low)
    if n_low > limit:
        raise ValueError(
            f"length={case.length}: too short for {case.task}, which needs at least {n_low + TEMPLATE_MARGIN} tokens "
            f"({TEMPLATE_MARGIN} of them for the chat template); give a greater length"
        )
    high, n_high = low + 1, n_low  # the smallest size known to be too large, once n_high > limit
    steps = 0
    while n_low < _FULL * limit and (maximum is None or low < maximum):
        if n_high > limit:
            if high - low == 1:
                break
            # regula falsi, and bisection where it is slow
            share = (limit - n_low) / (n_high - n_low) if steps < 4 else 0.5
            size = min(max(low + 1, int(low + share * (high - low))), high - 1)
        else:
            # as if the smallest sample were all of one kind: never far too large
            size = max(low + 1, int(low * limit / max(n_low, 1)))
        if maximum is not None:
            size = min(size, maximum)
        sample, n_tokens = tokens(size)
        if n_tokens > limit:
            high, n_high = size, n_tokens
        else:
            best, low, n_low = sample, size, n_tokens
        steps += 1
    return best, low


def _short(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
