"""Prompts and answers longer than the cells."""

from __future__ import annotations

from pathlib import Path

import llama_cpp as L
import numpy as np
import pytest
from devices import needs_abort
from engine import CACHE_TYPES, Cells, Engine, params, random_tokens

from snapkv_gguf import _capi
from snapkv_gguf._capi import Status

N_CTX = 256


def same_rows(a: Cells, b: Cells) -> bool:
    parts = [zip(x, y, strict=True) for x, y in zip(a.rows, b.rows, strict=True)]
    return a.pos.tolist() == b.pos.tolist() and all(np.array_equal(x, y) for part in parts for x, y in part)


def logits_of(engine: Engine, tokens: list[int]) -> np.ndarray:
    """By llama_decode() alone, in batches of n_batch."""
    engine.clear()
    return engine.decode(tokens)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "lfm2", "qwen2vl"])
@pytest.mark.parametrize("n", [1, 31, 33, 200, N_CTX])
def test_what_fits_is_read_as_always(models: dict[str, Path], name: str, n: int) -> None:
    tokens = random_tokens(n, 320)
    with Engine(models[name], params(64), n_ctx=N_CTX, n_batch=48, n_ubatch=48) as engine:
        expected = logits_of(engine, tokens)
        engine.clear()
        status, stats = _capi.prefill(engine.ctx, 0, tokens, chunk=32)
        assert status == Status.OK
        assert (stats.n_tokens, stats.n_passes, stats.n_evicted, stats.n_cells) == (n, 0, 0, n)
        assert np.array_equal(engine.logits(), expected)


