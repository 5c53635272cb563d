"""Llama on seeded tiny models: how the tests make it, and make it talk."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from snapkv_gguf import SnapKV

CONFIG = SnapKV(budget=64, window=8, kernel=5, pool="max", recent=0.25)
TEXT = "".join(f"Line {i}: the quick brown fox jumps over lazy dog {i * i}. " for i in range(8))
N_ANSWER = 12


def make(path: Path, snapkv: Any = CONFIG, **kwargs: Any) -> Any:
    from snapkv_gguf import Llama

    options = {"n_ctx": 1024, "n_batch": 100, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    return Llama(str(path), snapkv=snapkv, **{**options, **kwargs})


def say(llm: Any, prompt: str | list[int] = TEXT, n: int = N_ANSWER) -> list[int]:
    """The next tokens, greedily; the last one is not evaluated."""
    tokens = tokens_of(llm, prompt) if isinstance(prompt, str) else prompt
    with contextlib.closing(llm.generate(tokens, temp=0.0)) as generator:
        return list(itertools.islice(generator, n))


def complete(llm: Any, prompt: str | list[int] = TEXT, **kwargs: Any) -> Any:
    """A completion of letters: noise in UTF-8 is cut at its ends in ways of its own."""
    from llama_cpp import LlamaGrammar

    letters = LlamaGrammar.from_string("root ::= [a-z ]*", verbose=False)
    return llm(prompt, **{"max_tokens": N_ANSWER, "temperature": 0.0, "grammar": letters, **kwargs})


def tokens_of(llm: Any, text: str = TEXT) -> list[int]:
    return list(llm.tokenize(text.encode()))


def logits(llm: Any) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()


class Evaluated:
    """Counts the tokens that an instance evaluates."""

    def __init__(self, llm: Any) -> None:
        self.n = 0
        llm.on_eval = self

    def __call__(self, done: int, total: int) -> None:
        self.n += total if done == total else 0

    def since(self) -> int:
        n, self.n = self.n, 0
        return n
