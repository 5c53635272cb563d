"""Several sequences, unified and in streams; copies; saved state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llama_cpp as L
import numpy as np
import pytest
from engine import Engine, params, random_tokens

from snapkv_gguf import _capi
from snapkv_gguf._capi import Status

N, BUDGET, WINDOW = 150, 64, 16
SETTINGS = params(BUDGET, WINDOW, kernel=7)


@pytest.fixture(params=[True, False], ids=["unified", "streams"])
def unified(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sequences_do_not_see_each_other(models: dict[str, Path], name: str, unified: bool) -> None:
    """A pass on one leaves the others' cells as they are, and decoding goes on as if each were alone."""
    prompts = {seq: random_tokens(N + 10 * seq, 320, seed=seq) for seq in range(3)}
    alone = {}
    for seq, tokens in prompts.items():
        with Engine(models[name], SETTINGS, n_ctx=256) as engine:
            engine.decode(tokens)
            if seq != 1:
                assert engine.compact()[0] == Status.OK
            kept = [_capi.kept(engine.ctx, 0, 0, h) for h in range(2)]
            alone[seq] = kept, engine.decode([5], len(tokens))
    with Engine(models[name], SETTINGS, n_ctx=1024, n_seq_max=4, unified=unified, n_batch=64) as engine:
        # interleaved, so that their cells are fragmented in the unified cache
        for start in range(0, 170, 20):
            parts = {s: (t[start : start + 20], start) for s, t in prompts.items() if t[start : start + 20]}
            engine.decode_many(parts)
        done = {s: len(t) for s, t in prompts.items()}
        others = engine.cells(1)
        for seq in (0, 2):
            assert engine.compact(seq)[0] == Status.OK
            assert engine.n_cells(seq) == BUDGET
        now = engine.cells(1)
        assert np.array_equal(others.pos, now.pos)
        for old, new in zip(others.rows, now.rows, strict=True):
            assert np.array_equal(old[0], new[0])
            assert np.array_equal(old[1], new[1])
        for seq in (0, 2):
            for h in range(2):
                same = np.isin(_capi.kept(engine.ctx, seq, 0, h), alone[seq][0][h]).mean()
                assert same > 0.9  # other batch shapes round differently
        engine.decode_many({s: ([5], done[s]) for s in prompts})
        for i, seq in enumerate(prompts):
            assert np.allclose(engine.logits(i), alone[seq][1], atol=0.05)


def test_fragmented_cells_are_compacted_downwards(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=1024, n_seq_max=2, n_batch=64) as engine:
        for start in range(0, 100, 10):
            engine.decode_many({s: (random_tokens(10, 320, seed=start + s), start) for s in (0, 1)})
        before = engine.cells(1)
        assert (np.diff(before.index) != 1).any()
        expected = [engine.oracle(i, SETTINGS, seq=1)[1] for i in range(3)]
        assert engine.compact(1)[0] == Status.OK
        after = engine.cells(1)
        assert after.index.tolist() == before.index[:BUDGET].tolist()  # no cell below the last of them is free
        for i in range(3):
            for h in range(2):
                assert np.array_equal(after.rows[i][0][:, h], before.rows[i][0][expected[i][h], h])
                assert np.array_equal(after.rows[i][1][:, h], before.rows[i][1][expected[i][h], h])