@pytest.mark.parametrize(
    ("budget", "chunk", "probe", "window"), [(64, 128, 32, 16), (100, 40, 5, 16), (128, 1000, 24, 24), (40, 64, 1, 8)]
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_each_chunk_keeps_what_the_oracle_keeps(
    models: dict[str, Path], name: str, budget: int, chunk: int, probe: int, window: int
) -> None:
    """The loop against its steps, and each step against the oracle."""
    tokens = random_tokens(900, 320, seed=1)
    body, asked = tokens[:-probe], tokens[-probe:]
    settings = params(budget, window, recent=budget // 2, kernel=7)
    n_batch, n_ubatch = 64, 32

    def create() -> Engine:
        return Engine(models[name], settings, n_ctx=N_CTX, n_batch=n_batch, n_ubatch=n_ubatch)

    with create() as engine:
        status, stats = _capi.prefill(engine.ctx, 0, tokens, chunk=chunk, probe=probe)
        assert status == Status.OK
        found, logits = engine.cells(), engine.logits()
        kept = [_capi.kept(engine.ctx, 0, i, 0) for i in range(len(_capi.layers(engine.ctx)))]
        engine.clear()

        # step by step
        i, n_passes, n_evicted = 0, 0, 0
        done: list[tuple[int, int, bool]] = []  # from, to, whether with a pass

        def replay(engine: Engine) -> Engine:
            for begin, end, is_pass in done:
                if is_pass:
                    assert _capi.make_room(engine.ctx, 0, asked, settings, body[begin:end])[0] == Status.OK
                else:
                    engine.decode(body[begin:end], begin)
            return engine

        def n_following(i: int, n_cells: int) -> int:
            """Tokens that are read next, 0 before a pass."""
            rest = min(chunk, len(body) - i)
            n = min(rest, N_CTX - n_cells - probe)
            return 0 if n < rest and n_cells > budget else n

        while len(tokens) - i > N_CTX - engine.n_cells():
            n, n_with = n_following(i, engine.n_cells()), 0
            if n:
                is_last = len(tokens) - i - n <= N_CTX - engine.n_cells() - n
                if probe < n_ubatch and not is_last and not n_following(i + n, engine.n_cells() + n):
                    n_with = min((n - 1) % n_batch + 1, n_ubatch - probe)  # with the probe in one batch
                if n > n_with:
                    engine.decode(body[i : i + n - n_with], i)
                    done.append((i, i + n - n_with, False))
                i += n - n_with
            if not n or n_with:
                n_evicted += engine.n_cells() + n_with - budget
                with create() as other:
                    chosen = replay(other).look(settings, asked, body[i : i + n_with])
                engine.check_make_room(settings, asked, body[i : i + n_with], chosen)
                done.append((i, i + n_with, True))
                i += n_with
                n_passes += 1
        expected = engine.decode(tokens[i:], i)
        assert n_passes >= 4
        assert (stats.n_passes, stats.n_evicted) == (n_passes, n_evicted)
        assert stats.n_cells == engine.n_cells() == len(tokens) - n_evicted
        steps = engine.cells()
        assert same_rows(found, steps)
        for layer, positions in enumerate(kept):
            assert np.array_equal(positions, _capi.kept(engine.ctx, 0, layer, 0))
        assert np.array_equal(logits, expected)
        # and the ordinary pass at the end
        n = engine.n_cells()
        status, last = engine.compact(0)
        assert (status, last.n_cells_before, last.n_cells_after) == (Status.OK, n, budget)
        assert max(np.concatenate(kept)) == len(tokens) - 1


@pytest.mark.parametrize("type_k", CACHE_TYPES)
def test_every_cache_type(models: dict[str, Path], type_k: str) -> None:
    tokens = random_tokens(400, 320, seed=2)
    for flash_attn in (True, False):
        kinds = {"type_k": type_k, "type_v": type_k if flash_attn else "f16", "flash_attn": flash_attn}
        with Engine(models["llama"], params(64), n_ctx=N_CTX, n_batch=128, **kinds) as engine:
            engine.decode(tokens[:220])
            engine.check_make_room(params(64, kernel=5), tokens[-20:])


def test_a_probe_of_its_own(models: dict[str, Path]) -> None:
    """Another text than the prompt's end looks, and leaves nothing behind."""
    tokens, question = random_tokens(500, 320, seed=3), random_tokens(20, 320, seed=4)
    with Engine(models["llama"], params(64), n_ctx=N_CTX) as engine:
        found = []
        for probe in (question, question[::-1], 20):
            engine.clear()
            status, stats = _capi.prefill(engine.ctx, 0, tokens, chunk=64, probe=probe)
            assert (status, stats.n_tokens) == (Status.OK, 500)
            assert engine.pos_max() == 499
            found.append(_capi.kept(engine.ctx, 0, 2, 0))
        assert not np.array_equal(found[0], found[1])
        assert not np.array_equal(found[0], found[2])


def test_without_a_probe_the_last_tokens_look(models: dict[str, Path]) -> None:
    tokens = random_tokens(300, 320, seed=5)
    settings = params(64, window=16)
    with Engine(models["llama"], settings, n_ctx=N_CTX) as engine:
        status, stats = _capi.prefill(engine.ctx, 0, tokens, chunk=64, probe=0)
        assert (status, stats.n_passes) == (Status.OK, 1)
        found = engine.cells()
        engine.clear()
        engine.decode(tokens[:256])
        assert engine.compact(0)[0] == Status.OK
        engine.decode(tokens[256:], 256)
        expected = engine.cells()
        assert same_rows(found, expected)


@pytest.mark.parametrize("rule", ["shared", "first-recent", "random", "h2o"])
def test_other_rules(models: dict[str, Path], rule: str) -> None:
    tokens = random_tokens(700, 320, seed=6)
    with Engine(models["llama"], params(64, rule=rule), n_ctx=N_CTX, n_batch=64, n_ubatch=64) as engine:
        status, stats = _capi.prefill(engine.ctx, 0, tokens, chunk=64)
        assert (status, stats.n_tokens) == (Status.OK, 700)
        kept = _capi.kept(engine.ctx, 0, 0, 0)
        if rule == "first-recent":
            # with a probe or without, the text's first and last tokens
            assert kept[:4].tolist() == [0, 1, 2, 3]
            assert np.all(np.diff(kept[4:]) == 1)
        assert engine.compact(0)[0] == Status.OK
        assert engine.n_cells() == 64


@pytest.mark.parametrize("n_probe", [20, 100])
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_no_holes_in_what_is_not_compacted(models: dict[str, Path], name: str, n_probe: int) -> None:
    """A sliding-window cache as large as the context, or just the window, gives the same; so does a recurrent state."""
    tokens = random_tokens(700, 320, seed=7)
    logits = []
    for swa_full in (True, False):
        with Engine(models[name], params(96), n_ctx=512, n_batch=64, n_ubatch=32, swa_full=swa_full) as engine:
            status, stats = _capi.prefill(engine.ctx, 0, tokens, cells=N_CTX, chunk=64, probe=n_probe)
            assert (status, stats.n_cells <= N_CTX) == (Status.OK, True)
            assert stats.n_passes > 3
            logits.append([engine.logits(), *engine.greedy(20, 700)[1]])
    assert np.abs(np.array(logits[0]) - np.array(logits[1])).max() < 1e-3 * np.abs(logits[0]).max()


@pytest.mark.parametrize("n_probe", [20, 100])
def test_the_probe_leaves_no_trace(models: dict[str, Path], n_probe: int) -> None:
    """With a budget that keeps nearly all, the sliding window and the recurrent state are those of a plain prefill."""
    tokens, probe = random_tokens(150, 320, seed=8), random_tokens(n_probe, 320, seed=9)
    for name in ("gemma3", "lfm2"):
        rows = []
        for looks in (False, True):
            with Engine(models[name], params(149), n_ctx=N_CTX, n_batch=64, n_ubatch=32, swa_full=False) as engine:
                engine.decode(tokens)
                if looks:
                    assert _capi.make_room(engine.ctx, 0, probe)[0] == Status.OK
                rows.append(engine.decode(tokens[:40], 150))
        # one row of 150 is missing
        assert np.abs(rows[0] - rows[1]).max() < 0.2 * np.abs(rows[0]).max()
        assert np.corrcoef(rows)[0, 1] > 0.99


def test_progress(models: dict[str, Path]) -> None:
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> bool:
        calls.append((done, total))
        return True

    with Engine(models["llama"], params(64), n_ctx=N_CTX, n_batch=50) as engine:
        assert _capi.prefill(engine.ctx, 0, random_tokens(777, 320), chunk=60, progress=progress)[0] == Status.OK
    assert [total for _, total in calls] == [777] * len(calls)
    done = [n for n, _ in calls]
    assert done == sorted(set(done))
    assert done[-1] == 777
    assert all(b - a <= 50 for a, b in zip([0, *done], done, strict=False))


def test_logits_of_all_tokens(models: dict[str, Path]) -> None:
    tokens = random_tokens(200, 320, seed=10)
    rows: list[np.ndarray] = []
    with Engine(models["llama"], params(64), n_ctx=N_CTX, n_batch=64) as engine:
        n_done = 0

        def progress(done: int, _: int) -> bool:
            nonlocal n_done
            rows.extend(engine.logits(i) for i in range(done - n_done))
            n_done = done
            return True

        assert _capi.prefill(engine.ctx, 0, tokens, logits_all=True, progress=progress)[0] == Status.OK
        expected = [logits_of(engine, tokens[: n + 1]) for n in (0, 63, 64, 199)]
    assert len(rows) == 200
    for n, row in zip((0, 63, 64, 199), expected, strict=True):
        assert np.abs(rows[n] - row).max() < 1e-2 * np.abs(row).max()


@pytest.mark.parametrize("stop_at", [50, 250, 400])
def test_stopped(models: dict[str, Path], stop_at: int) -> None:
    """Nothing is left, whether a pass has run or not, and the next prompt is read as if nothing had been."""
    tokens = random_tokens(600, 320, seed=11)
    with Engine(models["llama"], params(64), n_ctx=N_CTX, n_batch=50) as engine:
        status, _ = _capi.prefill(engine.ctx, 0, tokens, chunk=64, progress=lambda done, _: done < stop_at)
        assert status == Status.CANCELLED
        assert (engine.n_cells(), engine.pos_max(), engine.frontier()) == (0, -1, -1)
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64)[0] == Status.OK
        found = engine.logits()
        engine.clear()
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64)[0] == Status.OK
        assert np.array_equal(found, engine.logits())


