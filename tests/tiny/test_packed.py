"""Kept keys rotated to consecutive positions, against llama.cpp's own RoPE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine import Engine, params, random_tokens

from snapkv_gguf import _capi, tiny
from snapkv_gguf._capi import Status

N_CTX, BUDGET, WINDOW = 256, 64, 16
SHAPE = tiny.Shape(n_layer=2, n_embd_head=64, n_ff=64)


def packed(budget: int = BUDGET, window: int = WINDOW, **kwargs: object) -> _capi.Params:
    return params(budget, window, positions="packed", **kwargs)  # type: ignore[arg-type]


def check_first_layer(engine: Engine, path: Path, tokens: list[int], tolerance: float, **kwargs: object) -> None:
    """In the model's first layer a token's key depends on the token and its position only: what was rotated must be the
    key that llama.cpp computes for the kept token at its new position."""
    rotated = _capi.rotated(engine.ctx, 0)
    assert np.all(np.diff(rotated) == 1)
    layer = _capi.layers(engine.ctx)[0]
    found = _capi.rows_f32(engine.ctx, 0, 0, 0)
    values = _capi.rows_f32(engine.ctx, 0, 0, 1)
    start, n = int(rotated[0]), len(rotated)
    for head in range(layer.n_head_kv):
        kept = _capi.kept(engine.ctx, 0, 0, head)
        with Engine(path, params(N_CTX - 1), n_ctx=N_CTX + start, **kwargs) as fresh:
            fresh.decode([tokens[pos] for pos in kept], start)
            expected = _capi.rows_f32(fresh.ctx, 0, 0, 0)[:n, head]
            assert np.abs(found[:, head] - expected).max() <= tolerance * np.abs(expected).max()
            assert np.abs(values[:, head] - _capi.rows_f32(fresh.ctx, 0, 0, 1)[:n, head]).max() <= 1e-3
            # and not merely because positions do not matter
            moved = np.abs(found[1:, head] - expected[:-1]).max()
            assert moved > 10 * tolerance * np.abs(expected).max()


@pytest.mark.parametrize(("type_k", "tolerance"), [("f32", 5e-5), ("f16", 3e-3), ("bf16", 3e-2), ("q8_0", 3e-2)])
def test_one_pass(tmp_path: Path, type_k: str, tolerance: float) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf", SHAPE)
    tokens = random_tokens(200, 320)
    with Engine(path, packed(), n_ctx=N_CTX, type_k=type_k, type_v="f16") as engine:
        engine.decode(tokens)
        assert engine.compact(0)[0] == Status.OK
        assert (engine.n_cells(), engine.pos_max(), engine.frontier()) == (BUDGET, BUDGET - 1, BUDGET - WINDOW - 1)
        assert _capi.n_tokens(engine.ctx, 0) == 200
        assert _capi.rotated(engine.ctx, 0).tolist() == list(range(BUDGET))
        check_first_layer(engine, path, tokens, tolerance, type_k=type_k, type_v="f16")


def test_many_passes(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf", SHAPE)
    tokens = random_tokens(4000, 320, seed=1)
    with Engine(path, packed(), n_ctx=N_CTX, type_k="f32", type_v="f32") as engine:
        status, stats = _capi.prefill(engine.ctx, 0, tokens, chunk=64, probe=20)
        assert (status, stats.n_passes > 20) == (Status.OK, True)
        assert engine.pos_max() == engine.n_cells() - 1 < N_CTX
        assert _capi.n_tokens(engine.ctx, 0) == 4000
        check_first_layer(engine, path, tokens, 5e-4, type_k="f32", type_v="f32")
        # another text's rows would differ
        kept = _capi.kept(engine.ctx, 0, 0, 0)
        assert kept[-20:].tolist() == list(range(3980, 4000))
        assert np.all(np.diff(kept) > 0)


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_scaled_rope(tmp_path: Path, scaling: str) -> None:
    kind = {"linear": 1, "yarn": 2}[scaling]
    path = tiny.write_llama(tmp_path / "m.gguf", SHAPE)
    tokens = random_tokens(200, 320, seed=2)
    with Engine(path, packed(), n_ctx=N_CTX, type_k="f32", type_v="f32", rope_scaling=kind) as engine:
        engine.decode(tokens)
        assert engine.compact(0)[0] == Status.OK
        check_first_layer(engine, path, tokens, 5e-5, type_k="f32", type_v="f32", rope_scaling=kind)


def test_rope_of_halves_beside_a_sliding_window(tmp_path: Path) -> None:
    """Gemma: pairs from both halves of a head, another base per kind of layer; the window's layers move along."""
    shape = tiny.Shape(n_layer=6, n_embd_head=64, n_ff=64)
    path = tiny.write_gemma3(tmp_path / "m.gguf", shape)
    tokens = random_tokens(200, 320, seed=3)
    with Engine(path, packed(), n_ctx=N_CTX, n_batch=64, n_ubatch=32, swa_full=False) as engine:
        engine.decode(tokens)
        assert engine.compact(0)[0] == Status.OK
        # room for what the sliding window holds before the kept cells
        assert _capi.rotated(engine.ctx, 0).tolist() == list(range(shape.n_swa, shape.n_swa + BUDGET))
        assert engine.pos_max() == shape.n_swa + BUDGET - 1
        logits = engine.greedy(30, engine.pos_max() + 1)[1]
        assert np.isfinite(logits).all()


