"""What a pass costs in quality, setting by setting.

Answers: a code hidden in long real text, asked for at the end, free greedy answer. Text: how far the distributions of
the next tokens of a running text are from those of the full cache, Kullback-Leibler divergence in nats per token.

One prefill per text serves all settings: the state is saved before the last tokens of the prompt and restored for
each setting, which then evaluates those tokens again, because captured queries are not part of a state.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import haystack
from .config import Pool, Rule, SnapKV
from .llama import Llama
from .prompt import Vocabulary

import llama_cpp  # isort: skip

FULL, STREAM = "full", "stream"

# the full cache; first-4-plus-recent; the paper's; wide max pooling, and with a recent part
DEFAULT_SETTINGS = (FULL, STREAM, "w32-avg5", "w16-max21", "w16-max21-r0.25", "w16-max21-r0.5", "w16-max21-r0.75")

_MAX_ANSWER = 32
_N_NEXT = 64  # tokens of running text that are compared


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


@dataclass(frozen=True)
class Divergence:
    """How far the tokens after a running text are from those of the full cache.

    Attributes:
        seed: Of the text.
        setting: Its name.
        budget: In cells.
        kl: Kullback-Leibler divergence of the setting's next-token distribution from the full cache's, in nats, mean
            over the tokens.
        same_top: Share of the tokens with the same most likely next token.
    """

    seed: int
    setting: str
    budget: int
    kl: float
    same_top: float


def parse_setting(name: str, budget: int) -> SnapKV:
    """``w16-max21-r0.5``: window 16, max pooling over 21, half of the budget for recent cells.

    With ``-shared`` at the end all layers and heads keep the same cells; ``stream`` is first-4-plus-recent, ``random``
    is what it says, the window kept.

    Raises:
        ValueError: Not of this form, or out of range.
    """
    if name == STREAM:
        return SnapKV(budget=budget, recent=0, rule="first-recent")
    if name == "random":
        return SnapKV(budget=budget, recent=0, rule="random")
    match = re.fullmatch(r"w(\d+)-(max|avg)(\d+)(?:-r(\d+(?:\.\d*)?|\.\d+))?(-shared)?", name)
    if match is None:
        raise ValueError(
            f"setting {name!r}: must be {FULL!r}, {STREAM!r}, 'random' or like 'w16-max21', 'w16-max21-r0.5' or "
            "'w16-max21-shared'"
        )
    window, pool, kernel, recent, shared = match.groups()
    kind: Pool = "max" if pool == "max" else "avg"
    share: int | float = 0 if recent is None else float(recent) if "." in recent else int(recent)
    rule: Rule = "shared" if shared else "snapkv"
    return SnapKV(budget=budget, window=int(window), kernel=int(kernel), pool=kind, recent=share, rule=rule)


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
    passes = _passes(settings, budgets)
    with Vocabulary(model_path) as vocabulary:
        prompts = {s: haystack.build(n_tokens, s, vocabulary.count) for s in seeds}
        tokens = {s: text.prompt(vocabulary) for s, text in prompts.items()}
    answers = []
    n_ctx = max(len(prompt) for prompt in tokens.values()) + _MAX_ANSWER
    with contextlib.closing(_llama(model_path, passes, n_ctx, n_threads, n_gpu_layers)) as llm:
        for seed, text in prompts.items():
            prompt = tokens[seed]
            for setting, budget, elapsed, first in _settings(llm, prompt, settings, budgets, passes):
                cells = llm.kv_cells
                answer = _greedy(llm, first)
                answers.append(
                    Answer(seed, setting, budget, len(prompt), cells, 1000 * elapsed, answer, text.code in answer)
                )
                on_answer(answers[-1])
    return answers


def measure_text(
    model_path: Path,
    *,
    seeds: Iterable[int],
    settings: Sequence[str] = DEFAULT_SETTINGS,
    budgets: Sequence[int] = (1024, 512, 256),
    n_tokens: int = 4000,
    n_threads: int,
    n_gpu_layers: int = 0,
    on_text: Callable[[Divergence], None] = lambda divergence: None,
) -> list[Divergence]:
    """Compare the next tokens of a running text with the full cache's, once per setting and budget.

    Args:
        n_tokens: Length of the text before the tokens that are compared.
        on_text: Called after each comparison.

    Raises:
        ValueError: Unknown setting, a budget that does not fit it, or a text too short for n_tokens.
    """
    passes = _passes(settings, budgets)
    names = [FULL, *(name for name in settings if name != FULL)]
    with Vocabulary(model_path) as vocabulary:
        texts = {s: vocabulary.plain(haystack.running_text(s))[: n_tokens + _N_NEXT] for s in seeds}
    if any(len(text) < n_tokens + _N_NEXT for text in texts.values()):
        raise ValueError(f"n_tokens={n_tokens}: the text that ships with Python is shorter")
    found = []
    with contextlib.closing(_llama(model_path, passes, n_tokens + _N_NEXT, n_threads, n_gpu_layers)) as llm:
        for seed, text in texts.items():
            expected = np.empty(0)
            for setting, budget, _, _ in _settings(llm, text[:n_tokens], names, budgets, passes):
                logs = np.array([_log_softmax(llm, token) for token in text[n_tokens:]])
                if setting == FULL:
                    expected = logs
                    continue
                kl = float((np.exp(expected) * (expected - logs)).sum(axis=1).mean())
                same = float((expected.argmax(axis=1) == logs.argmax(axis=1)).mean())
                found.append(Divergence(seed, setting, budget, kl, same))
                on_text(found[-1])
    return found


def _passes(settings: Sequence[str], budgets: Sequence[int]) -> dict[tuple[str, int], SnapKV]:
    return {(name, b): parse_setting(name, b) for name in settings if name != FULL for b in budgets}


def _llama(
    model_path: Path, passes: dict[tuple[str, int], SnapKV], n_ctx: int, n_threads: int, n_gpu_layers: int
) -> Llama:
    window = max([config.window for config in passes.values()], default=SnapKV().window)
    return Llama(
        str(model_path),
        snapkv=SnapKV(budget=window + 1, window=window, recent=0),
        n_ctx=n_ctx,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        n_gpu_layers=n_gpu_layers,
        flash_attn=True,
        verbose=False,
    )


def _settings(
    llm: Llama,
    prompt: Sequence[int],
    settings: Sequence[str],
    budgets: Sequence[int],
    passes: dict[tuple[str, int], SnapKV],
) -> Iterator[tuple[str, int, float, int]]:
    """Evaluate the prompt once, and for each setting leave the context after its pass.

    Yields:
        Setting, budget (0 for the full cache), seconds of the pass, most likely next token.
    """
    window = llm.snapkv.window if llm.snapkv is not None else 1
    llm.reset()
    llm.eval(prompt[:-window])
    state = llm.save_state()
    for setting in settings:
        for budget in (0,) if setting == FULL else budgets:
            llm.load_state(state)
            llm.eval(prompt[-window:])
            first = llm.sample(temp=0.0)
            started = time.perf_counter()
            if setting != FULL:
                llm.compact(passes[setting, budget])
            yield setting, budget, time.perf_counter() - started, first


def _log_softmax(llm: Llama, token: int) -> npt.NDArray[np.float64]:
    """Log probabilities of the token after ``token``, [n_vocab]."""
    llm.eval([token])
    logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).astype(np.float64)
    logits -= logits.max()
    return np.asarray(logits - np.log(np.exp(logits).sum()))


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


def summarize_text(found: Iterable[Divergence]) -> dict[str, dict[int, float]]:
    """setting -> budget -> mean divergence."""
    values: dict[str, dict[int, list[float]]] = {}
    for divergence in found:
        values.setdefault(divergence.setting, {}).setdefault(divergence.budget, []).append(divergence.kl)
    return {name: {size: sum(kl) / len(kl) for size, kl in sizes.items()} for name, sizes in values.items()}


def as_json(found: Iterable[Answer] | Iterable[Divergence]) -> list[dict[str, Any]]:
    """Every measurement, as JSON takes it."""
    return [asdict(one) for one in found]
