"""What fits into memory: llama.cpp is asked for the sizes of contexts that are not allocated.

A model loaded with ``no_alloc`` and its contexts are built as always, graphs and all, but for the buffers; each takes
milliseconds. What they would take comes from ``llama_get_memory_breakdown()``, on which llama.cpp's own ``--fit``
rests, so the figures are those of the real thing, for every architecture and device.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from . import _capi, system
from ._capi import Status
from .config import SnapKV, ggml_type
from .prompt import context_size

import llama_cpp  # isort: skip
from llama_cpp import _internals  # isort: skip

# growth of the compute buffers by a pass, at most; see tests/tiny/test_scratch.py
SCRATCH = 64 << 20

# cells of a context: what llama.cpp notes of each takes 50 bytes, without K and V
MAX_PLANNED = 2**24

_STEP = context_size(1)

_CPU, _ACCELERATOR = 0, 3  # of enum ggml_backend_dev_type: their memory is RAM


@dataclass(frozen=True)
class Engine:
    """How the contexts are made: what of ``llama_context_params`` changes their sizes."""

    n_seq: int = 1
    n_batch: int = 512
    n_ubatch: int = 512
    flash_attn: bool = True
    swa_full: bool = True


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model and a context.

    Attributes:
        weights: Of the model.
        kv: K and V of all layers, sliding-window and recurrent ones among them.
        compute: Buffers of the graphs.
        logits: Of one token per sequence.
        ring: Queries of the last tokens.
        scratch: What a pass may take, at most.
        in_ram: How much of all that is not on a GPU.
    """

    weights: int
    kv: int
    compute: int
    logits: int
    ring: int
    scratch: int
    in_ram: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.compute + self.logits + self.ring + self.scratch

    @property
    def on_device(self) -> int:
        """How much of it is on GPUs."""
        return self.total - self.in_ram


@dataclass(frozen=True)
class Reads:
    """Bytes of K and V per token of a sequence, and of its recurrent state: what each new token reads.

    Attributes:
        full: Of a token in the layers that attend to all of them.
        sliding: Of a token in sliding-window layers, which read those of the last ``n_swa``.
        state: Of the sequence, however long.
    """

    full: int
    sliding: int
    n_swa: int
    state: int

    def of(self, n_full: int, n_tokens: int) -> int:
        """Bytes that the next token reads after ``n_tokens``, of which the full layers hold ``n_full``."""
        return self.full * n_full + self.sliding * min(n_tokens, self.n_swa) + self.state


@dataclass(frozen=True)
class Limits:
    """Bytes that may be taken.

    Attributes:
        device: On the GPUs, 0 without.
        ram: In RAM.
        names: Of the devices.
        is_given: By the user, else it is what is free now.
    """

    device: int
    ram: int
    names: tuple[str, ...]
    is_given: bool

    def hold(self, sizes: Sizes) -> bool:
        """Whether these fit."""
        return sizes.on_device <= self.device and sizes.in_ram <= self.ram


@dataclass(frozen=True)
class Row:
    """One way to hold a prompt and its answer.

    Attributes:
        type_k, type_v: Names of the cache types.
        snapkv: Budget, chunk and probe; None for the full cache.
        cells: Of each sequence, as llama.cpp allocates them.
        sizes: What it takes.
        fits: Whether that is within the limits.
        max_cells: Most cells of each sequence that fit, at most ``cells``; with a budget ``cells`` or 0.
        max_tokens: Of prompt and answer together that ``max_cells`` take, with the positions of the tokens.
        read_bytes: What each new token of a sequence reads of K and V, after a prompt of the plan's length.
        holds: "yes", "packed" (with packed positions) or "no", for a prompt and answer of the plan's length.
    """

    type_k: str
    type_v: str
    snapkv: SnapKV | None
    cells: int
    sizes: Sizes
    fits: bool
    max_cells: int
    max_tokens: int
    read_bytes: int
    holds: str


@dataclass(frozen=True)
class Plan:
    """What fits.

    Attributes:
        n_ctx_train: Tokens that the model was trained for.
        n_tokens: Prompt and answer that the rows are for.
        limits: Memory.
        weights: Bytes.
        rows: Full caches first, then by budget; each by cache type.
        status: Whether the cache can be compacted; if not, there are rows of the full cache only.
        packed: Whether there are packed positions, with which budgets take prompts of any length.
        refused: Cache types that llama.cpp makes no context with.
        reads: By cache types of K and V.
    """

    n_ctx_train: int
    n_tokens: int
    limits: Limits
    weights: int
    rows: tuple[Row, ...]
    status: Status
    packed: bool
    refused: tuple[tuple[str, str], ...]
    reads: dict[tuple[str, str], Reads]


