"""How often the answer survives: a code hidden in long real text, asked for at the end, free greedy answer.

One prefill per text serves all settings: the state is saved before the last tokens of the prompt and restored for
each setting, which then evaluates those tokens again, because captured queries are not part of a state.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import haystack
from .config import Pool, SnapKV
from .llama import Llama
from .prompt import Vocabulary

import llama_cpp  # isort: skip

FULL, STREAM = "full", "stream"

# the full cache; first-4-plus-recent; the paper's; wide max pooling, and with a recent part
DEFAULT_SETTINGS = (FULL, STREAM, "w32-avg5", "w16-max21", "w16-max21-r0.5", "w16-max21-r0.75")

_FIRST = 4  # cells that the streaming rule keeps at the beginning
_MAX_ANSWER = 32


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        seed: Of the text.
        setting: Its name.
        budget: In cells, 0 for the full cache.
        prompt_tokens: Of the prompt.
        cells: Used when the answer began.
        milliseconds: Of the pass.
        text: The answer.
        right: Whether it holds the code.
    """

    seed: int
    setting: str
    budget: int
    prompt_tokens: int
    cells: int
    milliseconds: float
    text: str
    right: bool


def parse_setting(name: str, budget: int) -> SnapKV:
    """``w16-max21-r0.5``: window 16, max pooling over 21, half of the budget for recent cells.

    Raises:
        ValueError: Not of this form, or out of range.
    """
    match = re.fullmatch(r"w(\d+)-(max|avg)(\d+)(?:-r([\d.]+))?", name)
    if match is None:
        raise ValueError(f"setting {name!r}: must be {FULL!r}, {STREAM!r} or like 'w16-max21' or 'w16-max21-r0.5'")
    window, pool, kernel, recent = match.groups()
    kind: Pool = "max" if pool == "max" else "avg"
    share: int | float = 0 if recent is None else float(recent) if "." in recent else int(recent)
    return SnapKV(budget=budget, window=int(window), kernel=int(kernel), pool=kind, recent=share)


def measure(
    model_path: Path,
    *,
    seeds: Iterable[int],
    settings: Sequence[str] = DEFAULT_SETTINGS,
    budgets: Sequence[int] = (1024, 512, 256),
    n_tokens: int = 4000,
    n_threads: int,
    n_gpu_layers: int = 0,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Ask for the code of each seed's text once per setting and budget.

    Args:
        n_tokens: Length of the text, question and template aside.
        on_answer: Called after each answer.

    Raises:
        ValueError: Unknown setting, or a budget that does not fit it.
    """
    passes = {(name, b): parse_setting(name, b) for name in settings if name not in (FULL, STREAM) for b in budgets}
    window = max([config.window for config in passes.values()], default=SnapKV().window)
    with Vocabulary(model_path) as vocabulary:
        prompts = {s: haystack.build(n_tokens, s, vocabulary.count) for s in seeds}
        tokens = {s: text.prompt(vocabulary) for s, text in prompts.items()}
    n_ctx = max(len(prompt) for prompt in tokens.values()) + _MAX_ANSWER
    llm = Llama(
        str(model_path),
        snapkv=SnapKV(budget=window + 1, window=window, recent=0),
        n_ctx=n_ctx,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        n_gpu_layers=n_gpu_layers,
        flash_attn=True,
        verbose=False,
    )
    answers = []
    for seed, text in prompts.items():
        prompt = tokens[seed]
        llm.reset()
        llm.eval(prompt[:-window])
        state = llm.save_state()
        for setting in settings:
            for budget in (0,) if setting == FULL else budgets:
                llm.load_state(state)
                llm.eval(prompt[-window:])
                first = llm.sample(temp=0.0)
                started = time.perf_counter()
                if setting == STREAM:
                    _keep_first_and_recent(llm, budget)
                elif setting != FULL:
                    llm.compact(passes[setting, budget])
                elapsed = time.perf_counter() - started
                cells = llm.kv_cells
                answer = _greedy(llm, first)
                answers.append(
                    Answer(seed, setting, budget, len(prompt), cells, 1000 * elapsed, answer, text.code in answer)
                )
                on_answer(answers[-1])
    llm.close()
    return answers


def _keep_first_and_recent(llm: Llama, budget: int) -> None:
    """StreamingLLM's rule (arXiv:2309.17453), for all layers and heads alike: the cells between are removed."""
    n = llm.n_tokens
    if n > budget and not llm._ctx.kv_cache_seq_rm(0, _FIRST, n - budget + _FIRST):
        raise RuntimeError("the cache refused to remove cells from the middle")


def _greedy(llm: Llama, token: int) -> str:
    tokens: list[int] = []
    while not llama_cpp.llama_vocab_is_eog(llm._model.vocab, token) and len(tokens) < _MAX_ANSWER:
        tokens.append(token)
        llm.eval([token])
        token = llm.sample(temp=0.0)
    return bytes(llm.detokenize(tokens)).decode(errors="replace")


def summarize(answers: Iterable[Answer]) -> dict[str, dict[int, tuple[int, int]]]:
    """setting -> budget -> (right answers, answers)."""
    table: dict[str, dict[int, tuple[int, int]]] = {}
    for answer in answers:
        right, n = table.setdefault(answer.setting, {}).get(answer.budget, (0, 0))
        table[answer.setting][answer.budget] = (right + answer.right, n + 1)
    return table


def as_json(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """Every answer, as JSON takes it."""
    return [asdict(answer) for answer in answers]
