"""The pass in NumPy: the oracle that the C++ is tested against.

Ties, rounding and order, shared with native/: the device sums the attention of the window's rows in float32; the
host divides by the rows, pools, averages over the GQA group and compares in float64. Averages add the terms in
ascending index order, then divide by the kernel; group means add in ascending head order, then divide. Equal
scores go to the lower cell. Cells are in the order of (position, cell index).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .config import Pool

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    query_pos: npt.ArrayLike,
    key_pos: npt.ArrayLike,
    *,
    scale: float,
    softcap: float = 0.0,
    cap_scale: float = 1.0,
    sinks: npt.ArrayLike | None = None,
) -> Floats:
    """Causal softmax of the window's queries over all cells.

    Args:
        queries: [w, n_head, d], as they multiply the cached K.
        keys: [n, n_head_kv, d]; n_head must be a multiple of n_head_kv.
        query_pos: [w], positions of the rows.
        key_pos: [n], positions of the cells; a row attends to cells with a position up to its own.
        scale: Factor of q . k, after the cap.
        softcap: c in c * tanh(x / c), 0 for none.
        cap_scale: Factor of q . k before the cap; llama.cpp scales before it with flash attention, after it without.
        sinks: [n_head], one more logit per head in the denominator (gpt-oss), which takes no cell.

    Returns:
        [w, n_head, n] weights; rows sum to 1 (with sinks: to less).
    """
    q = np.asarray(queries, dtype=np.float64)
    k = np.asarray(keys, dtype=np.float64)
    n_rows, n_head, n_dim = q.shape
    n_cells, n_head_kv, _ = k.shape
    if n_head % n_head_kv != 0:
        raise ValueError(f"n_head={n_head} is not a multiple of n_head_kv={n_head_kv}")

    grouped = q.reshape(n_rows, n_head_kv, n_head // n_head_kv, n_dim)
    logits = np.einsum("whgd,nhd->whgn", grouped, k).reshape(n_rows, n_head, n_cells)
    if softcap != 0.0:
        logits = softcap * np.tanh(logits * (cap_scale / softcap))
    logits *= scale

    visible = np.asarray(key_pos)[None, :] <= np.asarray(query_pos)[:, None]
    logits = np.where(visible[:, None, :], logits, -np.inf)

    peak = logits.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = np.asarray(sinks, dtype=np.float64)[None, :, None]
        peak = np.maximum(peak, sink)
    weights: Floats = np.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sink - peak)
    weights /= total
    return weights


def pool_scores(scores: npt.ArrayLike, kernel: int, pool: Pool) -> Floats:
    """Pool over neighbouring cells with an odd kernel, zero padded, along the last axis (paper, section 4.2).

    Args:
        scores: [..., n], not negative.
    """
    x = np.asarray(scores, dtype=np.float64)
    n, half = x.shape[-1], kernel // 2
    out = np.zeros_like(x)
    for shift in range(-min(half, n), min(half, n) + 1):  # ascending neighbours
        target = slice(max(0, -shift), min(n, n - shift))
        source = slice(max(0, shift), min(n, n + shift))
        if pool == "avg":
            out[..., target] += x[..., source]
        else:
            np.maximum(out[..., target], x[..., source], out=out[..., target])
    return out / kernel if pool == "avg" else out


def group_scores(scores: npt.ArrayLike, n_head_kv: int) -> Floats:
    """Mean over the query heads that share a KV head: [n_head, n] -> [n_head_kv, n]."""
    x = np.asarray(scores, dtype=np.float64)
    n_group = x.shape[0] // n_head_kv
    grouped = x.reshape(n_head_kv, n_group, -1)
    out = np.zeros((n_head_kv, grouped.shape[-1]))
    for g in range(n_group):  # ascending heads
        out += grouped[:, g]
    out /= n_group
    return out


def top_cells(scores: npt.ArrayLike, k: int) -> Indices:
    """The k highest of each row, ties to the lower cell, in ascending order: [n_head_kv, n] -> [n_head_kv, k]."""
    x = np.asarray(scores, dtype=np.float64)
    best = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    return np.sort(best, axis=-1)


def select(
    sums: npt.ArrayLike,
    *,
    window: int,
    budget: int,
    recent: int,
    kernel: int,
    pool: Pool,
    n_head_kv: int,
) -> Indices:
    """Cells that each KV head of a layer keeps by SnapKV.

    Args:
        sums: [n_head, n], attention summed over the window's rows; the float32 sums of the device, or
            ``attention(...).sum(axis=0)``.
        window: Rows that were summed.
        budget: Cells kept, recent < budget.
        recent: Last cells kept in any case, window <= recent; 0 stands for window.
        kernel: Odd width of the pooling.
        pool: ``"max"`` or ``"avg"``.
        n_head_kv: KV heads.

    Returns:
        [n_head_kv, min(budget, n)], ascending; the last ``recent`` are the last cells.
    """
    n = np.shape(sums)[-1]
    if n <= budget:
        return np.tile(np.arange(n), (n_head_kv, 1))
    scores = window_scores(sums, window=window, kernel=kernel, pool=pool, n_head_kv=n_head_kv)
    return best_and_recent(scores, n=n, budget=budget, recent=max(recent, window))


def window_scores(sums: npt.ArrayLike, *, window: int, kernel: int, pool: Pool, n_head_kv: int) -> Floats:
    """SnapKV's scores of the prefix: [n_head_kv, n - window]."""
    x = np.asarray(sums, dtype=np.float64)
    n = x.shape[-1]
    # pooled over the whole prefix: candidates near its end still see their right neighbours
    return group_scores(pool_scores(x[:, : n - window] / window, kernel, pool), n_head_kv)