def test_what_the_callback_raises_comes_back(models: dict[str, Path]) -> None:
    def progress(done: int, _: int) -> bool:
        raise KeyboardInterrupt

    with Engine(models["llama"], params(64), n_ctx=N_CTX) as engine:
        with pytest.raises(KeyboardInterrupt):
            _capi.prefill(engine.ctx, 0, random_tokens(600, 320), progress=progress)
        assert engine.n_cells() == 0


@needs_abort
def test_aborted_at_every_point(models: dict[str, Path]) -> None:
    """By llama.cpp's own callback: in a batch, in the probe, in the scores, in the moves."""
    tokens = random_tokens(400, 320, seed=12)
    seen = set()
    with Engine(models["llama"], params(64), n_ctx=N_CTX, n_batch=64) as engine:
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64)[0] == Status.OK
        expected = engine.logits()
        for n in range(0, 4000, 53):
            engine.clear()
            with engine.aborting_after(n):
                status, _ = _capi.prefill(engine.ctx, 0, tokens, chunk=64)
            seen.add(status)
            if status == Status.OK:
                break
            assert status in (Status.CANCELLED, Status.SEQUENCE_LOST)
            assert (engine.n_cells(), engine.pos_max()) == (0, -1)
        engine.clear()
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64)[0] == Status.OK
        assert np.array_equal(engine.logits(), expected)
    assert {Status.CANCELLED, Status.OK} <= seen


