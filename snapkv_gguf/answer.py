"""One answer to a prompt, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llama import Llama, SnapKVStats


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        text: What the model said.
        prompt_tokens: Of the prompt.
        prefill_seconds: Until its last token was evaluated.
        decoded_tokens: Evaluated after it.
        decode_rate: Tokens per second, the pass aside.
        kv_cells: In use when the answer began.
        stats: Of the pass, None without snapkv.
    """

    text: str
    prompt_tokens: int
    prefill_seconds: float
    decoded_tokens: int
    decode_rate: float
    kv_cells: int
    stats: SnapKVStats | None

    @property
    def pass_ms(self) -> float | None:
        """Milliseconds of the pass, None if there was none."""
        return None if self.stats is None or self.stats.reason else self.stats.milliseconds.total

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return asdict(self)

    def summary(self) -> str:
        """The figures in one line."""
        parts = [
            f"{self.prompt_tokens} prompt tokens in {self.prefill_seconds:.2f} s",
            f"{self.decoded_tokens} tokens decoded at {self.decode_rate:.1f}/s",
            f"{self.kv_cells} KV cells",
        ]
        if self.stats is not None:
            parts.insert(1, self.stats.reason or f"pass {self.stats.milliseconds.total:.0f} ms")
            if self.stats.chunk_passes:
                n, ms = self.stats.chunk_passes, self.stats.chunk_milliseconds
                parts.insert(1, f"room made {n} times in {ms / 1000:.2f} s of it")
            if self.stats.answer_passes:
                parts.append(f"room made for the answer {self.stats.answer_passes} times")
        return ", ".join(parts)


def ask(
    llm: Llama,
    tokens: list[int],
    *,
    n_predict: int,
    temp: float = 0.0,
    seed: int = 0,
    on_prompt: Callable[[int, int], None] = lambda done, total: None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Let the model answer.

    Args:
        tokens: The prompt.
        n_predict: Longest answer in tokens.
        temp: Temperature, 0 for greedy.
        seed: Of the sampling.
        on_prompt: Told how many tokens of the prompt are evaluated, and of how many.
        on_text: Told each piece of the answer as it comes.

    Raises:
        ValueError: The prompt does not fit into the context.
    """
    meter = _Meter(on_prompt)
    llm.on_eval = meter
    text = ""
    try:
        chunks: Any = llm.create_completion(tokens, max_tokens=n_predict, temperature=temp, seed=seed, stream=True)
        for chunk in chunks:
            piece = chunk["choices"][0]["text"]
            text += piece
            on_text(piece)
        ended = time.perf_counter()
    finally:
        llm.on_eval = None
    stats = llm.snapkv_stats
    seconds = ended - meter.prefilled - (stats.milliseconds.total / 1000 if stats else 0)
    return Answer(
        text=text,
        prompt_tokens=len(tokens),
        prefill_seconds=meter.prefilled - meter.started,
        decoded_tokens=meter.decoded,
        decode_rate=meter.decoded / seconds if meter.decoded else 0.0,
        kv_cells=len(tokens) if stats is None else stats.cells_after,
        stats=stats,
    )


def decode_rate(llm: Llama, n: int) -> float:
    """Tokens per second over ``n`` more tokens, each evaluated on its own."""
    token = llm.tokenize(b"\n", add_bos=False)[:1]
    started = time.perf_counter()
    for _ in range(n):
        llm.eval(token)
    return n / (time.perf_counter() - started)


class _Meter:
    """Times the prefill and counts what is decoded after it; called after each batch."""

    def __init__(self, on_prompt: Callable[[int, int], None]) -> None:
        self.on_prompt = on_prompt
        self.started = time.perf_counter()
        self.prefilled = 0.0
        self.decoded = 0

    def __call__(self, done: int, total: int) -> None:
        if self.prefilled:
            self.decoded += done
            return
        self.on_prompt(done, total)
        if done == total:
            self.prefilled = time.perf_counter()
