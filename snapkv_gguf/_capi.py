"""ctypes for native/llama-snapkv.h, on the libllama that llama_cpp has loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from . import _lib
from .config import Pool, Positions, ResolvedSnapKV, Rule


class Status(IntEnum):
    """enum llama_snapkv_status: > 0 a success that did nothing, < 0 a refusal or a failure."""

    OK = 0
    WITHIN_BUDGET = 1
    INVALID_PARAMS = -1
    NOT_ENABLED = -2
    INVALID_SEQ = -3
    NO_QUERIES = -4
    SHARED_CELLS = -5
    UNSUPPORTED_RECURRENT = -6
    UNSUPPORTED_SWA = -7
    UNSUPPORTED_MEMORY = -8
    UNSUPPORTED_ENCODER = -9
    UNSUPPORTED_EMBEDDINGS = -10
    UNSUPPORTED_ALIBI = -11
    UNSUPPORTED_BIAS = -12
    UNSUPPORTED_QUERIES = -13
    NOT_EMPTY = -14
    NOT_OBSERVED = -15
    UNSUPPORTED_POSITIONS = -16
    NOT_PACKED = -17
    NO_ROOM = -18
    FAILED_RESERVE = -19
    ABORTED = -20
    FAILED_COMPUTE = -21
    SEQUENCE_LOST = -22
    CANCELLED = -23
    BEYOND_CONTEXT = -24


# queries beside those of the window, so that tokens can be taken back: LLAMA_SNAPKV_N_RING_SLACK
RING_SLACK = 16

POOL_TYPES: dict[Pool, int] = {"avg": 0, "max": 1}

RULES: dict[Rule, int] = {name: i for i, name in enumerate(get_args(Rule))}

POSITIONS: dict[Positions, int] = {name: i for i, name in enumerate(get_args(Positions))}


class Params(ctypes.Structure):
    """struct llama_snapkv_params."""

    _fields_ = [
        ("n_budget", ctypes.c_uint32),
        ("n_window", ctypes.c_uint32),
        ("n_recent", ctypes.c_uint32),
        ("n_kernel", ctypes.c_uint32),
        ("pool", ctypes.c_int),
        ("rule", ctypes.c_int),
        ("positions", ctypes.c_int),
    ]

    @classmethod
    def of(cls, settings: ResolvedSnapKV) -> Params:
        """The struct for settings in cells."""
        names = (POOL_TYPES[settings.pool], RULES[settings.rule], POSITIONS[settings.positions])
        return cls(settings.budget, settings.window, settings.recent, settings.kernel, *names)


class Stats(ctypes.Structure):
    """struct llama_snapkv_stats."""

    n_cells_before: int
    n_cells_after: int
    n_window: int
    n_recent: int
    n_bytes_freed: int
    n_bytes_grown: int
    t_score_us: int
    t_select_us: int
    t_move_us: int
    t_total_us: int

    _fields_ = [
        ("n_cells_before", ctypes.c_uint32),
        ("n_cells_after", ctypes.c_uint32),
        ("n_window", ctypes.c_uint32),
        ("n_recent", ctypes.c_uint32),
        ("n_bytes_freed", ctypes.c_uint64),
        ("n_bytes_grown", ctypes.c_uint64),
        ("t_score_us", ctypes.c_int64),
        ("t_select_us", ctypes.c_int64),
        ("t_move_us", ctypes.c_int64),
        ("t_total_us", ctypes.c_int64),
    ]


#: Called with the tokens done and the tokens to do; False stops the prefill.
Progress = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)


class PrefillParams(ctypes.Structure):
    """struct llama_snapkv_prefill_params."""

    _fields_ = [
        ("params", ctypes.POINTER(Params)),
        ("n_cells", ctypes.c_uint32),
        ("n_chunk", ctypes.c_uint32),
        ("probe", ctypes.POINTER(ctypes.c_int32)),
        ("n_probe", ctypes.c_uint32),
        ("logits_all", ctypes.c_bool),
        ("progress", Progress),
        ("progress_user_data", ctypes.c_void_p),
    ]


class PrefillStats(ctypes.Structure):
    """struct llama_snapkv_prefill_stats."""

    n_tokens: int
    n_passes: int
    n_evicted: int
    n_cells: int
    t_decode_us: int
    t_probe_us: int
    t_pass_us: int
    t_total_us: int

    _fields_ = [
        ("n_tokens", ctypes.c_uint32),
        ("n_passes", ctypes.c_uint32),
        ("n_evicted", ctypes.c_uint32),
        ("n_cells", ctypes.c_uint32),
        ("t_decode_us", ctypes.c_int64),
        ("t_probe_us", ctypes.c_int64),
        ("t_pass_us", ctypes.c_int64),
        ("t_total_us", ctypes.c_int64),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("il", "n_head", "n_head_kv", "n_tensor", "n_reader")]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("il", ctypes.c_int32),
        ("n_embd_head", ctypes.c_int32),
        ("is_v", ctypes.c_bool),
        ("type", ctypes.c_int),
    ]


class _Reader(ctypes.Structure):
    _fields_ = [
        ("il", ctypes.c_int32),
        ("n_head", ctypes.c_int32),
        ("i_tensor", ctypes.c_int32),
        ("kq_scale", ctypes.c_float),
        ("cap_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("has_sinks", ctypes.c_bool),
    ]


@dataclass(frozen=True)
class Tensor:
    """Rows that move together with those of the layer's other tensors; ``type`` is a ggml_type number."""

    il: int
    n_embd_head: int
    is_v: bool
    type: int


