"""The pass on SmolLM2 and Gemma 3: identity when off, the oracle, the answers."""

from __future__ import annotations

import itertools
import pydoc_data.topics
from pathlib import Path

import numpy as np
import pytest
from engine import CACHE_TYPES, Engine, params
from identity import digest_with

from snapkv_gguf import Llama, SnapKV, _lib, haystack
from snapkv_gguf._capi import Status
from snapkv_gguf.eval import report, runs
from snapkv_gguf.prompt import Vocabulary

import llama_cpp as L  # isort: skip

N = 900


def text_tokens(engine: Engine, n: int) -> list[int]:
    text = " ".join(pydoc_data.topics.topics.values()).encode()
    buffer = (L.llama_token * len(text))()
    vocab = L.llama_model_get_vocab(engine.model)
    found = L.llama_tokenize(vocab, text, len(text), buffer, len(text), True, False)
    assert found >= n
    return list(buffer[:n])


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fa", "no-fa"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_off_is_identical(request: pytest.FixtureRequest, pristine: Path, name: str, flash_attn: bool) -> None:
    """Prompt and 64 generated tokens, bit by bit."""
    arguments = (request.getfixturevalue(name), 300, 64, flash_attn, CACHE_TYPES["f16"])
    assert digest_with(_lib.lib_dir(), *arguments) == digest_with(pristine, *arguments)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_budget_at_least_the_prompt_is_identical(request: pytest.FixtureRequest, name: str) -> None:
    path, results = request.getfixturevalue(name), []
    for settings in (None, params(N)):
        with Engine(path, settings, n_ctx=1024, n_threads=2) as engine:
            engine.decode(text_tokens(engine, N))
            if settings is not None:
                assert engine.compact()[0] == Status.WITHIN_BUDGET
            results.append(engine.greedy(64, N))
    assert results[0][0] == results[1][0]
    assert np.array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("name", "type_kv", "flash_attn"),
    [
        ("smollm2", "f16", True),
        ("smollm2", "f16", False),
        ("smollm2", "q8_0", True),
        ("smollm2", "q4_0", True),
        ("smollm2", "iq4_nl", True),
        ("gemma3", "f16", True),
        ("gemma3", "q8_0", True),
    ],
)
def test_kept_sets_equal_the_oracle(request: pytest.FixtureRequest, name: str, type_kv: str, flash_attn: bool) -> None:
    """Every layer and head, and the bytes of their rows."""
    path, n_rounding, n_pairs = request.getfixturevalue(name), 0, 0
    with Engine(
        path,
        params(N, 32),
        n_ctx=1024,
        n_threads=2,
        flash_attn=flash_attn,
        type_k=type_kv,
        type_v=type_kv if flash_attn else "f16",
    ) as engine:
        tokens = text_tokens(engine, N)
        for settings in (params(256, 16), params(256, 32, 0, 5, "avg"), params(256, 16, 128)):
            differ, pairs = engine.check_pass(settings, tokens)
            n_rounding, n_pairs = n_rounding + differ, n_pairs + pairs
    print(f"{name} {type_kv}: {n_rounding} of {n_pairs} cells differ by rounding")
    assert n_rounding <= n_pairs // 1000


def test_every_setting(smollm2: Path) -> None:
    """Windows, kernels and pools in all combinations, with budgets and recent parts at and between their limits."""
    n, n_rounding, n_pairs = 160, 0, 0
    with Engine(smollm2, params(n, 64), n_ctx=256, n_threads=2) as engine:
        tokens = text_tokens(engine, n)
        limits = itertools.cycle([(0.0, 0), (0.3, 0), (1.0, 0), (0.5, 0.5), (1.0, 1.0), (0.2, 0.7)])
        for window, kernel, pool in itertools.product((1, 8, 32, 64), (1, 3, 5, 7, 13, 21), ("avg", "max")):
            of_budget, of_recent = next(limits)
            budget = window + 1 + round(of_budget * (n - window - 2))
            recent = window + round(of_recent * (budget - 1 - window)) if of_recent else 0
            differ, pairs = engine.check_pass(params(budget, window, recent, kernel, pool), tokens)
            n_rounding, n_pairs = n_rounding + differ, n_pairs + pairs
        # shorter than the window: all of it looks
        engine.clear()
        engine.decode(tokens[:40])
        status, stats = engine.compact(0, params(65, 64))
        assert status == Status.WITHIN_BUDGET
        assert stats.n_cells_after == 40
    print(f"{n_rounding} of {n_pairs} cells differ by rounding")
    assert n_rounding <= n_pairs // 1000


def test_answers_survive(smollm2: Path, tmp_path: Path) -> None:
    """A few samples of `snapkv eval`: a hidden code in 4K tokens of text, an eighth of the cells."""
    config = runs.Config(
        model=str(smollm2),
        tasks=("needle",),
        methods=("full", "snapkv", "w16-max21-r0", "first-recent"),
        budgets=(512,),
        lengths=(4096,),
        depths=(0.3, 0.6),
        samples=1,
        threads=2,
        cost=False,
    )
    with runs.Run(config, tmp_path, "test") as run:
        run.measure()
    records = report.load(run.folder).records
    right = {name: [r.scores["score"] for r in records if r.method == name] for name in config.methods}
    print(right)
    assert right["full"] == right["snapkv"] == right["w16-max21-r0"] == [1, 1]
    assert right["first-recent"] == [0, 0]


def test_gemma_keeps_its_sliding_window_layers(gemma3: Path) -> None:
    """Only the global layers are compacted; the answer stays right also with the small sliding-window cache."""
    with Vocabulary(gemma3) as vocabulary:
        text = haystack.build(2500, 1, vocabulary.count)
        prompt = text.prompt(vocabulary)
    for swa_full in (True, False):
        llm = Llama(
            str(gemma3),
            n_ctx=3072,
            n_threads=2,
            n_threads_batch=2,
            flash_attn=True,
            swa_full=swa_full,
            snapkv=SnapKV(budget=512),
            verbose=False,
        )
        answer = "".join(
            llm.detokenize([token]).decode(errors="replace")
            for token, _ in zip(llm.generate(prompt, temp=0.0), range(12), strict=False)
        )
        assert text.code in answer
        assert llm.snapkv_stats is not None
        assert llm.snapkv_stats.cells_after == 512
        llm.close()
