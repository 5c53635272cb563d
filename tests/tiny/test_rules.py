"""The rules that SnapKV is compared with, each against its oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine import Engine, params, random_tokens

from snapkv_gguf import _capi, reference
from snapkv_gguf._capi import Status

N, BUDGET, WINDOW, RECENT = 300, 96, 16, 32


def expected(engine: Engine, rule: str) -> list[np.ndarray]:
    """By layer, the cells that each KV head is to keep."""
    layers = _capi.layers(engine.ctx)
    n_prefix = N - WINDOW
    by_layer: list[np.ndarray]
    if rule == "first-recent":
        by_layer = [reference.first_recent_scores(n_prefix)] * len(layers)
    elif rule == "h2o":
        assert _capi.observe(engine.ctx, 0) == Status.OK
        ends = np.cumsum([layer.n_head_kv for layer in layers])
        by_layer = [sums[:, :n_prefix] for sums in np.split(_capi.observed(engine.ctx, 0), ends[:-1])]
    elif rule == "random":
        by_layer = [reference.random_scores(n_prefix, i, layer.n_head_kv) for i, layer in enumerate(layers)]
    else:
        by_layer = [
            reference.window_scores(
                _capi.scores(engine.ctx, 0, i, WINDOW), window=WINDOW, kernel=7, pool="max", n_head_kv=layer.n_head_kv
            )
            for i, layer in enumerate(layers)
        ]
    if rule == "shared":
        by_layer = [reference.shared_scores(by_layer)] * len(layers)
    return [
        np.resize(reference.best_and_recent(scores, n=N, budget=BUDGET, recent=RECENT), (layer.n_head_kv, BUDGET))
        for scores, layer in zip(by_layer, layers, strict=True)
    ]


@pytest.mark.parametrize("rule", _capi.RULES)
@pytest.mark.parametrize("name", ["llama", "gemma4", "lfm2"])
def test_every_rule(models: dict[str, Path], name: str, rule: str) -> None:
    settings = params(BUDGET, WINDOW, RECENT, 7, rule=rule)
    with Engine(models[name], params(N, WINDOW, rule=rule), n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320, seed=2))
        before, kept = engine.cells(), expected(engine, rule)
        assert engine.compact(0, settings)[0] == Status.OK
        after = engine.cells()
        for i, heads in enumerate(kept):
            for head, cells in enumerate(heads):
                assert _capi.kept(engine.ctx, 0, i, head).tolist() == before.pos[cells].tolist()
                for old, new in zip(before.rows[i], after.rows[i], strict=True):
                    assert np.array_equal(new[:, head], old[cells, head])
        assert np.isfinite(engine.decode([5], N)).all()


# h2o adds up the attention of all tokens, a batch at a time


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fa", "no-fa"])
@pytest.mark.parametrize("parts", [[300], [100, 100, 100], [1, 98, 100, 100, 1]], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma4", "lfm2"])
def test_h2o_sums(models: dict[str, Path], name: str, parts: list[int], flash_attn: bool) -> None:
    tokens = random_tokens(N, 320, seed=3)
    with Engine(models[name], params(N + 1, N, rule="h2o"), n_ctx=512, flash_attn=flash_attn) as engine:
        done = 0
        for n in parts:
            engine.decode(tokens[done : done + n], done)
            done += n
            if done < N:  # the pass observes the rest
                assert _capi.observe(engine.ctx, 0) == Status.OK
                assert _capi.observe(engine.ctx, 0) == Status.OK  # nothing new
        expected_sums = np.concatenate(
            [
                reference.h2o_scores(engine.oracle(i, params(N + 1, N))[0], layer.n_head_kv)
                for i, layer in enumerate(_capi.layers(engine.ctx))
            ]
        )
        assert _capi.observe(engine.ctx, 0) == Status.OK
        sums = _capi.observed(engine.ctx, 0)
        assert sums.shape == expected_sums.shape
        assert np.abs(sums - expected_sums).max() <= 1e-5 * expected_sums.max()
        assert sums.sum() == pytest.approx(expected_sums.sum(), rel=1e-5)

        status, _ = engine.compact(0, params(BUDGET, WINDOW, RECENT, rule="h2o"))
        assert status == Status.OK
        # the sums of what was kept go on
        kept = reference.best_and_recent(sums[:, : N - WINDOW], n=N, budget=BUDGET, recent=RECENT)
        assert np.array_equal(_capi.observed(engine.ctx, 0), np.take_along_axis(sums, kept, axis=1))
        engine.decode(tokens[:5], N)
        assert engine.compact(0, params(BUDGET, WINDOW, RECENT, rule="h2o"))[0] == Status.OK
        assert _capi.observed(engine.ctx, 0).shape[1] == BUDGET


def test_h2o_without_all_the_attention(models: dict[str, Path]) -> None:
    rule = params(BUDGET, WINDOW, RECENT, rule="h2o")
    tokens = random_tokens(N, 320, seed=4)
    with Engine(models["llama"], params(N, WINDOW), n_ctx=512) as engine:
        engine.decode(tokens)
        assert _capi.observe(engine.ctx, 0) == Status.NOT_OBSERVED  # another rule at the start
        assert engine.compact(0, rule)[0] == Status.NOT_OBSERVED
        assert engine.n_cells() == N
    with Engine(models["llama"], params(N, WINDOW, rule="h2o"), n_ctx=512, n_ubatch=64) as engine:
        engine.decode(tokens)  # more than n_ubatch since the last call
        assert engine.compact(0, rule)[0] == Status.NOT_OBSERVED
        assert engine.n_cells() == N
        engine.clear()
        for start in range(0, N, 50):
            engine.decode(tokens[start : start + 50], start)
            assert _capi.observe(engine.ctx, 0) == Status.OK
        sums = _capi.observed(engine.ctx, 0)
        state = engine.seq_state()
        assert engine.seq_rm(N - 10)  # the others hold what these attended to
        assert _capi.observed(engine.ctx, 0).size == 0
        engine.decode(tokens[N - 10 :], N - 10)
        assert engine.compact(0, rule)[0] == Status.NOT_OBSERVED
        # a state does not hold the sums, they can be given back
        engine.set_seq_state(state)
        assert _capi.observed(engine.ctx, 0).size == 0
        with pytest.raises(RuntimeError, match="do not fit"):
            _capi.set_observed(engine.ctx, 0, np.zeros((len(sums), N + 1)))
        with pytest.raises(RuntimeError, match="do not fit"):
            _capi.set_observed(engine.ctx, 0, sums[1:, :7])
        _capi.set_observed(engine.ctx, 0, sums)
        assert np.array_equal(_capi.observed(engine.ctx, 0), sums)
        engine.decode([7], N)
        assert engine.compact(0, rule)[0] == Status.OK
        engine.clear()
        assert _capi.observed(engine.ctx, 0).size == 0


def test_h2o_over_many_slices(models: dict[str, Path]) -> None:
    """A prompt whose logits do not fit into one slice of scratch memory."""
    n = 4000
    tokens = random_tokens(n, 320, seed=5)
    with Engine(models["llama"], params(n, WINDOW, rule="h2o"), n_ctx=4096) as engine:
        for start in range(0, n, 500):
            engine.decode(tokens[start : start + 500], start)
            assert _capi.observe(engine.ctx, 0) == Status.OK
        sums = _capi.observed(engine.ctx, 0)
        # each token gives away a weight of 1
        assert np.allclose(sums.sum(axis=1), n, rtol=1e-5)
        status, stats = engine.compact(0, params(BUDGET, WINDOW, RECENT, rule="h2o"))
        assert status == Status.OK
        assert stats.n_bytes_grown <= 64 << 20


def test_names() -> None:
    assert [_capi.rule_name(i) for i in range(len(_capi.RULES) + 1)] == [*_capi.RULES, ""]


def test_a_rule_that_does_not_exist() -> None:
    wrong = params(BUDGET, WINDOW)
    for wrong.rule in (-1, len(_capi.RULES)):
        assert "rule" in _capi.params_check(wrong)
