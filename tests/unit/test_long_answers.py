"""Answers many times as long as the cells: no error, no growth, no slow-down."""

from __future__ import annotations

import contextlib
import itertools
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import logits, make, tokens_of

from snapkv_gguf import SnapKV, models, tiny

pytestmark = pytest.mark.usefixtures("library")

N_CTX, BUDGET = 2048, 1024
TEXT = "".join(f"Line {i}: the quick brown fox jumps over lazy dog {i * i}. " for i in range(60))


def resident() -> int:
    """Bytes; where /proc is missing, the most there ever were."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "positions", "n"),
    [
        ("tiny", "true", 6_000),
        ("tiny", "packed", 6_000),
        pytest.param("tiny", "true", 50_000, marks=SLOW),
        pytest.param("smollm2", "packed", 50_000, marks=SLOW),
    ],
)
def test_generation_goes_on(name: str, positions: Any, n: int, tmp_path: Path) -> None:
    path = models.get_model(name) if name != "tiny" else tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_ctx=65536))
    config = SnapKV(BUDGET, chunk=512, positions=positions)
    with contextlib.closing(make(path, config, n_ctx=N_CTX, n_batch=512, seed=1)) as llm:
        prompt = tokens_of(llm, TEXT)
        # sampled, so that the answer does not run in a circle
        generator = llm.generate(prompt, temp=1.0)
        sizes, milliseconds = [], []
        for _ in range(10):
            started = time.perf_counter()
            for token in itertools.islice(generator, n // 10):
                assert 0 <= token < llm.n_vocab()
            milliseconds.append(1000 * (time.perf_counter() - started) / (n // 10))
            assert BUDGET <= llm.kv_cells <= N_CTX
            assert np.isfinite(logits(llm)).all()
            sizes.append(resident())
        generator.close()
        assert llm.n_tokens == len(prompt) + n - 1
        # after a pass, as many tokens as there are cells beside the budget
        assert llm.snapkv_stats.answer_passes == (n - 1 - (N_CTX - BUDGET) - 1) // (N_CTX - BUDGET) + 1
        # tokens themselves are 4 bytes each, and no more may stay of them
        assert sizes[-1] - sizes[2] < 2**20 + 8 * n
    print(
        f"\n{name}, {positions}: ms per token by tenths {[round(ms, 2) for ms in milliseconds]}, "
        f"resident MiB {[round(size / 2**20, 1) for size in sizes]}"
    )