def best_and_recent(scores: npt.ArrayLike, *, n: int, budget: int, recent: int) -> Indices:
    """The best of the cells before the recent ones, and these: [n_head_kv, n - window] -> [n_head_kv, budget]."""
    candidates = np.asarray(scores, dtype=np.float64)[:, : n - recent]
    chosen = top_cells(candidates, budget - recent)
    last = np.tile(np.arange(n - recent, n), (len(candidates), 1))
    return np.concatenate([chosen, last], axis=-1)


# rules to compare with


def shared_scores(scores: Sequence[npt.ArrayLike]) -> Floats:
    """The scores of all layers [n_head_kv, n] added up: [1, n]. Dropping whole cells could do no better."""
    total = np.zeros(np.shape(scores[0])[-1])
    for layer in scores:  # ascending layers and heads
        for head in np.asarray(layer, dtype=np.float64):
            total += head
    return total[None]


def h2o_scores(sums: npt.ArrayLike, n_head_kv: int) -> Floats:
    """Heavy hitters (H2O, Zhang et al., 2023, arXiv:2306.14048): [n_head_kv, n].

    Args:
        sums: [n_head, n], attention of all tokens to each cell, summed over the tokens.
    """
    return group_scores(sums, n_head_kv)


def first_recent_scores(n: int, first: int = 4) -> Floats:
    """The first and the most recent cells (StreamingLLM, Xiao et al., 2023, arXiv:2309.17453): [1, n]."""
    scores = np.arange(n, dtype=np.float64)
    scores[:first] = n
    return scores[None]


def random_scores(n: int, i_layer: int, n_head_kv: int) -> Floats:
    """Pseudo-random by layer, head and cell, the finalizer of splitmix64: [n_head_kv, n]."""
    heads = np.arange(n_head_kv, dtype=np.uint64)[:, None]
    with np.errstate(over="ignore"):
        z = (np.uint64(i_layer) << np.uint64(48)) + (heads << np.uint64(32)) + np.arange(n, dtype=np.uint64)
        z += np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.asarray((z >> np.uint64(11)).astype(np.float64))
