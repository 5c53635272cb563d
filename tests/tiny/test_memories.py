"""Hybrids, shared layers, images' positions; no part of a memory changes when another one refuses."""

from __future__ import annotations

from pathlib import Path

import devices
import numpy as np
import pytest
from devices import ROUNDING
from engine import Engine, params, random_tokens

from snapkv_gguf import _capi
from snapkv_gguf._capi import Status

N, BUDGET, WINDOW = 200, 64, 16
FRONTIER = N - WINDOW - 1
SETTINGS = params(BUDGET, WINDOW, kernel=7)


def test_layers_that_share_keys_and_values(models: dict[str, Path]) -> None:
    with Engine(models["gemma4"], SETTINGS, n_ctx=512) as engine:
        layers = _capi.layers(engine.ctx)
        assert [[reader.il for reader in layer.readers] for layer in layers] == [[1], [3, 5]]
        assert layers[1].n_head == 2 * layers[0].n_head
        engine.decode(random_tokens(N, 320))
        own, others = (_capi.queries(engine.ctx, 0, 1, r) for r in range(2))
        assert not np.allclose(own, others)


@pytest.mark.parametrize("n_ubatch", [512, 48, 7])
@pytest.mark.parametrize("name", ["gemma4", "lfm2", "qwen2vl"])
def test_every_kind(models: dict[str, Path], name: str, n_ubatch: int) -> None:
    with Engine(models[name], params(N, 32), n_ctx=512, n_ubatch=n_ubatch) as engine:
        for settings in (params(100, 16), params(64, 32, 40, 5, "avg")):
            engine.check_pass(settings, random_tokens(N, 320, seed=4))
            assert np.isfinite(engine.decode([5], N)).all()


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fa", "no-fa"])
@pytest.mark.parametrize("name", ["llama", "gemma4", "lfm2"])
def test_a_cache_that_is_not_offloaded(models: dict[str, Path], name: str, flash_attn: bool) -> None:
    """The layers are where SNAPKV_TEST_DEVICE says, their cache on the host."""
    with Engine(models[name], params(N, 32), n_ctx=512, offload_kqv=False, flash_attn=flash_attn) as engine:
        engine.check_pass(params(100, 16), random_tokens(N, 320, seed=4))
        assert np.isfinite(engine.decode([5], N)).all()


def test_a_hybrid_keeps_its_state(models: dict[str, Path]) -> None:
    """What is refused changes neither the cells nor the recurrent state."""
    tokens = random_tokens(N, 320)
    with Engine(models["lfm2"], SETTINGS, n_ctx=512) as engine, Engine(models["lfm2"], SETTINGS, n_ctx=512) as other:
        for each in (engine, other):
            each.decode(tokens)
            assert each.compact()[0] == Status.OK
            assert (each.frontier(), each.pos_min(), each.pos_max()) == (FRONTIER, N - 1, N - 1)
        for p0, p1 in ((0, N - 1), (FRONTIER, -1), (10, 20), (N - 5, -1), (N - 1, -1)):
            assert not engine.seq_rm(p0, p1)  # the last two: a recurrent state cannot go back
        assert np.array_equal(engine.decode([7], N), other.decode([7], N))
        assert engine.seq_rm(0)
        assert (engine.n_cells(), engine.frontier(), engine.pos_max()) == (0, -1, -1)


def test_a_hybrid_is_restored(models: dict[str, Path]) -> None:
    with Engine(models["lfm2"], SETTINGS, n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320))
        assert engine.compact()[0] == Status.OK
        state = engine.seq_state()
        expected = engine.decode([7], N)
    with Engine(models["lfm2"], SETTINGS, n_ctx=128) as engine:
        assert engine.set_seq_state(state) > 0
        assert engine.frontier() == FRONTIER
        assert np.array_equal(engine.decode([7], N), expected)


@devices.needs_abort
@pytest.mark.parametrize("name", ["lfm2", "gemma3"])
def test_a_lost_sequence_is_gone_from_every_part(models: dict[str, Path], name: str) -> None:
    """An abort in the middle of the moves."""
    with Engine(models[name], SETTINGS, n_ctx=512) as engine:
        for n_calls in range(1000):
            engine.clear()
            engine.decode(random_tokens(N, 320))
            with engine.aborting_after(n_calls):
                status, _ = engine.compact()
            if status == Status.SEQUENCE_LOST:
                break
        assert status == Status.SEQUENCE_LOST
        assert (engine.n_cells(), engine.frontier(), engine.pos_min(), engine.pos_max()) == (0, -1, -1, -1)
        engine.decode(random_tokens(N, 320))  # from the beginning, in all parts
        assert engine.compact()[0] == Status.OK


@pytest.mark.parametrize("n_ubatch", [512, 48])
@pytest.mark.parametrize("n_after", [8, 16, 40])
def test_images(models: dict[str, Path], n_after: int, n_ubatch: int) -> None:
    """The tokens of an image share one position: none of them is taken for a token of the window."""
    n_before, (width, height) = 100, (8, 6)
    with Engine(models["qwen2vl"], SETTINGS, n_ctx=512, n_ubatch=n_ubatch) as engine:
        engine.decode(random_tokens(n_before, 320))
        engine.decode_image(width, height, n_before)
        # the next position is beyond the image's sides
        start = n_before + max(width, height)
        engine.decode(random_tokens(n_after, 320, seed=1), start)
        n = n_before + width * height + n_after
        assert engine.n_cells() == n

        n_window = min(n_after, WINDOW)
        found = params(BUDGET, n_window, kernel=7)
        sums, chosen = engine.oracle(0, found)
        assert np.allclose(_capi.scores(engine.ctx, 0, 0, n_window), sums, atol=ROUNDING * sums.max())
        positions = _capi.cells(engine.ctx, 0)[0]

        status, stats = engine.compact()
        assert (status, stats.n_cells_before, stats.n_window) == (Status.OK, n, n_window)
        if n_window == WINDOW and devices.DEVICE != "gpu":
            assert np.array_equal(_capi.kept(engine.ctx, 0, 0, 0), positions[chosen[0]])
        assert engine.frontier() == start + n_after - 1 - n_window
        assert engine.pos_max() == start + n_after - 1
        engine.decode([5], start + n_after)
        # a second image, and a pass right after it: no query of its last position is anyone's own
        engine.decode_image(width, height, start + n_after + 1)
        assert engine.compact()[0] == Status.NO_QUERIES
        engine.decode([5, 6, 7], start + n_after + 1 + width)
        status, stats = engine.compact()
        assert (status, stats.n_window) == (Status.OK, 3)