def test_refusals_change_nothing(models: dict[str, Path]) -> None:
    tokens = random_tokens(600, 320, seed=13)
    with Engine(models["llama"], params(64), n_ctx=N_CTX, n_seq_max=2) as engine:
        engine.decode(tokens[:100])
        before = engine.cells()

        def refused(expected: Status, n: int = 500, **kwargs: object) -> None:
            assert _capi.prefill(engine.ctx, 0, tokens[:n], **kwargs)[0] == expected
            assert same_rows(engine.cells(), before)

        refused(Status.NO_ROOM, params=params(240), probe=16)
        refused(Status.NO_ROOM, params=params(N_CTX), probe=0)
        refused(Status.NO_ROOM, probe=192)
        refused(Status.NO_ROOM, cells=96, probe=32)
        refused(Status.INVALID_PARAMS, params=params(64, window=17))
        refused(Status.INVALID_PARAMS, params=params(64, positions="packed"))
        refused(Status.INVALID_PARAMS, chunk=0)
        refused(Status.INVALID_PARAMS, probe=[5, -1])
        tokens[470] = 10**6
        refused(Status.INVALID_PARAMS)
        tokens[470] = 5
        assert _capi.make_room(engine.ctx, 0, [320])[0] == Status.INVALID_PARAMS
        assert same_rows(engine.cells(), before)
        assert _capi.prefill(engine.ctx, 7, tokens)[0] == Status.INVALID_SEQ
        engine.seq_cp(0, 1)
        refused(Status.SHARED_CELLS)
        engine.seq_rm(-1, -1, 1)
        assert _capi.prefill(engine.ctx, 0, tokens[:500], cells=97, probe=32)[0] == Status.OK
    with Engine(models["llama"], None) as engine:
        assert _capi.prefill(engine.ctx, 0, tokens)[0] == Status.NOT_ENABLED
        assert _capi.make_room(engine.ctx, 0, tokens[:5])[0] == Status.NOT_ENABLED
        assert _capi.n_room(engine.ctx, 0) == -1


def test_make_room_within_the_budget(models: dict[str, Path]) -> None:
    tokens = random_tokens(64, 320, seed=14)
    with Engine(models["llama"], params(64), n_ctx=N_CTX) as engine:
        engine.decode(tokens)
        before = engine.cells()
        status, stats = _capi.make_room(engine.ctx, 0, tokens[:20])
        assert (status, stats.n_cells_before, stats.n_cells_after) == (Status.WITHIN_BUDGET, 64, 64)
        assert engine.cells().pos.tolist() == before.pos.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize(("n", "n_probe"), [(20, 40), (70, 5)])