@dataclass(frozen=True)
class Reader:
    """A layer of the model whose queries score the rows; ``i_tensor`` is the K that they multiply.

    Its logits are kq_scale * cap(cap_scale * q.k).
    """

    il: int
    n_head: int
    i_tensor: int
    kq_scale: float
    cap_scale: float
    softcap: float
    has_sinks: bool


@dataclass(frozen=True)
class Layer:
    """A layer that the pass compacts; ``n_head`` counts the query heads of all readers."""

    il: int
    n_head: int
    n_head_kv: int
    tensors: tuple[Tensor, ...]
    readers: tuple[Reader, ...]


class SnapKVError(RuntimeError):
    """A pass was refused or failed.

    Attributes:
        status: The status of llama-snapkv.h.
    """

    def __init__(self, status: Status, advice: str = "") -> None:
        super().__init__(status, advice)
        self.status = status
        self.advice = advice

    def __str__(self) -> str:
        text = f"{status_str(self.status)} ({self.status.name})"
        return f"{text}: {self.advice}" if self.advice else text


lib = _lib.load()


class _ctx(ctypes.c_void_p):
    @classmethod
    def from_param(cls, value: Any) -> Any:
        if not value:
            raise ValueError("the context was closed")
        return ctypes.c_void_p.from_param(value)


_seq = ctypes.c_int32
_i32 = ctypes.c_int32
_i32_p = ctypes.POINTER(ctypes.c_int32)
_f32_p = ctypes.POINTER(ctypes.c_float)
_f64_p = ctypes.POINTER(ctypes.c_double)
_u8_p = ctypes.POINTER(ctypes.c_uint8)

# name without its prefix: (result, arguments)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "default_params": (Params, []),
    "paper_params": (Params, []),
    "params_check": (ctypes.c_char_p, [Params]),
    "status_str": (ctypes.c_char_p, [ctypes.c_int]),
    "rule_name": (ctypes.c_char_p, [ctypes.c_int]),
    "supported": (ctypes.c_int, [_ctx]),
    "init": (ctypes.c_int, [_ctx, Params]),
    "compact": (ctypes.c_int, [_ctx, _seq, ctypes.POINTER(Params), ctypes.POINTER(Stats)]),
    "make_room": (
        ctypes.c_int,
        [_ctx, _seq, _i32_p, ctypes.c_uint32, _i32_p, ctypes.c_uint32, ctypes.POINTER(Params), ctypes.POINTER(Stats)],
    ),
    "prefill_default_params": (PrefillParams, []),
    "prefill": (
        ctypes.c_int,
        [_ctx, _seq, _i32_p, ctypes.c_uint32, ctypes.POINTER(PrefillParams), ctypes.POINTER(PrefillStats)],
    ),
    "n_room": (_i32, [_ctx, _seq, ctypes.c_uint32]),
    "n_pos_max": (_i32, [_ctx]),
    "n_tokens": (_i32, [_ctx, _seq]),
    "observe": (ctypes.c_int, [_ctx, _seq]),
    "get_observed": (ctypes.c_int64, [_ctx, _seq, _f64_p, ctypes.c_size_t]),
    "set_observed": (ctypes.c_bool, [_ctx, _seq, _f64_p, ctypes.c_size_t]),
    "n_cells": (_i32, [_ctx, _seq]),
    "frontier": (_i32, [_ctx, _seq]),
    "pos_end": (_i32, [_ctx, _seq]),
    "ring_size": (ctypes.c_size_t, [_ctx]),
    "n_layer": (_i32, [_ctx]),
    "get_layer": (ctypes.c_bool, [_ctx, _i32, ctypes.POINTER(_Layer)]),
    "get_tensor": (ctypes.c_bool, [_ctx, _i32, _i32, ctypes.POINTER(_Tensor)]),
    "get_reader": (ctypes.c_bool, [_ctx, _i32, _i32, ctypes.POINTER(_Reader)]),
    "get_cells": (_i32, [_ctx, _seq, _i32_p, _i32_p, _i32]),
    "get_kept": (_i32, [_ctx, _seq, _i32, _i32, _i32_p, _i32]),
    "get_rotated": (_i32, [_ctx, _seq, _i32_p, _i32]),
    "get_queries": (_i32, [_ctx, _seq, _i32, _i32, _f32_p, ctypes.c_size_t]),
    "get_scores": (ctypes.c_int64, [_ctx, _seq, _i32, ctypes.c_uint32, _f32_p, ctypes.c_size_t]),
    "get_rows_raw": (ctypes.c_int64, [_ctx, _seq, _i32, _i32, _u8_p, ctypes.c_size_t]),
    "get_rows_f32": (ctypes.c_int64, [_ctx, _seq, _i32, _i32, _f32_p, ctypes.c_size_t]),
    "get_sinks": (_i32, [_ctx, _i32, _i32, _f32_p, _i32]),
    "build_info": (ctypes.c_char_p, []),
}