class Planner:
    """A model of which nothing but the metadata is in memory.

    Args:
        path: A GGUF file.
        n_gpu_layers: -1 for all.

    Raises:
        ValueError: The file is missing or not a GGUF model.
    """

    def __init__(self, path: str | os.PathLike[str], engine: Engine = Engine(), n_gpu_layers: int = -1) -> None:
        params = llama_cpp.llama_model_default_params()
        params.no_alloc = True
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        params.n_gpu_layers = n_gpu_layers
        self._model = _internals.LlamaModel(path_model=os.fspath(path), params=params, verbose=False)
        self.engine = engine

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *_: object) -> None:
        self._model.close()

    @property
    def n_ctx_train(self) -> int:
        """Tokens that the model was trained for."""
        return int(self._model.n_ctx_train())

    @contextmanager
    def _context(
        self, cells: int, types: tuple[str, str], n_seq: int | None = None, swa_full: bool | None = None
    ) -> Iterator[Any]:
        engine = self.engine
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = n_seq or engine.n_seq
        params.n_ctx = cells * params.n_seq_max
        # as llama_cpp.Llama
        params.n_batch = min(params.n_ctx, engine.n_batch)
        params.n_ubatch = min(params.n_batch, engine.n_ubatch)
        params.type_k, params.type_v = map(ggml_type, types)
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if engine.flash_attn else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.swa_full = engine.swa_full if swa_full is None else swa_full
        params.kv_unified = False
        context = _internals.LlamaContext(model=self._model, params=params, verbose=False)
        try:
            yield context.ctx
        finally:
            context.close()

    def is_refused(self, types: tuple[str, str]) -> bool:
        """Whether llama.cpp makes no context with these types of K and V."""
        try:
            with self._context(_STEP, types):
                return False
        except ValueError:
            return True

    def status(self, types: tuple[str, str], snapkv: SnapKV) -> tuple[Status, bool]:
        """Whether a cache can be compacted, and whether its kept keys can be rotated."""
        params = _capi.Params.of(snapkv.resolve(_STEP))
        with self._context(_STEP, types, n_seq=1) as ctx:
            status = _capi.init(ctx, params)
        params.positions = _capi.POSITIONS["packed"]
        with self._context(_STEP, types, n_seq=1) as ctx:
            return status, _capi.init(ctx, params) is Status.OK

    def sizes(self, cells: int, types: tuple[str, str], snapkv: SnapKV | None = None) -> Sizes:
        """What a context takes.

        Args:
            cells: Of each sequence.
            types: Names of the cache types of K and V.
            snapkv: Settings, None for none.

        Raises:
            MemoryError: There is no memory for the query ring.
            ValueError: llama.cpp makes no such context.
        """
        n_seq = self.engine.n_seq
        if cells * n_seq > MAX_PLANNED:
            raise ValueError(
                f"{cells} cells for each of {n_seq} sequences: at most {MAX_PLANNED} together can be planned for; "
                "lower --ctx, the budgets or --parallel"
            )
        with self._context(cells, types) as ctx:
            ring = 0
            if snapkv is not None:
                status = _capi.init(ctx, _capi.Params.of(snapkv.resolve(cells)))
                if status is not Status.OK:
                    raise MemoryError(f"{_capi.status_str(status)} ({status.name}): lower the window or the sequences")
                ring = _capi.ring_size(ctx)
            found = breakdown(ctx)
        logits = 4 * int(self._model.n_vocab()) * self.engine.n_seq
        weights, kv, compute = (sum(part[i] for part in found) for i in (1, 2, 3))
        ram = [part for part in found if _is_ram(part[0])]
        # the ring is where the layers' K is, the scratch memory where the graphs run
        in_ram = logits + sum(sum(part[1:]) for part in ram)
        in_ram += ring * sum(part[2] for part in ram) // max(kv, 1)
        scratch = 0 if snapkv is None else SCRATCH
        if len(ram) == len(found):
            in_ram += scratch
        return Sizes(weights, kv, compute, logits, ring, scratch, in_ram)

    def max_tokens(self, cells: int, types: tuple[str, str]) -> int:
        """Tokens that a sequence of such a context may have, whatever its cells: as many as the model was trained for.

        Fewer if it has other RoPE factors for short contexts.
        """
        with self._context(cells, types, n_seq=1) as ctx:
            return min(_capi.n_pos_max(ctx), self.n_ctx_train)

    def reads(self, types: tuple[str, str]) -> Reads:
        """What a token reads, from how the sizes of contexts grow."""
        n_swa = int(llama_cpp.llama_model_n_swa(self._model.model))
        # larger than any sliding-window cache need be
        small = context_size(n_swa + self.engine.n_ubatch) + _STEP

        def kv(cells: int, swa_full: bool) -> int:
            with self._context(cells, types, n_seq=1, swa_full=swa_full) as ctx:
                return sum(part[2] for part in breakdown(ctx))

        first = kv(small, True)
        all_layers = (kv(2 * small, True) - first) // small
        full = (kv(2 * small, False) - kv(small, False)) // small
        return Reads(full, all_layers - full, n_swa, first - all_layers * small)

    def limits(self, memory: int | None) -> Limits:
        """What may be taken: ``memory`` bytes where the model's layers are, None for what is free there."""
        with self._context(_STEP, ("f16", "f16")) as ctx:
            bufts = [part[0] for part in breakdown(ctx) if not _is_ram(part[0])]
        if not bufts:
            return Limits(0, free_ram() if memory is None else memory, ("RAM",), memory is not None)
        lib = _lib()
        devices = sorted({lib.ggml_backend_buft_get_device(buft) for buft in bufts})
        names = tuple(lib.ggml_backend_dev_name(device).decode() for device in devices)
        free = sum(_free(device) for device in devices) if memory is None else memory
        return Limits(free, free_ram(), names, memory is not None)