def test_free_cells_below_are_filled(models: dict[str, Path]) -> None:
    """In a unified cache, a sequence that was read behind another one moves into the cells which that one left."""
    with Engine(models["llama"], SETTINGS, n_ctx=512, n_seq_max=3) as engine:
        for seq in (0, 1, 2):
            engine.decode(random_tokens(150, 320, seed=seq), 0, seq=seq)
        for seq in (0, 1, 2):
            before = engine.cells(seq)
            others = {s: engine.cells(s) for s in (0, 1, 2) if s != seq}
            expected = [engine.oracle(i, SETTINGS, seq=seq)[1] for i in range(3)]
            assert engine.compact(seq)[0] == Status.OK
            after = engine.cells(seq)
            assert after.index.tolist() == list(range(seq * BUDGET, (seq + 1) * BUDGET))
            for i in range(3):
                for h in range(2):
                    assert np.array_equal(after.rows[i][0][:, h], before.rows[i][0][expected[i][h], h])
                    assert np.array_equal(after.rows[i][1][:, h], before.rows[i][1][expected[i][h], h])
            for s, other in others.items():
                now = engine.cells(s)
                assert np.array_equal(now.index, other.index)
                assert all(np.array_equal(a[0], b[0]) for a, b in zip(now.rows, other.rows, strict=True))


def test_cells_not_in_the_order_of_positions(models: dict[str, Path]) -> None:
    """Later tokens in lower cells, as a freed sequence leaves them; a second pass still pools by position."""
    with Engine(models["llama"], SETTINGS, n_ctx=300, n_seq_max=2) as engine:
        engine.decode(random_tokens(120, 320, seed=1), 0, seq=1)
        engine.decode(random_tokens(100, 320, seed=2), 0, seq=0)
        engine.seq_rm(0, -1, seq=1)
        engine.decode(random_tokens(90, 320, seed=3), 100, seq=0)
        before = engine.cells(0)
        assert (np.diff(before.index) < 0).any()
        expected = [engine.oracle(i, SETTINGS)[1] for i in range(3)]
        assert engine.compact(0)[0] == Status.OK
        after = engine.cells(0)
        assert after.index.tolist() == list(range(BUDGET))
        for i in range(3):
            for h in range(2):
                assert np.array_equal(_capi.kept(engine.ctx, 0, i, h), before.pos[expected[i][h]])
                assert np.array_equal(after.rows[i][0][:, h], before.rows[i][0][expected[i][h], h])
        assert (np.diff(_capi.kept(engine.ctx, 0, 0, 0)) > 0).all()


def test_shared_cells_are_refused(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=1024, n_seq_max=3) as engine:
        engine.decode(random_tokens(N, 320))
        engine.seq_cp(0, 1)
        for seq in (0, 1):
            assert engine.compact(seq)[0] == (Status.SHARED_CELLS)
        engine.seq_rm(-1, -1, seq=1)
        assert engine.compact(0)[0] == Status.OK
        # a copy of a compacted sequence keeps the frontier
        engine.seq_cp(0, 2)
        assert engine.frontier(2) == engine.frontier(0) > 0
        assert not engine.seq_rm(5, -1, seq=2)
        assert np.array_equal(_capi.kept(engine.ctx, 2, 1, 1), _capi.kept(engine.ctx, 0, 1, 1))
        engine.decode([5], N, seq=2)
        assert engine.seq_rm(-1, -1, seq=0)
        assert engine.frontier(2) > 0


def test_copy_to_another_stream(models: dict[str, Path]) -> None:
    """Rows are copied at the next update; the copy decodes the same and can be compacted itself."""
    with Engine(models["llama"], SETTINGS, n_ctx=1024, n_seq_max=2, unified=False) as engine:
        engine.decode(random_tokens(N, 320))
        assert engine.compact(0)[0] == Status.OK
        engine.seq_cp(0, 1)
        assert engine.frontier(1) == engine.frontier(0)
        assert engine.compact(1, params(40, WINDOW))[0] == Status.NO_QUERIES
        a = engine.decode([5], N, seq=0)
        b = engine.decode([5], N, seq=1)
        assert np.array_equal(a, b)
        status, stats = engine.compact(1, params(40, WINDOW))
        assert (status, stats.n_window) == (Status.OK, 1)
        assert engine.n_cells(0) == BUDGET + 1