def test_make_room_reads_tokens_that_do_not_fit_one_batch(
    models: dict[str, Path], name: str, n: int, n_probe: int
) -> None:
    """Then as if they had been decoded before."""
    tokens, probe = random_tokens(150 + n, 320), random_tokens(n_probe, 320, seed=1)
    results = []
    for n_with in (0, n):
        with Engine(models[name], params(64), n_ctx=N_CTX, n_batch=64, n_ubatch=32) as engine:
            engine.decode(tokens[:150])
            if not n_with:
                engine.decode(tokens[150:], 150)
            status, stats = _capi.make_room(engine.ctx, 0, probe, tokens=tokens[150 : 150 + n_with])
            assert (status, stats.n_cells_before, stats.n_cells_after) == (Status.OK, len(tokens), 64)
            results.append((engine.cells(), engine.decode([7], len(tokens))))
    (a, logits), (b, expected) = results
    assert same_rows(a, b)
    assert np.array_equal(logits, expected)


def test_make_room_refuses_tokens(models: dict[str, Path]) -> None:
    """Before anything is changed."""
    tokens = random_tokens(N_CTX, 320)
    with Engine(models["llama"], params(64), n_ctx=N_CTX, n_batch=N_CTX) as engine:
        engine.decode(tokens[:200])
        before = engine.cells()
        assert _capi.make_room(engine.ctx, 0, tokens[:27], tokens=tokens[:30])[0] == Status.NO_ROOM
        assert _capi.make_room(engine.ctx, 0, tokens=tokens[:30])[0] == Status.INVALID_PARAMS
        assert same_rows(engine.cells(), before)
        assert _capi.make_room(engine.ctx, 0, tokens[:26], tokens=tokens[:30])[0] == Status.OK


def test_make_room_without_room_for_the_probe(models: dict[str, Path]) -> None:
    """A refusal changes nothing; as many tokens as there can be room for are no refusal."""
    tokens = random_tokens(N_CTX - 6, 320, seed=15)
    with Engine(models["llama"], params(64), n_ctx=N_CTX) as engine:
        engine.decode(tokens)
        before = engine.cells()
        assert _capi.make_room(engine.ctx, 0, tokens[: N_CTX - 63])[0] == Status.NO_ROOM
        assert engine.frontier() == -1
        assert same_rows(engine.cells(), before)
        assert _capi.make_room(engine.ctx, 0, tokens[: N_CTX - 64])[0] == Status.OK
        assert engine.n_cells() == 64


@pytest.mark.parametrize("unified", [True, False])
def test_sequences_side_by_side(models: dict[str, Path], unified: bool) -> None:
    """In turns, as a server does; each as if it were alone."""
    prompts = [random_tokens(600, 320, seed=20 + s) for s in range(3)]
    alone = []
    for tokens in prompts:
        with Engine(models["llama"], params(48), n_ctx=768, n_batch=64, n_seq_max=3, unified=unified) as engine:
            assert _capi.prefill(engine.ctx, 0, tokens, cells=160, chunk=64, probe=20)[0] == Status.OK
            alone.append([_capi.kept(engine.ctx, 0, i, 0) for i in range(3)])
    with Engine(models["llama"], params(48), n_ctx=768, n_batch=64, n_seq_max=3, unified=unified) as engine:
        for s, tokens in enumerate(prompts):
            assert _capi.prefill(engine.ctx, s, tokens, cells=160, chunk=64, probe=20)[0] == Status.OK
        for s in range(3):
            assert _capi.n_room(engine.ctx, s, 160) == 160 - engine.n_cells(s)
            same = [np.array_equal(_capi.kept(engine.ctx, s, i, 0), alone[s][i]) for i in range(3)]
            assert all(same)