def plan(
    path: str | os.PathLike[str],
    *,
    types: Sequence[tuple[str, str]],
    budgets: Sequence[SnapKV],
    memory: int | None = None,
    n_tokens: int | None = None,
    engine: Engine = Engine(),
    n_gpu_layers: int = -1,
) -> Plan:
    """What fits into memory.

    Args:
        path: A GGUF file.
        types: Names of the cache types of K and V.
        budgets: Settings with a budget in cells, a chunk, and a probe in tokens.
        memory: Bytes for all of it, None for what is free.
        n_tokens: Prompt and answer together, None for what the model was trained for.

    Raises:
        ValueError: Not a GGUF model, or one without a cache.
    """
    with Planner(path, engine, n_gpu_layers) as planner:
        refused = tuple(pair for pair in types if planner.is_refused(pair))
        usable = [pair for pair in types if pair not in refused]
        if not usable:
            raise ValueError(f"{path}: llama.cpp makes no context with these cache types; try f16")
        if planner.sizes(_STEP, usable[0]).kv == 0:
            raise ValueError(f"{path} has no KV cache: there is nothing to plan")
        reads = {pair: planner.reads(pair) for pair in usable}
        limits = planner.limits(memory)
        wanted = n_tokens or planner.n_ctx_train
        rows = [_full(planner, limits, pair, wanted, reads[pair]) for pair in usable]
        status, packed = planner.status(usable[0], SnapKV(budget=64, window=16, recent=0))
        if status is Status.OK:
            rows += [
                _chunked(planner, limits, pair, snapkv, wanted, packed, reads[pair])
                for snapkv in budgets
                for pair in usable
            ]
        weights = rows[0].sizes.weights
        return Plan(planner.n_ctx_train, wanted, limits, weights, tuple(rows), status, packed, refused, reads)


def _full(planner: Planner, limits: Limits, types: tuple[str, str], n_tokens: int, reads: Reads) -> Row:
    cells = context_size(n_tokens)
    sizes = planner.sizes(cells, types)
    fits = limits.hold(sizes)
    low, high = (cells if fits else 0), cells  # the most that fit: >= low, < high
    while high - low > _STEP:
        middle = (low + high) // 2 // _STEP * _STEP
        if limits.hold(planner.sizes(middle, types)):
            low = middle
        else:
            high = middle
    holds = "yes" if fits and n_tokens <= planner.n_ctx_train else "no"
    max_tokens = min(low, planner.n_ctx_train)
    return Row(*types, None, cells, sizes, fits, low, max_tokens, reads.of(n_tokens, n_tokens), holds)


def _chunked(
    planner: Planner,
    limits: Limits,
    types: tuple[str, str],
    snapkv: SnapKV,
    n_tokens: int,
    packed: bool,
    reads: Reads,
) -> Row:
    budget, chunk, probe = snapkv.budget, snapkv.chunk, snapkv.probe
    if not (isinstance(budget, int) and isinstance(chunk, int) and isinstance(probe, int)):
        raise ValueError(f"{snapkv}: budget, chunk and probe must be numbers of cells and tokens")
    cells = context_size(budget + chunk + probe)
    sizes = planner.sizes(cells, types, snapkv)
    fits = limits.hold(sizes)
    max_tokens = planner.max_tokens(cells, types) if fits else 0
    holds = "no"
    if fits and n_tokens <= max_tokens:
        holds = "yes"
    elif fits and packed:
        holds = "packed"
    read_bytes = reads.of(min(n_tokens, budget), n_tokens)
    return Row(*types, snapkv, cells, sizes, fits, cells if fits else 0, max_tokens, read_bytes, holds)


