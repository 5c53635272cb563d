"""A context of llama.cpp without the conveniences of llama_cpp.Llama, for the tests of the pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import devices
import numpy as np
import numpy.typing as npt
from devices import ROUNDING
from ggml_tensor import Tensor
from gguf import GGMLQuantizationType

from snapkv_gguf import _capi, reference
from snapkv_gguf._capi import Params, Stats, Status
from snapkv_gguf.config import Pool

import llama_cpp as L  # isort: skip  # after snapkv_gguf, which makes it load our libraries

CACHE_TYPES = {
    name: int(GGMLQuantizationType[name.upper()])
    for name in ("f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
}

_log_lines: list[tuple[int, str]] = []


@L.llama_log_callback
def _log(level: int, text: bytes, _: object) -> None:
    _log_lines.append((level, text.decode(errors="replace")))


L.llama_backend_init()
devices.register()
L.llama_log_set(_log, ctypes.c_void_p(0))


def logged() -> str:
    """What llama.cpp logged since the last call."""
    text = "".join(line for _, line in _log_lines)
    _log_lines.clear()
    return text


def load_model(path: str | Path) -> object:
    """The model, with its layers where SNAPKV_TEST_DEVICE wants them."""
    p = L.llama_model_default_params()
    p.n_gpu_layers = devices.n_gpu_layers(path)
    model = L.llama_model_load_from_file(str(path).encode(), p)
    assert model, logged()[-2000:]
    return model


def params(
    budget: int,
    window: int = 16,
    recent: int = 0,
    kernel: int = 21,
    pool: str = "max",
    rule: str = "snapkv",
    positions: str = "true",
) -> Params:
    names = (_capi.POOL_TYPES[pool], _capi.RULES[rule], _capi.POSITIONS[positions])  # type: ignore[index]
    return Params(budget, window, recent, kernel, *names)


class Rounding(NamedTuple):
    """Cells that two computations chose differently, because their scores are equal in float32, and of how many."""

    n_differ: int
    n_kept: int


@dataclass
class Cells:
    """What a sequence holds: positions, cell indices, and by layer its tensors' rows, [n, n_head_kv, bytes]."""

    pos: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    rows: list[list[npt.NDArray[np.uint8]]]


@dataclass
class Chosen:
    """What a pass is to keep: the sequence before it, with the original positions of its rows by layer and KV head, and
    by layer what the oracle chooses by its own sums, with these, and by those of the device."""

    before: Cells
    origin: list[list[npt.NDArray[np.int32]]]
    exact: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]
    device: list[npt.NDArray[np.int64]]