def test_a_unified_cache_is_shared(models: dict[str, Path]) -> None:
    """What other sequences hold is no room."""
    with Engine(models["llama"], params(48), n_ctx=N_CTX, n_batch=64, n_seq_max=2) as engine:
        engine.decode(random_tokens(150, 320), 0, 1)
        assert _capi.n_room(engine.ctx, 0) == N_CTX - 150
        status, stats = _capi.prefill(engine.ctx, 0, random_tokens(600, 320), chunk=64, probe=20)
        assert (status, stats.n_cells <= N_CTX - 150) == (Status.OK, True)
        assert engine.n_cells(1) == 150
        engine.clear()
        engine.decode(random_tokens(200, 320), 0, 1)
        assert _capi.prefill(engine.ctx, 0, random_tokens(600, 320), probe=20)[0] == Status.NO_ROOM


def test_answers_longer_than_the_cells(models: dict[str, Path]) -> None:
    tokens = random_tokens(900, 320, seed=30)
    with Engine(models["llama"], params(64), n_ctx=N_CTX) as engine:
        assert _capi.prefill(engine.ctx, 0, tokens, chunk=64)[0] == Status.OK
        engine.compact(0)
        n_passes, end = 0, 900
        for _ in range(1500):
            token = int(engine.logits().argmax())
            status, stats = _capi.prefill(engine.ctx, 0, [token], probe=0)
            assert status == Status.OK
            end += 1
            n_passes += stats.n_passes
            assert engine.n_cells() <= N_CTX
            assert engine.pos_max() == end - 1
        assert n_passes == (1500 - (N_CTX - 64) - 1) // (N_CTX - 64) + 1
        assert np.isfinite(engine.logits()).all()


def test_a_turn_when_the_cells_are_full(models: dict[str, Path]) -> None:
    """There is not even room for the probe: the answer's last tokens make it."""
    with Engine(models["llama"], params(64), n_ctx=N_CTX) as engine:
        for n in (N_CTX, N_CTX - 3):
            engine.clear()
            engine.decode(random_tokens(n, 320, seed=31))
            status, stats = _capi.prefill(engine.ctx, 0, random_tokens(40, 320, seed=32), probe=32)
            assert (status, stats.n_passes) == (Status.OK, 1)
            assert (engine.n_cells(), engine.pos_max()) == (64 + 40, n + 39)
        # restored, there are no queries: as much of the probe as there is room for
        engine.clear()
        engine.decode(random_tokens(N_CTX - 3, 320, seed=31))
        state = engine.seq_state(0)
        engine.clear()
        assert engine.set_seq_state(state, 0)
        assert _capi.prefill(engine.ctx, 0, random_tokens(40, 320, seed=32), probe=32)[0] == Status.OK


def test_how_long_a_sequence_may_be(models: dict[str, Path]) -> None:
    with Engine(models["llama"], params(64), n_ctx=N_CTX) as engine:
        assert _capi.n_pos_max(engine.ctx) == 8192
        engine.decode([5], 8191 - 10)
        assert _capi.prefill(engine.ctx, 0, random_tokens(11, 320))[0] == Status.BEYOND_CONTEXT
        assert _capi.prefill(engine.ctx, 0, random_tokens(10, 320))[0] == Status.OK
    p = L.llama_context_default_params()
    for scale, base, n_ctx, expected in (
        (0.5, 0.0, N_CTX, 16384),
        (0.0, 1e6, N_CTX, 2**31 - 1),
        (0.0, 0.0, 16384, 16384),
        (1.0, 0.0, N_CTX, 8192),
    ):
        p.rope_freq_scale, p.rope_freq_base, p.n_ctx = scale, base, n_ctx
        with Engine(models["llama"], params(64)) as engine:
            ctx = L.llama_init_from_model(engine.model, p)
            assert _capi.init(ctx, params(64)) == Status.OK
            assert _capi.n_pos_max(ctx) == expected
            L.llama_free(ctx)


def test_defaults() -> None:
    found = _capi.prefill_default_params()
    assert (found.n_cells, found.n_chunk, found.n_probe, found.logits_all) == (0, 1024, 32, False)