# llama.cpp's memory breakdown


class _Map(ctypes.Structure):
    """std::map as it is returned: larger than two words, so in memory, on all platforms that we build for."""

    _fields_ = [("words", ctypes.c_size_t * 6)]


# words of a map where its root is and its size, and of a node its children; the value follows in words 4 and up
_ROOT, _SIZE, _LEFT, _RIGHT = (1, 2, 0, 1) if sys.platform == "darwin" else (2, 5, 2, 3)  # libc++, libstdc++
_VALUE = 4


def breakdown(ctx: Any) -> list[tuple[int, int, int, int]]:
    """Bytes of the model, of the context (K and V) and of compute buffers, by buffer type (its address).

    ``llama_get_memory_breakdown()`` of src/llama-ext.h; the query ring and the logits are not in it. It is C++ and
    returns a map, whose few nodes are read here and not freed.
    """
    found = _lib()._Z26llama_get_memory_breakdownPK13llama_context(ctypes.cast(ctx, ctypes.c_void_p))
    parts = []
    nodes = [found.words[_ROOT]]
    while nodes:
        node = nodes.pop()
        if node:
            words = (ctypes.c_size_t * (_VALUE + 4)).from_address(node)
            nodes += [words[_LEFT], words[_RIGHT]]
            parts.append((words[_VALUE], words[_VALUE + 1], words[_VALUE + 2], words[_VALUE + 3]))
    if len(parts) != found.words[_SIZE]:
        raise RuntimeError(f"llama_get_memory_breakdown(): {len(parts)} parts, {found.words[_SIZE]} expected")
    return parts