def probe_settings(settings: Params, probe: Sequence[int]) -> Params:
    """Those of the pass itself: the budget of a pass in the middle is without the probe."""
    used = Params.from_buffer_copy(settings)
    used.n_budget += len(probe)
    used.n_recent = max(min(settings.n_recent, settings.n_budget // 8) + len(probe), settings.n_window)
    used.n_window = min(settings.n_window, len(probe))
    return used


class Engine:
    def __init__(
        self,
        path: str | Path,
        snapkv: Params | None = None,
        *,
        n_ctx: int = 1024,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        unified: bool = True,
        flash_attn: bool = True,
        type_k: str = "f16",
        type_v: str | None = None,
        embeddings: bool = False,
        swa_full: bool = True,
        offload_kqv: bool = True,
        rope_scaling: int = -1,  # enum llama_rope_scaling_type, by 4
        on_node: Callable[[Tensor], None] | None = None,
        n_threads: int = 1,  # tiny models: a barrier costs more than a layer
    ) -> None:
        self.model = load_model(path)
        p = L.llama_context_default_params()
        p.n_ctx = n_ctx
        p.n_batch = n_batch
        p.n_ubatch = n_ubatch
        p.n_seq_max = n_seq_max
        p.kv_unified = unified
        p.flash_attn_type = 1 if flash_attn else 0
        p.type_k = CACHE_TYPES[type_k]
        p.type_v = CACHE_TYPES[type_v or type_k]
        p.n_threads = p.n_threads_batch = n_threads
        p.embeddings = embeddings
        p.swa_full = swa_full
        p.offload_kqv = offload_kqv
        if rope_scaling > 0:
            p.rope_scaling_type, p.rope_freq_scale = rope_scaling, 0.25
        if on_node is not None:

            @L.ggml_backend_sched_eval_callback
            def look(pointer: int, ask: bool, _: object) -> bool:
                if ask:
                    on_node(Tensor.at(pointer))
                return False

            p.cb_eval = self._look = look
        self.ctx = L.llama_init_from_model(self.model, p)
        assert self.ctx, logged()[-2000:]
        self.flash_attn = flash_attn
        self.n_batch = n_batch
        self.n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self.memory = L.llama_get_memory(self.ctx)
        self._batch = L.llama_batch_init(n_batch, 0, max(1, n_seq_max))
        self.init_status = _capi.init(self.ctx, snapkv) if snapkv is not None else None

    def close(self) -> None:
        if self.ctx:
            L.llama_batch_free(self._batch)
            L.llama_free(self.ctx)
            L.llama_model_free(self.model)
            self.ctx = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def try_decode(
        self, tokens: Sequence[int], pos: int = 0, seq: int | Iterable[int] = 0, all_logits: bool = False
    ) -> int:
        """llama_decode in batches of n_batch; the first return code that is not 0."""
        seqs = [seq] if isinstance(seq, int) else list(seq)
        for start in range(0, len(tokens), self.n_batch):
            part = tokens[start : start + self.n_batch]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i] = int(token)
                batch.pos[i] = pos + start + i
                batch.n_seq_id[i] = len(seqs)
                for j, s in enumerate(seqs):
                    batch.seq_id[i][j] = s
                batch.logits[i] = start + i == len(tokens) - 1
            code = L.llama_decode(self.ctx, batch)
            if code != 0:
                return int(code)
        return 0

    def decode(self, tokens: Sequence[int], pos: int = 0, seq: int | Iterable[int] = 0) -> npt.NDArray[np.float32]:
        """Decode and return the last token's logits, [n_vocab]."""
        code = self.try_decode(tokens, pos, seq)
        assert code == 0, (code, logged()[-2000:])
        return self.logits()

    def decode_image(self, width: int, height: int, pos: int, seq: int = 0) -> None:
        """Random embeddings of an image at M-RoPE positions: one in time, a grid in space."""
        n, n_embd = width * height, L.llama_model_n_embd(self.model)
        embd = np.random.default_rng(0).standard_normal((n, n_embd), dtype=np.float32)
        grid = np.zeros((4, n), np.int32)
        grid[0] = pos
        grid[1] = pos + np.arange(n) // width
        grid[2] = pos + np.arange(n) % width
        batch = L.llama_batch_init(n, n_embd, 1)
        own_pos = ctypes.cast(batch.pos, ctypes.c_void_p).value  # one number per token is not enough
        batch.pos = grid.ctypes.data_as(ctypes.POINTER(L.llama_pos))
        batch.n_tokens = n
        ctypes.memmove(batch.embd, embd.ctypes.data, embd.nbytes)
        for i in range(n):
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, False
        try:
            assert L.llama_decode(self.ctx, batch) == 0, logged()[-2000:]
        finally:
            batch.pos = ctypes.cast(own_pos, ctypes.POINTER(L.llama_pos))
            L.llama_batch_free(batch)

    def decode_many(self, parts: dict[int, tuple[Sequence[int], int]]) -> None:
        """One batch with tokens of several sequences: {seq: (tokens, position)}."""
        batch, i = self._batch, 0
        for seq, (tokens, pos) in parts.items():
            for j, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), pos + j, 1
                batch.seq_id[i][0] = seq
                batch.logits[i] = j == len(tokens) - 1
                i += 1
        batch.n_tokens = i
        assert L.llama_decode(self.ctx, batch) == 0, logged()[-2000:]

    def logits(self, i: int = -1) -> npt.NDArray[np.float32]:
        return np.ctypeslib.as_array(L.llama_get_logits_ith(self.ctx, i), (self.n_vocab,)).copy()

    def greedy(self, n: int, pos: int, seq: int = 0) -> tuple[list[int], npt.NDArray[np.float32]]:
        """n tokens from the present logits on, and the logits each was decoded with: [n, n_vocab]."""
        tokens, rows = [], []
        logits = self.logits()
        for i in range(n):
            tokens.append(int(logits.argmax()))
            logits = self.decode([tokens[-1]], pos + i, seq)
            rows.append(logits)
        return tokens, np.array(rows)

    def compact(self, seq: int = 0, override: Params | None = None) -> tuple[Status, Stats]:
        return _capi.compact(self.ctx, seq, override)

    def n_cells(self, seq: int = 0) -> int:
        return _capi.n_cells(self.ctx, seq)

    def frontier(self, seq: int = 0) -> int:
        return _capi.frontier(self.ctx, seq)

    def seq_rm(self, p0: int, p1: int = -1, seq: int = 0) -> bool:
        return bool(L.llama_memory_seq_rm(self.memory, seq, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        L.llama_memory_seq_cp(self.memory, src, dst, p0, p1)

    def clear(self) -> None:
        L.llama_memory_clear(self.memory, True)

    def pos_min(self, seq: int = 0) -> int:
        return int(L.llama_memory_seq_pos_min(self.memory, seq))

    def pos_max(self, seq: int = 0) -> int:
        return int(L.llama_memory_seq_pos_max(self.memory, seq))

    def cells(self, seq: int = 0) -> Cells:
        pos, index = _capi.cells(self.ctx, seq)
        rows = [
            [_capi.rows_raw(self.ctx, seq, i, t) for t in range(len(layer.tensors))]
            for i, layer in enumerate(_capi.layers(self.ctx))
        ]
        return Cells(pos, index, rows)

    def state(self) -> bytes:
        size = L.llama_state_get_size(self.ctx)
        data = (ctypes.c_uint8 * size)()
        n = L.llama_state_get_data(self.ctx, data, size)
        return bytes(data[:n])

    def set_state(self, state: bytes) -> int:
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        return int(L.llama_state_set_data(self.ctx, data, len(state)))

    def seq_state(self, seq: int = 0) -> bytes:
        size = L.llama_state_seq_get_size(self.ctx, seq)
        data = (ctypes.c_uint8 * size)()
        n = L.llama_state_seq_get_data(self.ctx, data, size, seq)
        return bytes(data[:n])

    def set_seq_state(self, state: bytes, seq: int = 0) -> int:
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        return int(L.llama_state_seq_set_data(self.ctx, data, len(state), seq))

    @contextmanager
    def aborting_after(self, n_calls: int) -> Iterator[list[int]]:
        """The abort callback says yes from its n-th call on; yields [number of calls]."""
        calls = [0]

        @L.ggml_abort_callback
        def abort(_: object) -> bool:
            calls[0] += 1
            return calls[0] > n_calls

        L.llama_set_abort_callback(self.ctx, abort, None)
        try:
            yield calls
        finally:
            L.llama_set_abort_callback(self.ctx, L.ggml_abort_callback(0), None)

    def oracle(self, i: int, settings: Params, seq: int = 0) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Scores [n_head, n] and kept cells [n_head_kv, budget] of layer i by NumPy, from what the context holds."""
        layer = _capi.layers(self.ctx)[i]
        pos, _ = _capi.cells(self.ctx, seq)
        window = settings.n_window
        # heads in the order of (KV head, reader, head of the reader)
        by_reader = [
            reference.attention(
                _capi.queries(self.ctx, seq, i, r)[-window:],
                _capi.rows_f32(self.ctx, seq, i, reader.i_tensor),
                pos[-window:],
                pos,
                scale=reader.kq_scale,
                softcap=reader.softcap,
                cap_scale=reader.cap_scale,
                sinks=_capi.sinks(self.ctx, i, r),
            )
            .sum(axis=0)
            .reshape(layer.n_head_kv, -1, len(pos))
            for r, reader in enumerate(layer.readers)
        ]
        sums = np.concatenate(by_reader, axis=1).reshape(layer.n_head, -1)
        return sums, self.select(sums, layer.n_head_kv, settings)

    def check_pass(self, settings: Params, tokens: Sequence[int]) -> Rounding:
        """Decode the prompt, compact it, and compare kept sets and moved rows with the oracle."""
        self.clear()
        self.decode(tokens)
        n, n_tail = len(tokens), settings.n_window
        chosen = self.chosen(settings)

        status, stats = self.compact(0, settings)
        assert status == Status.OK
        assert (stats.n_cells_before, stats.n_cells_after) == (n, settings.n_budget)
        assert stats.n_window == settings.n_window
        assert stats.n_recent == max(settings.n_recent, settings.n_window)

        after = self.cells()
        frontier = n - n_tail - 1
        assert _capi.pos_end(self.ctx, 0) == n
        assert after.pos.tolist() == [frontier] * (settings.n_budget - n_tail) + list(range(frontier + 1, n))
        assert after.index.tolist() == sorted(chosen.before.index)[: settings.n_budget]
        return self.check_moved(chosen, settings)

    def look(self, settings: Params, probe: Sequence[int], tokens: Sequence[int] = ()) -> Chosen:
        """What the oracle keeps by the queries of a probe, here or in a context of its own.

        Tokens and probe are taken back; where cells of a sliding window are, the next decode can use others, and differ
        in its last bits.
        """
        start = self.pos_max() + 1
        self.decode([*tokens, *probe], start)
        chosen = self.chosen(probe_settings(settings, probe))
        assert self.seq_rm(start)
        return chosen

    def check_make_room(
        self, settings: Params, probe: Sequence[int], tokens: Sequence[int] = (), chosen: Chosen | None = None
    ) -> Rounding:
        """Make room by the queries of a probe, and compare kept sets and moved rows with the oracle."""
        chosen = chosen or self.look(settings, probe, tokens)
        used = probe_settings(settings, probe)
        n, end = self.n_cells() + len(tokens), self.pos_max() + 1 + len(tokens)

        status, stats = _capi.make_room(self.ctx, 0, probe, settings, tokens)
        assert status == Status.OK
        assert (stats.n_cells_before, stats.n_cells_after) == (n, settings.n_budget)
        assert stats.n_window == used.n_window

        after = self.cells()
        assert after.pos.tolist() == [end - 1] * settings.n_budget
        assert _capi.pos_end(self.ctx, 0) == end
        assert after.index.tolist() == sorted(chosen.before.index)[: settings.n_budget]
        return self.check_moved(chosen, used)

    def chosen(self, settings: Params) -> Chosen:
        """What the oracle keeps of what is there."""
        exact, device = [], []
        for i, layer in enumerate(_capi.layers(self.ctx)):
            exact.append(self.oracle(i, settings))
            sums = _capi.scores(self.ctx, 0, i, settings.n_window)
            assert np.abs(sums - exact[i][0]).max() <= ROUNDING * exact[i][0].max()
            device.append(self.select(sums, layer.n_head_kv, settings))
        origin = [
            [_capi.kept(self.ctx, 0, i, head) for head in range(layer.n_head_kv)]
            for i, layer in enumerate(_capi.layers(self.ctx))
        ]
        return Chosen(self.cells(), origin, exact, device)

    def check_moved(self, of: Chosen, settings: Params) -> Rounding:
        """Compare the rows that are there with those that were to be kept; a probe at the end may be gone."""
        after = self.cells()
        n_differ, n_kept = 0, 0
        for i, layer in enumerate(_capi.layers(self.ctx)):
            sums, chosen = of.exact[i]
            pooled = reference.window_scores(
                sums,
                window=settings.n_window,
                kernel=settings.n_kernel,
                pool=pool_name(settings),
                n_head_kv=layer.n_head_kv,
            )
            for head in range(layer.n_head_kv):
                kept = of.device[i][head]
                there = kept[: len(after.pos)]
                # the sets: exactly those of the oracle on the device's sums ...
                assert np.array_equal(_capi.kept(self.ctx, 0, i, head), of.origin[i][head][there])
                # ... and of the oracle on its own scores, but for cells whose scores are equal in float32
                differ = np.setxor1d(chosen[head], kept)
                assert differ.size == 0 or np.ptp(pooled[head][differ]) <= ROUNDING * pooled[head].max()
                n_differ, n_kept = n_differ + differ.size // 2, n_kept + kept.size
                # the rows: byte by byte those of the chosen cells
                for old, new in zip(of.before.rows[i], after.rows[i], strict=True):
                    assert np.array_equal(new[:, head], old[there, head])
        return Rounding(n_differ, n_kept)

    @staticmethod
    def select(sums: npt.ArrayLike, n_head_kv: int, settings: Params) -> npt.NDArray[np.int64]:
        return reference.select(
            sums,
            window=settings.n_window,
            budget=settings.n_budget,
            recent=settings.n_recent,
            kernel=settings.n_kernel,
            pool=pool_name(settings),
            n_head_kv=n_head_kv,
        )


def pool_name(settings: Params) -> Pool:
    return next(name for name, number in _capi.POOL_TYPES.items() if number == settings.pool)


def random_tokens(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, n_vocab, n)]
