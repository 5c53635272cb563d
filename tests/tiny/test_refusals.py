"""What cannot be compacted says why; what fails leaves a usable context."""

from __future__ import annotations

from pathlib import Path

import devices
import numpy as np
import pytest
from engine import Engine, params, random_tokens

from snapkv_gguf import _capi
from snapkv_gguf._capi import Status

N, BUDGET, WINDOW = 200, 64, 16
SETTINGS = params(BUDGET, WINDOW, kernel=7)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("mamba", Status.UNSUPPORTED_RECURRENT),
        ("mpt", Status.UNSUPPORTED_ALIBI),
        ("bert", Status.UNSUPPORTED_ENCODER),
    ],
)
def test_models_that_cannot(models: dict[str, Path], name: str, status: Status) -> None:
    with Engine(models[name], SETTINGS, n_ctx=256) as engine:
        assert _capi.supported(engine.ctx) == status
        assert engine.init_status == status
        assert engine.compact()[0] == Status.NOT_ENABLED
        assert _capi.ring_size(engine.ctx) == 0
        assert len(_capi.status_str(status)) > 20
        if name != "bert":
            engine.decode(random_tokens(20, 300))  # goes on as if nothing had been asked


def test_a_context_for_embeddings(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, embeddings=True) as engine:
        assert engine.init_status == Status.UNSUPPORTED_EMBEDDINGS


def test_without_init(models: dict[str, Path]) -> None:
    with Engine(models["llama"]) as engine:
        assert _capi.supported(engine.ctx) == Status.OK
        engine.decode(random_tokens(N, 320))
        assert engine.compact()[0] == Status.NOT_ENABLED
        assert engine.n_cells() == N


def test_a_context_that_holds_tokens(models: dict[str, Path]) -> None:
    with Engine(models["llama"], n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320))
        assert _capi.init(engine.ctx, SETTINGS) == Status.NOT_EMPTY
        engine.clear()
        assert _capi.init(engine.ctx, SETTINGS) == Status.OK
        engine.decode(random_tokens(N, 320))
        assert engine.compact()[0] == Status.OK
        engine.clear()
        assert _capi.init(engine.ctx, params(100, 32)) == Status.OK  # again, with other parameters
        engine.decode(random_tokens(N, 320))
        assert engine.compact()[1].n_window == 32


@pytest.mark.parametrize(
    "wrong",
    [
        params(64, 0),
        params(64, 64),
        params(64, 5000),
        params(0, 16),
        params(16, 16),
        params(64, 16, kernel=0),
        params(64, 16, kernel=4),
        params(64, 16, recent=8),
        params(64, 16, recent=64),
        params(2**31, 16),
        params(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),
        _capi.Params(64, 16, 0, 5, 2),
        _capi.Params(64, 16, 0, 5, -1),
    ],
)
def test_wrong_parameters(models: dict[str, Path], wrong: _capi.Params) -> None:
    assert _capi.params_check(wrong)
    with Engine(models["llama"], wrong) as engine:
        assert engine.init_status == Status.INVALID_PARAMS
        assert _capi.init(engine.ctx, SETTINGS) == Status.OK
        engine.decode(random_tokens(N, 320))
        assert engine.compact(0, wrong)[0] == Status.INVALID_PARAMS
        assert engine.n_cells() == N


def test_a_kernel_wider_than_the_prefix(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320))
        for kernel in (N - WINDOW, 2 * N + 1, 2**30 - 1):
            wide = params(BUDGET, WINDOW, kernel=kernel | 1, pool="avg")
            expected = engine.oracle(0, wide)[1] if kernel < 1000 else None
            engine.clear()
            engine.decode(random_tokens(N, 320))
            assert engine.compact(0, wide)[0] == Status.OK
            if expected is not None:
                assert np.array_equal(_capi.kept(engine.ctx, 0, 0, 0), expected[0])
            engine.clear()
            engine.decode(random_tokens(N, 320))


@devices.needs_abort
def test_an_abort_at_any_moment(models: dict[str, Path]) -> None:
    """Before the moves: nothing was changed. In the middle of them: the sequence is gone, and that is said."""
    seen = set()
    with Engine(models["llama"], SETTINGS, n_ctx=512) as engine:
        n_calls, n_max = 0, None
        while n_max is None or n_calls < n_max:
            engine.clear()
            engine.decode(random_tokens(N, 320))
            before = engine.cells()
            with engine.aborting_after(n_calls) as calls:
                status, _ = engine.compact()
            seen.add(status)
            if status == Status.OK:
                n_max = calls[0]
                break
            if status == Status.ABORTED:
                after = engine.cells()
                assert np.array_equal(before.pos, after.pos)
                assert all(np.array_equal(a[0], b[0]) for a, b in zip(before.rows, after.rows, strict=True))
                assert engine.compact()[0] == Status.OK
            else:
                assert status == Status.SEQUENCE_LOST
                assert (engine.n_cells(), engine.frontier(), engine.pos_max()) == (0, -1, -1)
            n_calls += 1
        # whatever happened, the next prompt works
        engine.clear()
        engine.decode(random_tokens(N, 320))
        assert engine.compact()[0] == Status.OK
        engine.decode([5], N)
    assert seen == {Status.OK, Status.ABORTED, Status.SEQUENCE_LOST}


@devices.needs_abort
def test_an_aborted_prompt_then_the_next(models: dict[str, Path]) -> None:
    tokens = random_tokens(400, 320)
    with Engine(models["llama"], SETTINGS, n_ctx=512, n_batch=64, n_ubatch=32) as engine:
        with Engine(models["llama"], SETTINGS, n_ctx=512, n_batch=64, n_ubatch=32) as other:
            other.decode(tokens)
            other.compact()
            expected = other.decode([5], 400)
        for n_calls in range(0, 200, 17):
            with engine.aborting_after(n_calls):
                engine.try_decode(tokens)
            engine.seq_rm(-1)
            engine.decode(tokens)
            assert engine.compact()[0] == Status.OK
            assert np.array_equal(engine.decode([5], 400), expected)
            engine.seq_rm(-1)


def test_a_cache_that_is_full(models: dict[str, Path]) -> None:
    """The pass needs no free cell."""
    with Engine(models["llama"], SETTINGS, n_ctx=256) as engine:
        engine.decode(random_tokens(256, 320))
        assert engine.try_decode([5], 256) == 1
        assert engine.compact()[0] == Status.OK
        engine.decode([5], 256)
