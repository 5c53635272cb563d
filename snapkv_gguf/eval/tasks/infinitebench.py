"""InfiniteBench's synthetic retrieval (Zhang et al., 2024, arXiv:2402.13718), at any length."""

from __future__ import annotations

import json
import random
import uuid

from ..schema import Question, Request, Sample, Task
from ._sample import Case, each, fit
from ._stream import stream
from ._text import GRASS, hide

SOURCE = "InfiniteBench (Zhang et al., 2024, arXiv:2402.13718)"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _kv_retrieval(request: Request, case: Case) -> Sample:
    asked = case.rng.random()
    pairs = stream(lambda: (_uuid(case.rng), _uuid(case.rng)))

    def make(n: int) -> Sample:
        chosen = pairs(n)
        key, value = chosen[int(asked * n)]
        context = f"Extract the value of one key from the JSON object below.\n\n{json.dumps(dict(chosen))}"
        # a UUID is up to one token per character
        question = Question(f'Key: "{key}"', (value,), "The value of this key is:", lead_in_chat=True, max_tokens=96)
        return case.sample("string_match_any", context, question)

    return fit(request, case, make, minimum=2)[0]


def _passkey(request: Request, case: Case) -> Sample:
    key = f"{case.rng.randrange(10_000, 100_000)}"
    depth = case.rng.random()
    start = "There is an important fact hidden in a lot of irrelevant text. Find it and remember it."
    fact = f"The pass key is {key}. Remember it. {key} is the pass key."
    question = Question("What is the pass key?", (key,), lead="The pass key is", lead_in_chat=True, max_tokens=16)

    def make(n: int) -> Sample:
        context = "\n".join(hide([GRASS] * n, [(depth, fact)]))
        return case.sample("string_match_any", f"{start}\n\n{context}", question)

    return fit(request, case, make)[0]


TASKS = (
    Task("kv-retrieval", "the value of one key of a JSON object of UUIDs", SOURCE, each("kv-retrieval", _kv_retrieval)),
    Task("passkey", "a pass key hidden in sentences that repeat", SOURCE, each("passkey", _passkey)),
)