def _bind(name: str) -> Any:
    function = getattr(lib, f"llama_snapkv_{name}")
    function.restype, function.argtypes = _SIGNATURES[name]
    return function


_c = {name: _bind(name) for name in _SIGNATURES}


def _text(value: bytes | None) -> str:
    return value.decode() if value else ""


def default_params() -> Params:
    """The library's recommended setting."""
    params: Params = _c["default_params"]()
    return params


def paper_params() -> Params:
    """The library's setting of the paper."""
    params: Params = _c["paper_params"]()
    return params


def prefill_default_params() -> PrefillParams:
    """What :func:`prefill` does if nothing else is said."""
    found: PrefillParams = _c["prefill_default_params"]()
    return found


def params_check(params: Params) -> str:
    """Empty if the parameters are valid, else a sentence that says which is wrong."""
    return _text(_c["params_check"](params))


def rule_name(rule: int) -> str:
    """The library's name for a rule, empty if there is none."""
    return _text(_c["rule_name"](rule))


def status_str(status: Status) -> str:
    """The library's text for a status."""
    return _text(_c["status_str"](status))


def build_info() -> str:
    """Version of the interface and the marks of the patches compiled in, separated by spaces."""
    return _text(_c["build_info"]())


def supported(ctx: Any) -> Status:
    """Whether sequences of this context can be compacted at all."""
    return Status(_c["supported"](ctx))


def init(ctx: Any, params: Params) -> Status:
    """Start to capture queries; the context must hold no tokens."""
    return Status(_c["init"](ctx, params))


def compact(ctx: Any, seq_id: int, params: Params | None = None) -> tuple[Status, Stats]:
    """The pass; ``params`` None for those of :func:`init`."""
    stats = Stats()
    status = _c["compact"](ctx, seq_id, None if params is None else ctypes.byref(params), ctypes.byref(stats))
    return Status(status), stats


def make_room(
    ctx: Any, seq_id: int, probe: Sequence[int] = (), params: Params | None = None, tokens: Sequence[int] = ()
) -> tuple[Status, Stats]:
    """The pass for a sequence that is still being read, by the queries of the probe, which is taken back.

    Args:
        tokens: Read for good before the probe, in one batch with it if they fit one.
    """
    stats = Stats()
    override = None if params is None else ctypes.byref(params)
    first, second = ((ctypes.c_int32 * len(part))(*part) for part in (tokens, probe))
    status = _c["make_room"](ctx, seq_id, first, len(tokens), second, len(probe), override, ctypes.byref(stats))
    return Status(status), stats


