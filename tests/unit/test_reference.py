from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapkv_gguf import reference
from snapkv_gguf.config import Pool


def brute_attention(
    q: Any, k: Any, q_pos: Any, k_pos: Any, scale: float, cap: float, cap_scale: float, sinks: Any
) -> Any:
    n_rows, n_head, _ = q.shape
    n, n_head_kv, _ = k.shape
    out = np.zeros((n_rows, n_head, n))
    for w in range(n_rows):
        for h in range(n_head):
            logits = []
            for j in range(n):
                x = float(np.dot(q[w, h], k[j, h // (n_head // n_head_kv)]))
                x = scale * (cap * math.tanh(x * cap_scale / cap) if cap else x)
                logits.append(x if k_pos[j] <= q_pos[w] else -math.inf)
            total = sum(map(math.exp, logits)) + (0 if sinks is None else math.exp(sinks[h]))
            out[w, h] = [math.exp(x) / total for x in logits]
    return out


@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 2.0, 0.0]])
@pytest.mark.parametrize(
    ("scale", "cap", "cap_scale"), [(0.3, 0.0, 1.0), (1.0, 2.0, 0.3), (0.3, 2.0, 1.0), (0.7, 2, 0.2)]
)
def test_attention(scale: float, cap: float, cap_scale: float, sinks: list[float] | None) -> None:
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(3, 4, 8)), rng.normal(size=(10, 2, 8))
    # a compacted sequence: several cells share the frontier
    k_pos, q_pos = np.array([6, 6, 6, 6, 6, 6, 6, 7, 8, 9]), np.array([7, 8, 9])
    found = reference.attention(q, k, q_pos, k_pos, scale=scale, softcap=cap, cap_scale=cap_scale, sinks=sinks)
    np.testing.assert_allclose(found, brute_attention(q, k, q_pos, k_pos, scale, cap, cap_scale, sinks), atol=1e-14)
    assert (found[0, :, 8:] == 0).all()
    totals = found.sum(axis=-1)
    assert (totals < 1).all() if sinks else np.allclose(totals, 1)


def test_attention_with_large_logits() -> None:
    q, k = np.full((1, 1, 1), 1000.0), np.array([[[1.0]], [[0.0]]])
    found = reference.attention(q, k, [1], [0, 1], scale=1.0, sinks=[5000.0])
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, 0)


def test_attention_refuses_uneven_groups() -> None:
    with pytest.raises(ValueError, match="n_head=3 is not a multiple of n_head_kv=2"):
        reference.attention(np.zeros((1, 3, 4)), np.zeros((2, 2, 4)), [1], [0, 1], scale=1.0)


scores = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40)
kernels = st.integers(0, 30).map(lambda k: 2 * k + 1)


@given(scores, kernels)
def test_pooling(values: list[float], kernel: int) -> None:
    half = kernel // 2
    for pool in ("avg", "max"):
        expected = []
        for j in range(len(values)):
            near = values[max(0, j - half) : j + half + 1]
            total = 0.0
            for value in near:
                total += value
            expected.append(total / kernel if pool == "avg" else max(near))
        # the same order of additions: not nearly, but exactly the same
        assert reference.pool_scores(values, kernel, pool).tolist() == expected  # type: ignore[arg-type]


@given(st.data())
def test_selection(data: st.DataObject) -> None:
    n_head_kv, n_group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    n = data.draw(st.integers(2, 40))
    window = data.draw(st.integers(1, n))
    recent = data.draw(st.one_of(st.just(0), st.integers(window, n)))
    budget = data.draw(st.integers(max(window, recent) + 1, n + 2))
    kernel, pool = data.draw(kernels), data.draw(st.sampled_from(["avg", "max"]))
    # few values, so that there are many ties
    sums = np.array(
        data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5]), min_size=(k := n_head_kv * n_group * n), max_size=k)),
        np.float32,
    ).reshape(-1, n)

    found = reference.select(
        sums, window=window, budget=budget, recent=recent, kernel=kernel, pool=pool, n_head_kv=n_head_kv
    )
    if n <= budget:
        assert found.tolist() == [list(range(n))] * n_head_kv
        return
    last = max(window, recent)
    for h in range(n_head_kv):
        group = []
        for g in range(n_group):
            mean = [float(x) / window for x in sums[h * n_group + g][: n - window]]
            group.append(reference.pool_scores(mean, kernel, pool))
        total = [sum(values) / n_group for values in zip(*group, strict=True)]
        best = sorted(range(n - last), key=lambda j: (-total[j], j))[: budget - last]
        assert found[h].tolist() == sorted(best) + list(range(n - last, n))


def test_candidates_see_neighbours_in_the_recent_part() -> None:
    sums = np.zeros((1, 12), np.float32)
    sums[0, 8] = 1.0  # recent, but before the window
    sums[0, 1] = 0.5
    arguments: dict[str, Any] = {"window": 2, "budget": 6, "recent": 5, "n_head_kv": 1}
    pool: Pool = "max"
    assert reference.select(sums, kernel=1, pool=pool, **arguments).tolist() == [[1, 7, 8, 9, 10, 11]]
    assert reference.select(sums, kernel=5, pool=pool, **arguments).tolist() == [[6, 7, 8, 9, 10, 11]]


def test_first_recent() -> None:
    scores = reference.first_recent_scores(8)
    found = reference.best_and_recent(scores, n=10, budget=6, recent=2)
    assert found.tolist() == [[0, 1, 2, 3, 8, 9]]
    assert reference.best_and_recent(scores, n=10, budget=7, recent=2).tolist() == [[0, 1, 2, 3, 7, 8, 9]]


def test_shared() -> None:
    layers = [[[1.0, 2.0, 0.0], [0.0, 2.0, 1.0]], [[4.0, 0.0, 0.0]]]
    assert reference.shared_scores(layers).tolist() == [[5.0, 4.0, 1.0]]


def test_random() -> None:
    scores = reference.random_scores(2000, 1, 2)
    assert scores.shape == (2, 2000)
    assert len(np.unique(scores)) == scores.size
    uniform = scores / 2**53
    assert abs(uniform.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(uniform)[0, 1]) < 0.1
    # the first output of splitmix64 seeded with 0
    assert int(reference.random_scores(1, 0, 1)[0, 0]) == 0xE220A8397B1DCDAF >> 11
