"""What goes into a run, samples, and what comes out of it, records."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Value = str | int | float

N_NEXT = 256  # tokens of running text that are compared


@dataclass(frozen=True)
class Question:
    """Something to ask about a context.

    Attributes:
        text: The question with its instruction.
        references: Right answers; what they mean is the metric's matter (one of them, or all of them).
        lead: How the answer begins, what a base model completes.
        lead_in_chat: Whether a chat model's answer is begun with it too, as RULER does.
        max_tokens: Longest answer.
        choices: All labels, for metrics of classification.
        asks: What is asked, where the text is not that: the question stood before the context.
    """

    text: str
    references: tuple[str, ...]
    lead: str = ""
    lead_in_chat: bool = False
    max_tokens: int = 32
    choices: tuple[str, ...] = ()
    asks: str = ""

    @property
    def probe(self) -> str:
        """What a probe of its own asks."""
        return self.asks or self.text


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        id: Unique in a run, the same for the same request.
        task: Name in ``tasks.TASKS``.
        metric: Name in ``metrics.METRICS``; of running text ``"divergence"``, which is not one of them.
        context: The long text.
        questions: What is asked after it; the first is part of the prompt that the pass runs on, the others follow
            after its answer. Empty for running text, whose next tokens are compared instead.
        fields: The axes of the tables, ``length`` (tokens aimed at) always among them, as ``depth`` or ``variant``.
    """

    id: str
    task: str
    metric: str
    context: str
    questions: tuple[Question, ...]
    fields: Mapping[str, Value]


@dataclass(frozen=True)
class Request:
    """Which samples to make.

    Attributes:
        lengths: Tokens of a whole prompt that are aimed at, chat template aside; never exceeded.
        n_samples: Per length and, where the task has such, per depth or variant.
        seed: The same seed gives the same samples.
        count: Tokens of a text.
        depths: Where a needle is, as shares of the text.
        longbench: Directory with LongBench's JSONL files, None for none.
        document: A text file of one's own instead of the text that ships with Python, for the tasks on running text.
    """

    lengths: tuple[int, ...]
    n_samples: int
    seed: int
    count: Callable[[str], int]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    longbench: Path | None = None
    document: Path | None = None

    def rng(self, *key: Value) -> random.Random:
        """A generator of its own for each sample, so that no sample depends on how many others there are."""
        text = "/".join(map(str, (self.seed, *key)))
        return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


@dataclass(frozen=True)
class Task:
    """A kind of samples.

    Attributes:
        name: As given to ``--tasks``.
        summary: One line.
        source: The paper or project that it follows.
        build: Makes the samples, one at a time.
        retrieval: Whether the answer stands in the text; the rest is the non-retrieval half of the ablations.
        axis: Field by which the tables split it, besides the length.
    """

    name: str
    summary: str
    source: str
    build: Callable[[Request], Iterator[Sample]]
    retrieval: bool = True
    axis: str | None = None


@dataclass(frozen=True)
class Record:
    """One sample by one method, a line of ``records.jsonl``.

    Attributes:
        sample: Its id.
        task: Its task.
        fields: Its axes.
        method: Name, ``"full"`` for the full cache.
        budget: As asked for, in cells (int) or as a share of the prompt (float); 0 for the full cache.
        prompt_tokens: Of the prompt.
        cells: KV cells after the pass.
        scores: By name: ``score`` from 0 to 1 of an answer; ``score_2`` and so on of the following questions, asked
            of the compacted cache, ``reread_2`` and so on of the same with the document read again;
            of running text ``kl`` (nats per token), ``same_top`` (share), ``perplexity``.
        answers: What the model said, in the order of the questions.
        references: Right answers to the first question.
        prefill_seconds: Of the prompt, shared by all methods of a sample.
        pass_ms: Of the pass, with its parts ``score_ms``, ``select_ms``, ``move_ms`` in ``parts_ms``; with rule h2o the
            scores are those of all prompt tokens.
        decode_tokens: Decoded after it, each on its own.
        decode_seconds: For these.
    """

    sample: str
    task: str
    fields: Mapping[str, Value]
    method: str
    budget: int | float
    prompt_tokens: int
    cells: int
    scores: Mapping[str, float]
    answers: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    prefill_seconds: float = 0.0
    pass_ms: float = 0.0
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    decode_tokens: int = 0
    decode_seconds: float = 0.0