def prefill(
    ctx: Any,
    seq_id: int,
    tokens: Sequence[int],
    *,
    params: Params | None = None,
    cells: int = 0,
    chunk: int = 1024,
    probe: int | Sequence[int] = 32,
    logits_all: bool = False,
    progress: Callable[[int, int], bool] | None = None,
) -> tuple[Status, PrefillStats]:
    """Decode the tokens after what the sequence holds, and make room whenever the next ones would not fit.

    Args:
        params: Of the passes, None for those of :func:`init`.
        cells: Cells that the sequence may take, 0 for what the cache has.
        chunk: Tokens that are read at a time; a pass comes when there is no room for as many.
        probe: Last tokens of the prompt that look while it is read, or tokens of their own.
        logits_all: Of all tokens, to be read in ``progress``.
        progress: Called with the tokens done and the tokens to do after each batch; false stops. What it raises is
            raised here, after the sequence was removed.
    """
    raised: list[BaseException] = []

    def call(done: int, total: int, _: object) -> bool:
        try:
            return progress is None or bool(progress(done, total))
        except BaseException as error:  # not through C
            raised.append(error)
            return False

    array = (ctypes.c_int32 * len(tokens))(*tokens)
    own = None if isinstance(probe, int) else (ctypes.c_int32 * max(len(probe), 1))(*probe)
    settings = PrefillParams(
        params=None if params is None else ctypes.pointer(params),
        n_cells=cells,
        n_chunk=chunk,
        probe=None if own is None else ctypes.cast(own, ctypes.POINTER(ctypes.c_int32)),
        n_probe=probe if isinstance(probe, int) else len(probe),
        logits_all=logits_all,
        progress=Progress(call),
    )
    stats = PrefillStats()
    status = _c["prefill"](ctx, seq_id, array, len(tokens), ctypes.byref(settings), ctypes.byref(stats))
    if raised:
        raise raised[0]
    return Status(status), stats


def n_room(ctx: Any, seq_id: int, cells: int = 0) -> int:
    """Tokens that can be decoded now without a pass; ``cells`` that the sequence may take, 0 for what the cache has."""
    return int(_c["n_room"](ctx, seq_id, cells))


def n_pos_max(ctx: Any) -> int:
    """Tokens that a sequence of this context may have, whatever its cells."""
    return int(_c["n_pos_max"](ctx))


def n_tokens(ctx: Any, seq_id: int) -> int:
    """Tokens that the sequence has read: with packed positions more than its last position tells."""
    return int(_c["n_tokens"](ctx, seq_id))


def observe(ctx: Any, seq_id: int) -> Status:
    """Rule h2o: add up the attention of the tokens since the last call, at most n_ubatch."""
    return Status(_c["observe"](ctx, seq_id))


def n_observed(ctx: Any, seq_id: int, n_heads: int) -> int:
    """Cells that :func:`observe` has sums of; ``n_heads``: KV heads of all layers."""
    return max(int(_c["get_observed"](ctx, seq_id, None, 0)), 0) // n_heads


def observed(ctx: Any, seq_id: int) -> npt.NDArray[np.float64]:
    """The sums of :func:`observe`, mean of the query heads: [KV heads of all layers, cells observed]."""
    n_heads = sum(layer.n_head_kv for layer in layers(ctx))
    out = np.empty((n_heads, n_observed(ctx, seq_id, n_heads)))
    _filled(_c["get_observed"](ctx, seq_id, out.ctypes.data_as(_f64_p), out.size), out.size)
    return out


def set_observed(ctx: Any, seq_id: int, sums: npt.NDArray[np.float64]) -> None:
    """Give the sums back to a sequence that was restored."""
    data = np.ascontiguousarray(sums, dtype=np.float64)
    if not _c["set_observed"](ctx, seq_id, data.ctypes.data_as(_f64_p), data.size):
        raise RuntimeError(f"sums of shape {data.shape} do not fit the sequence")


def n_cells(ctx: Any, seq_id: int) -> int:
    """Cells of the sequence in the compacted cache."""
    return int(_c["n_cells"](ctx, seq_id))


def frontier(ctx: Any, seq_id: int) -> int:
    """The position that the kept cells before the window share, -1 if the sequence is whole."""
    return int(_c["frontier"](ctx, seq_id))


def pos_end(ctx: Any, seq_id: int) -> int:
    """Position after the prompt that a sequence was compacted for, 0 if it is whole."""
    return int(_c["pos_end"](ctx, seq_id))


def ring_size(ctx: Any) -> int:
    """Bytes of the query ring."""
    return int(_c["ring_size"](ctx))


def layers(ctx: Any) -> list[Layer]:
    """The layers that the pass compacts."""

    def get(name: str, struct: Any, *index: int) -> tuple[Any, ...]:
        if not _c[name](ctx, *index, ctypes.byref(struct)):
            raise IndexError(f"llama_snapkv_{name}: no {index}")
        return tuple(getattr(struct, field) for field, _ in struct._fields_)

    found = []
    for i in range(_c["n_layer"](ctx)):
        il, n_head, n_head_kv, n_tensor, n_reader = get("get_layer", _Layer(), i)
        tensors = tuple(Tensor(*get("get_tensor", _Tensor(), i, t)) for t in range(n_tensor))
        readers = tuple(Reader(*get("get_reader", _Reader(), i, r)) for r in range(n_reader))
        found.append(Layer(il, n_head, n_head_kv, tensors, readers))
    return found