@functools.cache
def _lib() -> ctypes.CDLL:
    lib = _capi.lib
    for name, result, arguments in (
        ("_Z26llama_get_memory_breakdownPK13llama_context", _Map, [ctypes.c_void_p]),
        ("ggml_backend_buft_is_host", ctypes.c_bool, [ctypes.c_void_p]),
        ("ggml_backend_buft_get_device", ctypes.c_void_p, [ctypes.c_void_p]),
        ("ggml_backend_dev_type", ctypes.c_int, [ctypes.c_void_p]),
        ("ggml_backend_dev_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("ggml_backend_dev_memory", None, [ctypes.c_void_p] + [ctypes.POINTER(ctypes.c_size_t)] * 2),
    ):
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise RuntimeError(f"libllama has no {name}: rebuild the package") from None
        function.restype, function.argtypes = result, arguments
    return lib


def _is_ram(buft: int) -> bool:
    lib = _lib()
    device = lib.ggml_backend_buft_get_device(buft)
    return (
        lib.ggml_backend_buft_is_host(buft) or not device or lib.ggml_backend_dev_type(device) in (_CPU, _ACCELERATOR)
    )


def _free(device: int) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _lib().ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value


# RAM

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_ram(root: Path = Path("/sys/fs/cgroup"), meminfo: Path = _MEMINFO) -> int:
    """RAM that is free or can be freed, within the limit of a container; all RAM where the system does not say."""
    if not meminfo.is_file():
        total: int = system.devices()[-1]["memory_mib"] << 20  # the CPU comes last
        return total
    free = next(int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    free <<= 10
    for limit_file, used_file, cache in _CGROUPS:
        try:
            limit = (root / limit_file).read_text().strip()
            used = int((root / used_file).read_text())
            stat = dict(line.split() for line in (root / used_file).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            free = min(free, max(int(limit) - used + int(stat.get(cache, 0)), 0))
    return free


# what a user sees


def as_json(plan: Plan, path: Path, engine: Engine) -> dict[str, Any]:
    """The plan as JSON takes it; sizes in bytes, of all sequences, but for reads and cells."""
    limits = plan.limits
    return {
        "model": str(path),
        "n_ctx_train": plan.n_ctx_train,
        "n_tokens": plan.n_tokens,
        "engine": asdict(engine),
        "memory": {
            "devices": limits.names,
            "given": limits.is_given,
            "bytes": limits.device or limits.ram,
            "ram_bytes": limits.ram,
        },
        "weights_bytes": plan.weights,
        "supported": plan.status is Status.OK,
        "status": _capi.status_str(plan.status),
        "packed": plan.packed,
        "refused_types": [{"type_k": k, "type_v": v} for k, v in plan.refused],
        "types": [{"type_k": k, "type_v": v, **asdict(reads)} for (k, v), reads in plan.reads.items()],
        "rows": [
            {
                "cache": "full" if row.snapkv is None else "chunked",
                "type_k": row.type_k,
                "type_v": row.type_v,
                "budget": row.snapkv and row.snapkv.budget,
                "chunk": row.snapkv and row.snapkv.chunk,
                "probe": row.snapkv and row.snapkv.probe,
                "cells": row.cells,
                "max_cells": row.max_cells,
                "max_tokens": row.max_tokens,
                "kv_bytes": row.sizes.kv,
                "compute_bytes": row.sizes.compute,
                "logits_bytes": row.sizes.logits,
                "ring_bytes": row.sizes.ring,
                "scratch_bytes": row.sizes.scratch,
                "total_bytes": row.sizes.total,
                "ram_bytes": row.sizes.in_ram,
                "fits": row.fits,
                "holds": row.holds,
                "read_bytes": row.read_bytes,
            }
            for row in plan.rows
        ],
    }


def report(plan: Plan, path: Path, engine: Engine, *, show_holds: bool) -> tuple[str, Table, list[str]]:
    """The plan for a reader: a line above the table, the table, lines below it."""
    limits = plan.limits
    what = "given" if limits.is_given else "free"
    where = " + ".join(limits.names)
    title = (
        f"{path.name}, trained for {plan.n_ctx_train} tokens, weights {_size(plan.weights)}; "
        f"{where}: {_size(limits.device or limits.ram, 1)} {what}"
    )
    per_sequence = f"{engine.n_seq} x " if engine.n_seq > 1 else ""
    columns = ["cells", "KV cache", "in all", "fits", "prompt + answer", "read per token"]
    if show_holds:
        columns.append(f"holds {plan.n_tokens}")
    table = Table(Column("cache", no_wrap=True), Column("K, V", no_wrap=True))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=name in ("cells", "KV cache", "in all"))
    of_full = {(row.type_k, row.type_v): row.read_bytes for row in plan.rows if row.snapkv is None}
    previous = plan.rows[0].snapkv
    for row in plan.rows:
        if row.snapkv != previous:
            table.add_section()
            previous = row.snapkv
        pair = (row.type_k, row.type_v)
        cells = [
            "full" if row.snapkv is None else f"{row.snapkv.budget} + {row.snapkv.chunk}",
            row.type_k if row.type_k == row.type_v else f"{row.type_k}, {row.type_v}",
            f"{per_sequence}{row.cells}",
            _size(row.sizes.kv),
            _size(row.sizes.total),
            _fits(row),
            _tokens(row, plan.packed),
            _size(row.read_bytes)
            if row.snapkv is None
            else f"{_size(row.read_bytes)} ({row.read_bytes / max(of_full[pair], 1):.0%})",
        ]
        table.add_row(*cells, *([row.holds] if show_holds else []))
    return title, table, _notes(plan)


def _fits(row: Row) -> str:
    if row.fits:
        return "yes"
    return f"{row.max_cells} cells" if row.max_cells else "no"


def _tokens(row: Row, packed: bool) -> str:
    if not row.max_tokens:
        return "-"
    return f"{row.max_tokens}, packed any" if packed and row.snapkv is not None else str(row.max_tokens)


def _notes(plan: Plan) -> list[str]:
    chunked = next((row for row in plan.rows if row.snapkv is not None), None)
    parts = "weights, KV cache, compute buffers"
    notes = []
    if chunked is None:
        notes.append(f"in all: {parts}")
        notes.append(f"full cache only: {_capi.status_str(plan.status)} ({plan.status.name})")
    else:
        assert chunked.snapkv is not None
        sizes = chunked.sizes
        snapkv = f"query ring ({_size(sizes.ring)}) and scratch memory of a pass (at most {_size(sizes.scratch)})"
        notes.append(f"in all: {parts}; with a budget also the {snapkv}")
        notes.append(
            f"budget + chunk (and {chunked.snapkv.probe} of the probe): cells while the prompt is read, of which the "
            "budget stays. A full cache compacted after the prompt takes what both take and reads what the budget reads"
        )
        if plan.packed:
            notes.append("packed: with --positions packed, prompts may be longer than the trained context")
    notes.append(f"read per token: K and V that each new token reads after {plan.n_tokens} tokens")
    for pair in plan.refused:
        notes.append(f"{'/'.join(pair)}: llama.cpp makes no context with these types (snapkv --debug plan says why)")
    return notes


def _size(n_bytes: int, gib_from: int = 10) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= gib_from * 2**30 else f"{n_bytes / 2**20:.1f} MiB"
