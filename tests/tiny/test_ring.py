"""Which queries a pass may use: never those of other positions (docs/adr/0002)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine import Engine, params, random_tokens

from snapkv_gguf import _capi
from snapkv_gguf._capi import Status

N, BUDGET, WINDOW = 120, 64, 16
SLACK = _capi.RING_SLACK
SETTINGS = params(BUDGET, WINDOW, kernel=7)


def queries_by_position(path: Path, tokens: list[int], n_ubatch: int = 512) -> np.ndarray:
    """The last layer's queries of a plain run with a window as long as the prompt, [n, n_head, d]."""
    with Engine(path, params(len(tokens) + 1, len(tokens)), n_ctx=1024, n_ubatch=n_ubatch) as engine:
        engine.decode(tokens)
        return _capi.queries(engine.ctx, 0, 2)


@pytest.mark.parametrize("n_new", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 50, 200])
def test_a_second_pass_after_any_number_of_generated_tokens(models: dict[str, Path], n_new: int) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=1024) as engine:
        engine.decode(random_tokens(N, 320))
        assert engine.compact()[0] == Status.OK
        engine.greedy(n_new, N)
        expected = [engine.oracle(i, SETTINGS)[1] for i in range(3)]
        before = engine.cells()
        kept = [[_capi.kept(engine.ctx, 0, i, h) for h in range(2)] for i in range(3)]
        status, stats = engine.compact()
        assert status == Status.OK
        assert (stats.n_window, stats.n_cells_before) == (WINDOW, BUDGET + n_new)
        after = engine.cells()
        for i in range(3):
            for h in range(2):
                assert np.array_equal(_capi.kept(engine.ctx, 0, i, h), kept[i][h][expected[i][h]])
                assert np.array_equal(after.rows[i][0][:, h], before.rows[i][0][expected[i][h], h])
        assert engine.frontier() == N + n_new - WINDOW - 1
        assert engine.pos_max() == N + n_new - 1


@pytest.mark.parametrize("n_removed", [1, 8, SLACK, SLACK + 1, SLACK + 5, WINDOW + SLACK - 1, WINDOW + SLACK, 60])
def test_a_roll_back_beyond_the_slack_shortens_the_window(models: dict[str, Path], n_removed: int) -> None:
    """The removed tokens have overwritten the rows of earlier ones."""
    tokens = random_tokens(N, 320)
    with Engine(models["llama"], SETTINGS, n_ctx=1024) as engine:
        engine.decode(tokens)
        assert engine.seq_rm(N - n_removed)
        expected = max(0, min(WINDOW, WINDOW + SLACK - n_removed))
        assert _capi.n_queries(engine.ctx, 0, 0) == expected
        settings = params(40, WINDOW, kernel=7)
        status, stats = engine.compact(0, settings)
        if expected == 0:
            assert status == Status.NO_QUERIES
            assert engine.n_cells() == N - n_removed
            # one token more, and it can look
            engine.decode([7], N - n_removed)
            status, stats = engine.compact(0, settings)
            expected = 1
        assert status == Status.OK
        assert stats.n_window == expected
        assert engine.n_cells() == 40


def test_the_rows_are_those_of_their_positions(models: dict[str, Path]) -> None:
    """After roll-backs, replays and generated tokens the window equals that of a run without them."""
    tokens = random_tokens(N, 320)
    expected = queries_by_position(models["llama"], tokens)
    with Engine(models["llama"], SETTINGS, n_ctx=1024) as engine:
        engine.decode(tokens)
        engine.greedy(40, N)
        assert engine.seq_rm(N - 1)  # the same prompt again: its last token is replayed
        engine.decode(tokens[-1:], N - 1)
        got = _capi.queries(engine.ctx, 0, 2)
        assert got.shape[0] == 1
        assert np.allclose(got[0], expected[-1], atol=5e-3)  # other batch shapes round differently
        assert engine.seq_rm(N - 30)
        engine.decode(tokens[-30:], N - 30)
        got = _capi.queries(engine.ctx, 0, 2)
        assert got.shape[0] == WINDOW
        assert np.allclose(got, expected[-WINDOW:], atol=5e-3)  # other batch shapes round differently


def test_replay_after_a_pass_is_within_the_budget(models: dict[str, Path]) -> None:
    tokens = random_tokens(N, 320)
    with Engine(models["llama"], SETTINGS, n_ctx=1024) as engine:
        engine.decode(tokens)
        engine.compact()
        engine.greedy(40, N)
        assert engine.seq_rm(N - 1)
        engine.decode(tokens[-1:], N - 1)
        assert engine.compact()[0] == Status.WITHIN_BUDGET


def test_a_window_that_reaches_into_the_frontier_is_cut(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=1024) as engine:
        engine.decode(random_tokens(N, 320))
        engine.compact()
        frontier = engine.frontier()
        assert engine.seq_rm(frontier + 4)  # three cells of their own left
        engine.decode([7, 8], frontier + 4)
        status, stats = engine.compact(0, params(40, WINDOW, kernel=7))
        assert status == Status.OK
        assert stats.n_window == 5
        assert engine.frontier() == frontier  # every position is still there
        assert engine.pos_max() == frontier + 5
        assert engine.n_cells() == 40
        engine.decode([9], frontier + 6)


def test_a_removal_in_the_middle_shortens_the_window(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=1024) as engine:
        engine.decode(random_tokens(N, 320))
        assert engine.seq_rm(N - 10, N - 5)
        assert _capi.n_queries(engine.ctx, 0, 0) == 5
        status, stats = engine.compact()
        assert (status, stats.n_window) == (Status.OK, 5)
        engine.decode([9], N)


def test_a_smaller_window_than_captured(models: dict[str, Path]) -> None:
    with Engine(models["llama"], params(BUDGET, 32), n_ctx=1024) as engine:
        engine.decode(random_tokens(N, 320))
        small = params(BUDGET, 8, kernel=7)
        expected = engine.oracle(1, small)[1]
        assert engine.compact(0, small)[1].n_window == 8
        assert np.array_equal(_capi.kept(engine.ctx, 0, 1, 0), expected[0])
        assert engine.compact(0, params(40, 33))[0] == Status.INVALID_PARAMS


def test_tokens_of_several_sequences_have_no_rows(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=1024, n_seq_max=2) as engine:
        tokens = random_tokens(N, 320)
        engine.decode(tokens, 0, seq=[0, 1])
        assert _capi.n_queries(engine.ctx, 0, 0) == 0
        assert engine.compact(0)[0] == Status.SHARED_CELLS