def cells(ctx: Any, seq_id: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Position and index of each cell, in the order of (position, cell index)."""
    n = n_cells(ctx, seq_id)
    pos, index = np.empty(n, np.int32), np.empty(n, np.int32)
    _filled(_c["get_cells"](ctx, seq_id, pos.ctypes.data_as(_i32_p), index.ctypes.data_as(_i32_p), n), n)
    return pos, index


def kept(ctx: Any, seq_id: int, i: int, ih: int) -> npt.NDArray[np.int32]:
    """Original positions of the cells' rows in compacted layer i and KV head ih, empty if they are not known."""
    n = n_cells(ctx, seq_id)
    out = np.empty(n, np.int32)
    return out[: _filled(_c["get_kept"](ctx, seq_id, i, ih, out.ctypes.data_as(_i32_p), n), n)]


def rotated(ctx: Any, seq_id: int) -> npt.NDArray[np.int32]:
    """Positions that the rows of K are rotated to with packed positions: [n]; empty if they are not known."""
    out = np.empty(max(n_cells(ctx, seq_id), 0), np.int32)
    return out[: _filled(_c["get_rotated"](ctx, seq_id, out.ctypes.data_as(_i32_p), out.size))]


def n_queries(ctx: Any, seq_id: int, i: int) -> int:
    """Captured queries of the sequence's last tokens in compacted layer i."""
    return _filled(_c["get_queries"](ctx, seq_id, i, 0, None, 0))


def queries(ctx: Any, seq_id: int, i: int, r: int = 0) -> npt.NDArray[np.float32]:
    """Captured queries of reader r as they multiply the cached K: [rows, n_head, n_embd_head]."""
    layer = layers(ctx)[i]
    reader = layer.readers[r]
    shape = (n_queries(ctx, seq_id, i), reader.n_head, layer.tensors[reader.i_tensor].n_embd_head)
    out = np.empty(shape, np.float32)
    _filled(_c["get_queries"](ctx, seq_id, i, r, out.ctypes.data_as(_f32_p), out.size), out.shape[0])
    return out


def scores(ctx: Any, seq_id: int, i: int, n_window: int) -> npt.NDArray[np.float32]:
    """Attention to each cell, summed over the rows of the window, as computed by the pass: [n_head, n_cells].

    The heads come in the order of (KV head, reader, head of the reader).
    """
    out = np.empty((layers(ctx)[i].n_head, n_cells(ctx, seq_id)), np.float32)
    _filled(_c["get_scores"](ctx, seq_id, i, n_window, out.ctypes.data_as(_f32_p), out.size), out.size)
    return out


def rows_raw(ctx: Any, seq_id: int, i: int, t: int) -> npt.NDArray[np.uint8]:
    """Rows of tensor t as stored: [n_cells, n_head_kv, bytes per head]."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    layer = layers(ctx)[i]
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(layer.tensors[t].type)]
    out = np.empty((n_cells(ctx, seq_id), layer.n_head_kv, layer.tensors[t].n_embd_head // block * size), np.uint8)
    _filled(_c["get_rows_raw"](ctx, seq_id, i, t, out.ctypes.data_as(_u8_p), out.size), out.size)
    return out


def rows_f32(ctx: Any, seq_id: int, i: int, t: int) -> npt.NDArray[np.float32]:
    """Rows of tensor t converted to F32: [n_cells, n_head_kv, n_embd_head]."""
    layer = layers(ctx)[i]
    out = np.empty((n_cells(ctx, seq_id), layer.n_head_kv, layer.tensors[t].n_embd_head), np.float32)
    _filled(_c["get_rows_f32"](ctx, seq_id, i, t, out.ctypes.data_as(_f32_p), out.size), out.size)
    return out


def sinks(ctx: Any, i: int, r: int = 0) -> npt.NDArray[np.float32] | None:
    """Attention sinks of reader r, [n_head], None if it has none."""
    out = np.empty(layers(ctx)[i].readers[r].n_head, np.float32)
    return out if _filled(_c["get_sinks"](ctx, i, r, out.ctypes.data_as(_f32_p), out.size)) else None


def _filled(n: int, expected: int | None = None) -> int:
    if n < 0 or (expected is not None and n not in (0, expected)):
        raise RuntimeError(f"llama-snapkv.h filled {n} elements, expected {expected}: wrong sequence or layer")
    return n