def test_seq_keep_forgets_the_others(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=1024, n_seq_max=2) as engine:
        for seq in (0, 1):
            engine.decode(random_tokens(N, 320, seed=seq), 0, seq)
            engine.compact(seq)
        L.llama_memory_seq_keep(engine.memory, 1)
        assert (engine.n_cells(0), engine.frontier(0)) == (0, -1)
        assert (engine.n_cells(1), engine.frontier(1)) == (BUDGET, N - WINDOW - 1)
        engine.decode([5], 0, seq=0)
        assert engine.seq_rm(0, 1, seq=0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("whole", [True, False], ids=["context", "sequence"])
def test_saved_state(models: dict[str, Path], name: str, whole: bool, tmp_path: Path) -> None:
    """A restored sequence decodes the same, refuses the same removals, and is not scored with queries it has not."""
    with Engine(models[name], SETTINGS, n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320))
        engine.compact()
        state = engine.state() if whole else engine.seq_state()
        expected, rows = engine.greedy(20, N)
    (tmp_path / "state").write_bytes(state)
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
import numpy as np
from engine import Engine, params
from snapkv_gguf._capi import Status, kept
with Engine({str(models[name])!r}, params({BUDGET}, {WINDOW}, kernel=7), n_ctx=512) as engine:
    state = open({str(tmp_path / "state")!r}, "rb").read()
    assert (engine.set_state if {whole} else engine.set_seq_state)(state) == len(state)
    assert engine.frontier() == {N - WINDOW - 1}, engine.frontier()
    assert engine.n_cells() == {BUDGET}
    assert not engine.seq_rm(50)
    assert len(kept(engine.ctx, 0, 0, 0)) == 0
    assert engine.compact(0, params(40, {WINDOW}))[0] == Status.NO_QUERIES
    token, pos = {expected[0]}, {N}
    tokens = [token]
    for i in range(19):
        token = int(engine.decode([token], pos + i).argmax())
        tokens.append(token)
    assert tokens == {expected!r}, tokens
    assert engine.compact(0, params(40, {WINDOW}))[1].n_window == {WINDOW}
    assert engine.seq_rm(0)
    assert engine.frontier() == -1
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=300)
    assert rows.shape[0] == 20


def test_state_with_a_single_merged_cell(models: dict[str, Path]) -> None:
    """No position occurs twice, yet the sequence is not whole."""
    with Engine(models["llama"], params(WINDOW + 1, WINDOW), n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320))
        assert engine.compact()[0] == Status.OK
        state = engine.seq_state()
        engine.clear()
        assert engine.frontier() == -1
        assert engine.set_seq_state(state) > 0
        assert engine.frontier() == N - WINDOW - 1
        assert not engine.seq_rm(N - WINDOW - 1)


def test_state_of_a_whole_sequence(models: dict[str, Path]) -> None:
    """Also from a context without SnapKV."""
    tokens = random_tokens(N, 320)
    with Engine(models["llama"], n_ctx=512) as plain:
        plain.decode(tokens)
        state = plain.state()
    with Engine(models["llama"], SETTINGS, n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320, seed=9))
        engine.compact()
        assert engine.set_state(state) == len(state)
        assert engine.frontier() == -1
        assert engine.seq_rm(50)
        assert engine.n_cells() == 50
        engine.decode(tokens[50:], 50)
        assert engine.compact()[0] == Status.OK


def test_a_truncated_state_leaves_a_usable_sequence(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=512) as engine:
        engine.decode(random_tokens(N, 320))
        engine.compact()
        state = engine.seq_state()
        for cut in (10, len(state) // 2, len(state) - 1):
            assert engine.set_seq_state(state[:cut]) == 0
            engine.clear()
            engine.decode(random_tokens(N, 320))
            assert engine.compact()[0] == Status.OK


def test_sequence_ids_out_of_range(models: dict[str, Path]) -> None:
    with Engine(models["llama"], SETTINGS, n_ctx=512, n_seq_max=2) as engine:
        for seq in (-1, 2, 255, 256, 10**6):
            assert engine.compact(seq)[0] == Status.INVALID_SEQ
