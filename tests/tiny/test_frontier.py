"""What a compacted sequence allows: the next token, tails off, nothing below the frontier."""

from __future__ import annotations

from pathlib import Path

import llama_cpp as L
import numpy as np
import pytest
from engine import Engine, logged, params, random_tokens

from snapkv_gguf import _capi
from snapkv_gguf._capi import Status

N, BUDGET, WINDOW = 200, 64, 16
FRONTIER = N - WINDOW - 1
SETTINGS = params(BUDGET, WINDOW, kernel=7)


@pytest.fixture(params=["llama", "gemma3"])
def compacted(request: pytest.FixtureRequest, models: dict[str, Path]) -> Engine:
    """A sequence 0 of N tokens in BUDGET cells."""
    with Engine(models[request.param], SETTINGS, n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320))
        status, _ = engine.compact()
        assert status == Status.OK
        yield engine


def test_positions(compacted: Engine) -> None:
    assert compacted.frontier() == FRONTIER
    assert compacted.pos_min() == FRONTIER
    assert compacted.pos_max() == N - 1
    assert compacted.n_cells() == BUDGET


def test_the_next_token_decodes(compacted: Engine) -> None:
    compacted.decode([5], N)
    assert compacted.pos_max() == N
    assert compacted.n_cells() == BUDGET + 1


def test_a_wrong_next_position_is_refused_as_ever(compacted: Engine) -> None:
    assert compacted.try_decode([5], N + 1) != 0
    assert compacted.n_cells() == BUDGET


@pytest.mark.parametrize(
    ("p0", "p1"),
    [(0, N - 1), (1, -1), (10, 20), (0, 10), (FRONTIER, -1), (FRONTIER, FRONTIER + 1), (-1, FRONTIER), (1, N + 5)],
)
@pytest.mark.parametrize("seq", [0, -1])
def test_a_cut_at_or_below_the_frontier_changes_nothing(compacted: Engine, p0: int, p1: int, seq: int) -> None:
    before = compacted.cells()
    assert not compacted.seq_rm(p0, p1, seq)
    after = compacted.cells()
    assert np.array_equal(before.pos, after.pos)
    assert compacted.frontier() == FRONTIER
    assert compacted.pos_max() == N - 1


@pytest.mark.parametrize(("p0", "p1"), [(0, -1), (-1, -1), (0, N), (0, N + 100)])
@pytest.mark.parametrize("seq", [0, -1])
def test_the_whole_sequence_can_go(compacted: Engine, p0: int, p1: int, seq: int) -> None:
    assert compacted.seq_rm(p0, p1, seq)
    assert (compacted.n_cells(), compacted.frontier(), compacted.pos_max()) == (0, -1, -1)


def test_an_empty_range_is_no_cut(compacted: Engine) -> None:
    assert compacted.seq_rm(5, 5)
    assert compacted.n_cells() == BUDGET


@pytest.mark.parametrize("n_removed", [1, 5, WINDOW])
def test_a_tail_can_go_and_come_back(compacted: Engine, n_removed: int) -> None:
    """Roll-back of drafts and replay of the last tokens: the same rows, so the same next logits."""
    tokens = random_tokens(N, 320)
    first = compacted.decode([7], N)
    assert compacted.seq_rm(N - n_removed)
    assert compacted.n_cells() == BUDGET - n_removed
    compacted.decode(tokens[N - n_removed :], N - n_removed)
    assert compacted.n_cells() == BUDGET
    again = compacted.decode([7], N)
    # the replayed rows see the kept cells only, so they are not those of the prefill
    assert again.shape == first.shape
    assert np.isfinite(again).all()
    assert compacted.seq_rm(N)
    assert np.allclose(compacted.decode([7], N), again, atol=1e-5)


def test_kept_positions_follow_removals(compacted: Engine) -> None:
    full = _capi.kept(compacted.ctx, 0, 0, 0)
    assert compacted.seq_rm(N - 3)
    compacted.decode([7], N - 3)
    kept = _capi.kept(compacted.ctx, 0, 0, 0)
    assert kept.tolist() == [*full[:-3].tolist(), N - 3]


def test_shifts_are_refused_not_fatal(compacted: Engine) -> None:
    assert not L.llama_memory_can_shift(compacted.memory)
    before = compacted.cells()
    logged()
    L.llama_memory_seq_add(compacted.memory, 0, N - 5, -1, -3)
    L.llama_memory_seq_div(compacted.memory, 0, 0, -1, 2)
    assert "llama_memory_can_shift" in logged()
    assert np.array_equal(before.pos, compacted.cells().pos)
    compacted.decode([7], N)


def test_can_shift_is_as_ever_without_snapkv(models: dict[str, Path]) -> None:
    with Engine(models["llama"]) as engine:
        assert L.llama_memory_can_shift(engine.memory)


def test_within_budget_nothing_happens(models: dict[str, Path]) -> None:
    """Budget >= n: bit-identical to a context without SnapKV."""
    tokens = random_tokens(N, 320)
    with Engine(models["llama"], n_ctx=512) as plain:
        plain.decode(tokens)
        expected = plain.greedy(64, N)
    for n in (N, N + 100):
        with Engine(models["llama"], params(n), n_ctx=512) as engine:
            engine.decode(tokens)
            status, stats = engine.compact()
            assert status == Status.WITHIN_BUDGET
            assert (stats.n_cells_before, stats.n_cells_after) == (N, N)
            got = engine.greedy(64, N)
            assert got[0] == expected[0]
            assert np.array_equal(got[1], expected[1])


def test_prompts_shorter_than_the_window(models: dict[str, Path]) -> None:
    with Engine(models["llama"], params(65, window=64), n_ctx=512) as engine:
        for n in (1, 5, 63, 64, 65):
            engine.clear()
            engine.decode(random_tokens(n, 320))
            assert engine.compact()[0] == Status.WITHIN_BUDGET
        engine.clear()
        assert engine.compact()[0] == Status.WITHIN_BUDGET  # empty
        engine.decode(random_tokens(66, 320))
        assert engine.compact()[0] == Status.OK


def test_the_first_logits_are_untouched(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=512) as engine:
        logits = engine.decode(random_tokens(N, 320))
        engine.compact()
        assert np.array_equal(logits, engine.logits())


def test_freed_cells_take_new_tokens(models: dict[str, Path]) -> None:
    """Far more logical tokens than cells."""
    with Engine(models["llama"], SETTINGS, n_ctx=256) as engine:
        pos = 0
        for i in range(20):
            tokens = random_tokens(100, 320, seed=i)
            engine.decode(tokens, pos)
            pos += len(tokens)
            assert engine.compact()[0] == Status.OK
            assert engine.n_cells() == BUDGET
            assert engine.pos_max() == pos - 1
        assert pos > 256
        # and the full cache has no room
    with Engine(models["llama"], n_ctx=256) as engine:
        engine.decode(random_tokens(256, 320))
        assert engine.try_decode([5], 256) != 0


def test_decoding_reads_fewer_cells(models: dict[str, Path]) -> None:
    """The released cells leave the attention range: logits equal those of a context that holds only the kept rows."""
    with Engine(models["llama"], SETTINGS, n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320))
        engine.compact()
        state = engine.seq_state()
        logits = engine.decode([9], N)
        with Engine(models["llama"], SETTINGS, n_ctx=128) as small:
            assert small.set_seq_state(state) > 0
            assert np.array_equal(small.decode([9], N), logits)
