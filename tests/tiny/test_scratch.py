"""Memory that a pass needs for itself, however long the prompt is."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from devices import ROUNDING
from engine import Engine, params, random_tokens

from snapkv_gguf import _capi, tiny
from snapkv_gguf._capi import Status

LIMIT = 64 * 2**20


@pytest.mark.parametrize("budget", [100, 6000])
def test_scratch_memory_is_bounded(tmp_path: Path, budget: int) -> None:
    """Growth of the compute buffers by a pass over a prompt far longer than a slice, and the slices fit together."""
    shape = tiny.Shape(n_layer=1, n_head=16, n_head_kv=8, n_embd_head=64, n_ff=64)
    path = tiny.write_llama(tmp_path / "m.gguf", shape)
    settings = params(budget, 64)
    kept = []
    for is_pass in (True, False):
        with Engine(path, settings, n_ctx=8192, n_batch=64, n_ubatch=64) as engine:
            engine.decode(random_tokens(8000, 320))
            if is_pass:
                status, stats = engine.compact()
                assert status == Status.OK
                print(f"{stats.n_bytes_grown / 2**20:.1f} MiB")
                assert 2**20 < stats.n_bytes_grown < LIMIT
                kept.append([_capi.kept(engine.ctx, 0, 0, head) for head in range(8)])
            else:
                sums, chosen = engine.oracle(0, settings)
                assert np.abs(_capi.scores(engine.ctx, 0, 0, 64) - sums).max() <= ROUNDING * sums.max()
                kept.append(list(chosen))
    differ = sum(np.setxor1d(a, b).size for a, b in zip(*kept, strict=True)) // 2
    print(f"{differ} pairs differ by rounding")
    assert differ <= 2


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "window"),
    [(16, 8, 32), (32, 1, 8)],  # the second: one KV head is too much for a slice
)
def test_scratch_memory_at_128k_cells(tmp_path: Path, n_head: int, n_head_kv: int, window: int) -> None:
    n = 128 * 1024
    shape = tiny.Shape(n_layer=2, n_head=n_head, n_head_kv=n_head_kv, n_embd_head=32, n_ff=64, n_ctx=n)
    path = tiny.write_llama(tmp_path / "m.gguf", shape)
    settings = params(1024, window)
    with Engine(path, settings, n_ctx=n, n_batch=64, n_ubatch=64) as engine:
        engine.decode(random_tokens(256, 320))
        state = stretch(engine.seq_state(), n - window)
        engine.clear()
        assert engine.set_seq_state(state) > 0
        engine.decode(random_tokens(window, 320, seed=1), n - window)
        expected = [engine.oracle(i, settings) for i in range(2)] if window == 8 else None
        status, stats = engine.compact()
        assert (status, stats.n_cells_before, stats.n_cells_after) == (Status.OK, n, 1024)
        print(f"{stats.n_bytes_grown / 2**20:.1f} MiB")
        assert stats.n_bytes_grown <= LIMIT
        if expected:
            n_differ = sum(np.setdiff1d(_capi.kept(engine.ctx, 0, i, 0), expected[i][1][0]).size for i in range(2))
            assert n_differ <= 20, n_differ  # of 2048: among 128K scores some are equal in float32
        assert np.isfinite(engine.decode([5], n)).all()


def stretch(state: bytes, n: int) -> bytes:
    """The state of a sequence, with its rows repeated to n cells at consecutive positions."""
    head, (n_cells,) = state[:12], struct.unpack_from("I", state, 12)
    at = 16 + 12 * n_cells
    cells = np.zeros(n, dtype=[("pos", "i4"), ("n_seq", "u4"), ("seq", "i4")])
    cells["pos"], cells["n_seq"] = np.arange(n), 1
    transposed, n_layer = struct.unpack_from("II", state, at)
    assert not transposed
    out = [head, struct.pack("I", n), cells.tobytes(), state[at : at + 8]]
    at += 8
    for _ in range(2 * n_layer):  # K of all layers, V of all layers
        _, size = struct.unpack_from("=iQ", state, at)
        rows = np.frombuffer(state, np.uint8, n_cells * size, at + 12).reshape(n_cells, size)
        out += [state[at : at + 12], np.resize(rows, (n, size)).tobytes()]
        at += 12 + n_cells * size
    assert at == len(state)
    return b"".join(out)
