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
    with Engine(models[name], params(N, WINDOW), n_ctx=512) as engine:
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


def test_names() -> None:
    assert [_capi.rule_name(i) for i in range(len(_capi.RULES) + 1)] == [*_capi.RULES, ""]


def test_a_rule_that_does_not_exist() -> None:
    wrong = params(BUDGET, WINDOW)
    for wrong.rule in (-1, len(_capi.RULES)):
        assert "rule" in _capi.params_check(wrong)
