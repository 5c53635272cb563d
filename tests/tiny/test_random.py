"""Random operations against a model of what must be in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from engine import Engine, params

from snapkv_gguf import _capi, tiny
from snapkv_gguf._capi import Status

N_CTX, N_SEQ, WINDOW, SLACK = 256, 3, 8, 16
N_LAYER, N_HEAD_KV = 2, 2
Row = tuple[tuple[bytes, ...], ...]  # per layer: K of head 0, V of head 0, K of head 1, ...


@dataclass
class Sequence:
    """Positions and rows in the order of (position, insertion), the frontier, the positions with a query."""

    pos: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    frontier: int = -1
    ring: dict[int, int] = field(default_factory=dict)  # row -> position

    def copy(self) -> Sequence:
        return Sequence(list(self.pos), list(self.rows), self.frontier)

    def n_queries(self, n_max: int) -> int:
        n = 0
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
        self.ring = {k: p for k, p in self.ring.items() if not p0 <= p < p1}
        if p0 <= self.frontier:
            self.frontier = -1


def read(engine: Engine, seq: int) -> tuple[list[int], list[Row]]:
    cells = engine.cells(seq)
    rows = []
    for j in range(len(cells.pos)):
        rows.append(
            tuple(tuple(part[j, head].tobytes() for head in range(N_HEAD_KV) for part in layer) for layer in cells.rows)
        )
    return cells.pos.tolist(), rows


def check(engine: Engine, model: list[Sequence]) -> None:
    for seq, expected in enumerate(model):
        pos, rows = read(engine, seq)
        assert pos == expected.pos
        assert rows == expected.rows
        assert engine.frontier(seq) == expected.frontier
        assert _capi.n_queries(engine.ctx, seq, 0) == expected.n_queries(WINDOW)
        assert engine.pos_max(seq) == (pos[-1] if pos else -1)


def shares_cells(engine: Engine, seq: int) -> bool:
    cells = {s: set(_capi.cells(engine.ctx, s)[1].tolist()) for s in range(N_SEQ)}
    return any(cells[seq] & cells[s] for s in range(N_SEQ) if s != seq)


def run(path: Path, seed: int, n_steps: int, unified: bool, type_k: str, flash_attn: bool) -> dict[str, int]:
    rng = np.random.default_rng(seed)
    counts: dict[str, int] = {}
    settings = params(64, WINDOW, kernel=5)
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
            op = str(
                rng.choice(
                    ["prompt", "token", "pass", "tail", "remove", "copy", "clear", "save", "restore", "drop", "abort"],
                    p=[0.22, 0.17, 0.17, 0.1, 0.08, 0.06, 0.01, 0.05, 0.05, 0.06, 0.03],
                )
            )
            if op in ("prompt", "token", "abort"):
                n = 1 if op == "token" else int(rng.integers(1, 90))
                start = cur.pos[-1] + 1 if cur.pos else 0
                tokens = rng.integers(3, 320, n).tolist()
                if op == "abort":
                    with engine.aborting_after(int(rng.integers(0, 60))):
                        code = engine.try_decode(tokens, start, seq)
                else:
                    code = engine.try_decode(tokens, start, seq)
                pos, rows = read(engine, seq)
                n_old, n_done = len(cur.pos), len(pos) - len(cur.pos)
                assert code == 0 or n_done < n
                assert pos == cur.pos + list(range(start, start + n_done))
                assert rows[:n_old] == cur.rows
                cur.pos, cur.rows = pos, rows
                # an aborted ubatch has written the ring before it was taken back; without room none was begun
                reached = start + n_done + (min(32, n - n_done) if code == 2 else 0)
                for p in range(start, reached):
                    cur.ring[p % (WINDOW + SLACK)] = p
                cur.ring = {k: p for k, p in cur.ring.items() if p < start + n_done}
                if code != 0:
                    op += "-refused"
            elif op == "pass":
                budget = int(rng.integers(WINDOW + 1, 100))
                recent = int(rng.choice([0, WINDOW, (WINDOW + budget) // 2]))
                kernel, pool = int(rng.choice([1, 5, 9])), str(rng.choice(["avg", "max"]))
                override = params(budget, WINDOW, recent if recent < budget else 0, kernel, pool)
                w = cur.n_queries(WINDOW)
                wanted = (
                    Status.WITHIN_BUDGET
                    if len(cur.pos) <= budget
                    else Status.SHARED_CELLS
                    if unified and shares_cells(engine, seq)
                    else Status.OK
                    if w
                    else Status.NO_QUERIES
                )
                keep = []
                if wanted == Status.OK:
                    recent = max(override.n_recent, WINDOW)
                    used = params(budget, w, recent, kernel, pool)
                    for i in range(N_LAYER):
                        keep.append(engine.select(_capi.scores(engine.ctx, seq, i, w), N_HEAD_KV, used))
                status, stats = engine.compact(seq, override)
                assert status == wanted
                op += f"-{status.name}"
                if status == Status.OK:
                    assert stats.n_window == w
                    tail = cur.n_tail(WINDOW)
                    cur.frontier = cur.pos[-1] - tail
                    cur.rows = [
                        tuple(
                            tuple(
                                cur.rows[keep[i][head][j]][i][2 * head + part]
                                for head in range(N_HEAD_KV)
                                for part in (0, 1)
                            )
                            for i in range(N_LAYER)
                        )
                        for j in range(budget)
                    ]
                    cur.pos = [cur.frontier] * (budget - tail) + cur.pos[len(cur.pos) - tail :]
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
                    model[seq] = copy.copy()
                    # a whole sequence starts at 0
                    model[seq].frontier = copy.pos[0] if copy.pos[0] > 0 else -1
                else:
                    op += "-refused"
                    model[seq] = Sequence()
            counts[op] = counts.get(op, 0) + 1
            check(engine, model)
    return counts


@pytest.mark.parametrize(
    ("unified", "type_k", "flash_attn"),
    [(True, "f16", True), (False, "f16", True), (True, "q8_0", True), (True, "f16", False), (False, "f16", False)],
)
def test_random_operations(tmp_path: Path, unified: bool, type_k: str, flash_attn: bool) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_layer=2, n_head=4, n_head_kv=2, n_embd_head=32, n_ff=64))
    counts: dict[str, int] = {}
    for seed in range(4):
        for op, n in run(path, seed, 300, unified, type_k, flash_attn).items():
            counts[op] = counts.get(op, 0) + n
    print(dict(sorted(counts.items())))
    for op in ("pass-OK", "pass-WITHIN_BUDGET", "pass-NO_QUERIES", "tail", "tail-refused", "restore", "copy"):
        assert counts.get(op, 0) > 0, (op, counts)
