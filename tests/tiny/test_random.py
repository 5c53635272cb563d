"""Random operations against a model of what must be in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from engine import Engine, params

from snapkv_gguf import _capi, tiny
from snapkv_gguf._capi import Status

N_CTX, N_SEQ, WINDOW, SLACK = 256, 3, 8, _capi.RING_SLACK
N_LAYER, N_HEAD_KV = 2, 2
Row = tuple[tuple[bytes, ...], ...]  # per layer: K of head 0, V of head 0, K of head 1, ...; of packed ones V only


@dataclass
class Sequence:
    """Positions and rows in the order of (position, insertion), the frontier, the positions with a query."""

    pos: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    frontier: int = -1
    ring: dict[int, int] | None = field(default_factory=dict)  # row -> position; None: not followed
    is_packed: bool = False

    def copy(self) -> Sequence:
        return Sequence(list(self.pos), list(self.rows), self.frontier, is_packed=self.is_packed)

    def restored(self) -> Sequence:
        # a whole sequence starts at 0
        found = self.copy()
        found.frontier = self.pos[0] if self.pos[0] > 0 else -1
        found.is_packed = found.frontier >= 0 and found.frontier + 1 == self.pos.count(found.frontier)
        return found

    def n_queries(self, n_max: int) -> int:
        n = 0
        assert self.ring is not None
        while n < min(n_max, len(self.pos)):
            pos = self.pos[-1] - n
            if self.pos[-1 - n] != pos or pos <= self.frontier or self.ring.get(pos % (WINDOW + SLACK)) != pos:
                break
            n += 1
        return n

    def n_tail(self, n_max: int) -> int:
        n = 0
        while n < min(n_max, len(self.pos)) and self.pos[-1 - n] == self.pos[-1] - n > self.frontier:
            n += 1
        return n

    def can_remove(self, p0: int, p1: int) -> bool:
        return self.frontier < 0 or p0 > self.frontier or (p0 <= 0 and p1 > self.pos[-1])

    def remove(self, p0: int, p1: int) -> None:
        left = [(p, r) for p, r in zip(self.pos, self.rows, strict=True) if not p0 <= p < p1]
        self.pos, self.rows = [p for p, _ in left], [r for _, r in left]
        if self.ring is not None:
            self.ring = {k: p for k, p in self.ring.items() if not p0 <= p < p1}
        if p0 <= self.frontier:
            self.frontier, self.is_packed = -1, False

    def keep(self, kept: list[np.ndarray], budget: int, tail: int, packed: bool) -> None:
        """The rows kept[layer][head, j] move to the first cells, the last ``tail`` have positions of their own."""
        last = budget - 1 if packed else self.pos[-1]
        n_part = len(self.rows[0][0]) // N_HEAD_KV
        self.rows = [
            tuple(
                tuple(
                    self.rows[kept[i][head][j]][i][n_part * head + part]
                    for head in range(N_HEAD_KV)
                    for part in range(n_part)
                )
                for i in range(N_LAYER)
            )
            for j in range(budget)
        ]
        if packed and last != self.pos[-1]:
            self.ring = {}
        self.frontier = last - tail
        self.is_packed = packed
        self.pos = [self.frontier] * (budget - tail) + list(range(self.frontier + 1, last + 1))


def read(engine: Engine, seq: int, packed: bool) -> tuple[list[int], list[Row]]:
    cells = engine.cells(seq)
    rows = []
    first = int(packed)
    for j in range(len(cells.pos)):
        rows.append(
            tuple(
                tuple(part[j, head].tobytes() for head in range(N_HEAD_KV) for part in layer[first:])
                for layer in cells.rows
            )
        )
    return cells.pos.tolist(), rows


def check(engine: Engine, model: list[Sequence], packed: bool) -> None:
    for seq, expected in enumerate(model):
        pos, rows = read(engine, seq, packed)
        assert pos == expected.pos
        assert rows == expected.rows
        assert engine.frontier(seq) == expected.frontier
        if expected.ring is not None:
            assert _capi.n_queries(engine.ctx, seq, 0) == expected.n_queries(WINDOW)
        assert engine.pos_max(seq) == (pos[-1] if pos else -1)


def shares_cells(engine: Engine, seq: int) -> bool:
    cells = {s: set(_capi.cells(engine.ctx, s)[1].tolist()) for s in range(N_SEQ)}
    return any(cells[seq] & cells[s] for s in range(N_SEQ) if s != seq)


def run(
    path: Path, seed: int, n_steps: int, unified: bool, type_k: str, flash_attn: bool, packed: bool
) -> dict[str, int]:
    rng = np.random.default_rng(seed)
    counts: dict[str, int] = {}
    positions = "packed" if packed else "true"
    settings = params(64, WINDOW, kernel=5, positions=positions)
    operations = {
        "prompt": 0.18,
        "token": 0.14,
        "pass": 0.14,
        "room": 0.09,
        "chunks": 0.06,
        "chunks-stopped": 0.03,
        "tail": 0.08,
        "remove": 0.06,
        "copy": 0.05,
        "clear": 0.01,
        "save": 0.05,
        "restore": 0.05,
        "drop": 0.04,
        "abort": 0.02,
    }
    with Engine(
        path,
        settings,
        n_ctx=N_CTX if unified else N_CTX * N_SEQ,
        n_seq_max=N_SEQ,
        unified=unified,
        type_k=type_k,
        type_v=type_k if flash_attn else "f16",
        flash_attn=flash_attn,
        n_batch=64,
        n_ubatch=32,
    ) as engine:
        model = [Sequence() for _ in range(N_SEQ)]
        saved: list[tuple[bytes, Sequence]] = []
        for _ in range(n_steps):
            seq = int(rng.integers(N_SEQ))
            cur = model[seq]
            op = str(rng.choice(list(operations), p=list(operations.values())))
            if op in ("prompt", "token", "abort"):
                n = 1 if op == "token" else int(rng.integers(1, 90))
                start = cur.pos[-1] + 1 if cur.pos else 0
                tokens = rng.integers(3, 320, n).tolist()
                if op == "abort":
                    with engine.aborting_after(int(rng.integers(0, 60))):
                        code = engine.try_decode(tokens, start, seq)
                else:
                    code = engine.try_decode(tokens, start, seq)
                pos, rows = read(engine, seq, packed)
                n_old, n_done = len(cur.pos), len(pos) - len(cur.pos)
                assert code == 0 or n_done < n
                assert pos == cur.pos + list(range(start, start + n_done))
                assert rows[:n_old] == cur.rows
                cur.pos, cur.rows = pos, rows
                # an aborted ubatch has written the ring before it was taken back; without room none was begun
                reached = start + n_done + (min(32, n - n_done) if code == 2 else 0)
                if cur.ring is not None:
                    cur.ring |= {p % (WINDOW + SLACK): p for p in range(start, reached)}
                    cur.ring = {k: p for k, p in cur.ring.items() if p < start + n_done}
                if code != 0:
                    op += "-refused"
            elif op == "pass":
                budget = int(rng.integers(WINDOW + 1, 100))
                recent = int(rng.choice([0, WINDOW, (WINDOW + budget) // 2]))
                kernel, pool = int(rng.choice([1, 5, 9])), str(rng.choice(["avg", "max"]))
                override = params(budget, WINDOW, recent if recent < budget else 0, kernel, pool, positions=positions)
                w = _capi.n_queries(engine.ctx, seq, 0) if cur.ring is None else cur.n_queries(WINDOW)
                wanted = (
                    Status.INVALID_PARAMS
                    if packed and budget == WINDOW + 1
                    else Status.WITHIN_BUDGET
                    if len(cur.pos) <= budget
                    else Status.SHARED_CELLS
                    if unified and shares_cells(engine, seq)
                    else Status.NO_QUERIES
                    if not w
                    else Status.NOT_PACKED
                    if packed and cur.frontier >= 0 and not cur.is_packed
                    else Status.OK
                )
                kept = []
                if wanted == Status.OK:
                    recent = max(override.n_recent, WINDOW)
                    used = params(budget, w, recent, kernel, pool)
                    for i in range(N_LAYER):
                        kept.append(engine.select(_capi.scores(engine.ctx, seq, i, w), N_HEAD_KV, used))
                status, stats = engine.compact(seq, override)
                assert status == wanted
                op += f"-{status.name}"
                if status == Status.OK:
                    assert stats.n_window == w
                    cur.keep(kept, budget, cur.n_tail(WINDOW), packed)
            elif op == "room":
                budget, recent = int(rng.integers(WINDOW + 2, 80)), int(rng.choice([0, WINDOW]))
                probe = rng.integers(3, 320, int(rng.integers(1, 33))).tolist()
                end = cur.pos[-1] + 1 if cur.pos else 0
                override = params(budget, WINDOW, recent, 5, positions=positions)
                wanted = (
                    Status.WITHIN_BUDGET
                    if len(cur.pos) <= budget
                    else Status.SHARED_CELLS
                    if unified and shares_cells(engine, seq)
                    else Status.NOT_PACKED
                    if packed and cur.frontier >= 0 and not cur.is_packed
                    else Status.OK
                )
                if wanted == Status.OK and _capi.n_room(engine.ctx, seq) < len(probe):
                    counts["room-full"] = counts.get("room-full", 0) + 1
                    continue
                kept = []
                if wanted == Status.OK:
                    engine.decode(probe, end, seq)
                    w = min(WINDOW, len(probe))
                    used = params(budget + len(probe), w, max(min(recent, budget // 8) + len(probe), WINDOW), 5)
                    for i in range(N_LAYER):
                        kept.append(engine.select(_capi.scores(engine.ctx, seq, i, w), N_HEAD_KV, used))
                    assert engine.seq_rm(end, -1, seq)
                status, _ = _capi.make_room(engine.ctx, seq, probe, override)
                assert status == wanted
                op += f"-{status.name}"
                if status == Status.OK:
                    if cur.ring is not None:
                        cur.ring |= {p % (WINDOW + SLACK): p for p in range(end, end + len(probe))}
                        cur.ring = {k: p for k, p in cur.ring.items() if p < end}
                    cur.pos += range(end, end + len(probe))
                    cur.rows += [cur.rows[0]] * len(probe)  # gone again below
                    cur.keep(kept, budget + len(probe), len(probe), packed)
                    cur.pos, cur.rows = cur.pos[:budget], cur.rows[:budget]
            elif op in ("chunks", "chunks-stopped"):
                n, chunk = int(rng.integers(1, 400)), int(rng.integers(1, 100))
                n_probe, cells = int(rng.integers(0, 40)), int(rng.choice([0, 120, 200]))
                budget = int(rng.integers(WINDOW + 2, 80))
                stop_at = int(rng.integers(0, n)) if op == "chunks-stopped" else n + 1
                start = cur.pos[-1] + 1 if cur.pos else 0
                status, chunks = _capi.prefill(
                    engine.ctx,
                    seq,
                    rng.integers(3, 320, n).tolist(),
                    params=params(budget, WINDOW, kernel=5, positions=positions),
                    cells=cells,
                    chunk=chunk,
                    probe=n_probe,
                    progress=lambda done, _, stop_at=stop_at: done < stop_at,
                )
                pos, rows = read(engine, seq, packed)
                op += f"-{status.name}"
                if status == Status.OK:
                    assert len(pos) == len(cur.pos) + n - chunks.n_evicted == chunks.n_cells
                    assert chunks.n_passes == 0 or cells == 0 or len(pos) <= max(cells, budget)
                    assert pos[-1] == (start + n - 1 if not packed or chunks.n_passes == 0 else pos[-1])
                    # what was not read now was there before
                    known = {row[0][0] for row in cur.rows}
                    old = len([p for p in pos if p < start]) if chunks.n_passes == 0 else 0
                    assert all(row[0][0] in known for row in rows[:old])
                    cur.pos, cur.rows, cur.frontier = pos, rows, engine.frontier(seq)
                    cur.is_packed = cur.is_packed or (packed and chunks.n_passes > 0)
                    cur.ring = None
                elif status in (Status.CANCELLED, Status.SEQUENCE_LOST):
                    model[seq] = Sequence()
                    assert pos == []
                else:
                    assert status in (Status.NO_ROOM, Status.SHARED_CELLS, Status.NOT_PACKED, Status.NO_QUERIES)
            elif op in ("tail", "remove", "drop") and cur.pos:
                p0 = int(rng.integers(max(0, cur.pos[-1] - 40), cur.pos[-1] + 2))
                p1 = 2**31 - 1 if op == "tail" else p0 + int(rng.integers(1, 9))
                if op == "drop":
                    p0, p1 = 0, 2**31 - 1
                can = cur.can_remove(p0, p1)
                assert engine.seq_rm(p0, p1 if p1 < 2**31 - 1 else -1, seq) == can
                if can:
                    cur.remove(p0, p1)
                else:
                    op += "-refused"
            elif op == "copy":
                other = (seq + 1) % N_SEQ
                engine.seq_rm(-1, -1, other)
                engine.seq_cp(seq, other)
                model[other] = cur.copy()
            elif op == "clear":
                engine.clear()
                model = [Sequence() for _ in range(N_SEQ)]
            elif op == "save" and cur.pos:
                saved.append((engine.seq_state(seq), cur.copy()))
            elif op == "restore" and saved:
                state, copy = saved[int(rng.integers(len(saved)))]
                if engine.set_seq_state(state, seq):
                    model[seq] = copy.restored()
                else:
                    op += "-refused"
                    model[seq] = Sequence()
            counts[op] = counts.get(op, 0) + 1
            check(engine, model, packed)
    return counts


@pytest.mark.parametrize(
    ("unified", "type_k", "flash_attn", "packed"),
    [
        (True, "f16", True, False),
        (False, "f16", True, False),
        (True, "q8_0", True, False),
        (True, "f16", False, False),
        (False, "f16", False, False),
        (True, "f16", True, True),
        (False, "q8_0", True, True),
        (True, "f16", False, True),
    ],
)
def test_random_operations(tmp_path: Path, unified: bool, type_k: str, flash_attn: bool, packed: bool) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_layer=2, n_head=4, n_head_kv=2, n_embd_head=32, n_ff=64))
    counts: dict[str, int] = {}
    for seed in range(4):
        for op, n in run(path, seed, 300, unified, type_k, flash_attn, packed).items():
            counts[op] = counts.get(op, 0) + n
    print(dict(sorted(counts.items())))
    expected = ["pass-OK", "pass-WITHIN_BUDGET", "pass-NO_QUERIES", "tail", "tail-refused", "restore", "copy"]
    expected += ["room-OK", "chunks-OK", "chunks-stopped-CANCELLED", *(["chunks-NO_ROOM"] if unified else [])]
    for op in expected:
        assert counts.get(op, 0) > 0, (op, counts)