def test_the_distances_are_all_that_counts(tmp_path: Path) -> None:
    """A sequence moved as a whole goes on as before: all layers, also those of the sliding window, were moved alike."""
    for write, options in (
        (tiny.write_llama, {}),
        (tiny.write_gemma3, {"swa_full": False}),
        (tiny.write_gemma3, {"swa_full": True}),
    ):
        path = write(tmp_path / f"{write.__name__}.gguf", tiny.Shape(n_layer=6, n_embd_head=64, n_ff=64))
        tokens, rows = random_tokens(150, 320, seed=4), []
        for positions in ("true", "packed"):
            settings = params(149, WINDOW, recent=148, positions=positions)  # all but one
            with Engine(path, settings, n_ctx=N_CTX, n_batch=64, n_ubatch=32, type_k="f32", **options) as engine:
                engine.decode(tokens, 1000)
                assert engine.compact(0)[0] == Status.OK
                rows.append([engine.decode([t], engine.pos_max() + 1) for t in tokens[:20]])
                assert engine.pos_max() < 400 if positions == "packed" else engine.pos_max() == 1169
        assert np.abs(np.array(rows[0]) - np.array(rows[1])).max() < 2e-2 * np.abs(rows[0]).max()


def test_longer_than_the_trained_context(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_layer=2, n_embd_head=64, n_ff=64, n_ctx=512))
    tokens = random_tokens(3000, 320, seed=5)
    with Engine(path, params(BUDGET), n_ctx=N_CTX) as engine:
        assert _capi.n_pos_max(engine.ctx) == 512
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64)[0] == Status.BEYOND_CONTEXT
    with Engine(path, packed(), n_ctx=N_CTX) as engine:
        assert _capi.n_pos_max(engine.ctx) == 2**31 - 1
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64)[0] == Status.OK
        for _ in range(1000):
            assert _capi.prefill(engine.ctx, 0, [7], probe=0)[0] == Status.OK
        assert engine.pos_max() < N_CTX
        assert _capi.n_tokens(engine.ctx, 0) == 4000


@pytest.mark.parametrize("n_ubatch", [128, 16])
@pytest.mark.parametrize(("name", "n_swa"), [("gemma3", 64), ("lfm2", 0)])
def test_what_is_not_compacted_moves_too(models: dict[str, Path], name: str, n_swa: int, n_ubatch: int) -> None:
    """Also where the probe's part of it was saved before and restored after."""
    tokens = random_tokens(1500, 320, seed=9)
    with Engine(models[name], packed(), n_ctx=N_CTX, n_batch=128, n_ubatch=n_ubatch, swa_full=False) as engine:
        for n in (1000, 400, 100):
            status, _ = _capi.prefill(engine.ctx, 0, tokens[:n], chunk=64, probe=90)
            assert status == Status.OK
            assert engine.pos_max() == _capi.cells(engine.ctx, 0)[0][-1] < N_CTX + n_swa
        assert _capi.n_tokens(engine.ctx, 0) == 1500


def test_scores_see_the_rotated_keys(models: dict[str, Path]) -> None:
    """The next pass's scores are those of the oracle on what is there."""
    tokens = random_tokens(600, 320, seed=6)
    with Engine(models["llama"], packed(kernel=5), n_ctx=N_CTX) as engine:
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64, probe=20)[0] == Status.OK
        engine.compact(0)
        engine.decode(tokens[:100], engine.pos_max() + 1)
        settings = packed(kernel=5)
        chosen = engine.chosen(settings)
        assert engine.compact(0)[0] == Status.OK
        for i in range(3):
            for head in range(2):
                assert np.array_equal(
                    _capi.kept(engine.ctx, 0, i, head), chosen.origin[i][head][chosen.device[i][head]]
                )


def test_states(models: dict[str, Path]) -> None:
    """A packed sequence goes on after it was restored; one that was not packed cannot be packed any more."""
    tokens = random_tokens(600, 320, seed=7)
    with Engine(models["llama"], packed(), n_ctx=N_CTX) as engine:
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64, probe=20)[0] == Status.OK
        engine.compact(0)
        n_cells, frontier, rotated = engine.n_cells(), engine.frontier(), _capi.rotated(engine.ctx, 0)
        state = engine.seq_state(0)
        engine.clear()
        assert engine.set_seq_state(state, 0)
        assert (engine.n_cells(), engine.frontier()) == (n_cells, frontier)
        assert np.array_equal(_capi.rotated(engine.ctx, 0), rotated)
        assert _capi.prefill(engine.ctx, 0, tokens[:300], chunk=64, probe=20)[0] == Status.OK
        assert np.array_equal(np.diff(_capi.rotated(engine.ctx, 0)), np.ones(engine.n_cells() - 1))
    with Engine(models["llama"], params(BUDGET), n_ctx=N_CTX) as engine:
        engine.decode(tokens[:200])
        engine.compact(0)
        state = engine.seq_state(0)
    with Engine(models["llama"], packed(), n_ctx=N_CTX) as engine:
        assert engine.set_seq_state(state, 0)
        assert _capi.rotated(engine.ctx, 0).size == 0
        engine.decode(tokens[:20], 200)
        assert engine.compact(0)[0] == Status.NOT_PACKED
        assert _capi.prefill(engine.ctx, 0, tokens[:300], chunk=64)[0] == Status.NOT_PACKED
        assert engine.n_cells() == BUDGET + 20


def test_copies(models: dict[str, Path]) -> None:
    tokens = random_tokens(600, 320, seed=8)
    with Engine(models["llama"], packed(), n_ctx=2 * N_CTX, n_seq_max=2, unified=False) as engine:
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64, probe=20)[0] == Status.OK
        engine.compact(0)
        engine.seq_cp(0, 1)
        assert np.array_equal(_capi.rotated(engine.ctx, 1), _capi.rotated(engine.ctx, 0))
        assert _capi.n_tokens(engine.ctx, 1) == 600
        assert _capi.prefill(engine.ctx, 1, tokens, chunk=64, probe=20)[0] == Status.OK
        engine.seq_rm(-1, -1, 1)
        assert _capi.n_tokens(engine.ctx, 1) == 0


@pytest.mark.parametrize("name", ["qwen2vl", "mpt", "mamba"])
def test_refused(models: dict[str, Path], name: str) -> None:
    expected = {"qwen2vl": Status.UNSUPPORTED_POSITIONS}
    with Engine(models[name], None, n_ctx=N_CTX) as engine:
        status = _capi.init(engine.ctx, packed())
        assert status == expected.get(name, _capi.supported(engine.ctx))
        assert status != Status.OK
        engine.decode(random_tokens(5, 320))


def test_a_budget_of_the_window_alone(models: dict[str, Path]) -> None:
    with Engine(models["llama"], None, n_ctx=N_CTX) as engine:
        assert _capi.init(engine.ctx, packed(WINDOW + 1)) == Status.INVALID_PARAMS
        assert _capi.init(engine.ctx, packed(WINDOW + 2)) == Status.OK
        engine.decode(random_tokens(100, 320))
        assert engine.compact(0)[0] == Status.OK
        assert engine.frontier() == 1
