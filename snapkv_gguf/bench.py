"""What SnapKV costs and gains: prefill with and without capture, the pass, decoding full, compacted and short.

Three contexts of one process take turns, batch by batch in the prefill and block by block while decoding, so that
whatever else the machine does meets them alike. Ratios of such a run mean something, absolute speeds less so.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf

from . import _capi, haystack, models, tiny
from .config import SnapKV
from .llama import Llama
from .prompt import Vocabulary

import llama_cpp  # isort: skip

_MIN_TEXT = 256  # tokens, of which fewer may be used

_BLOCK = 8  # tokens that one context decodes before the next takes over


@dataclass(frozen=True)
class Depth:
    """Medians at one depth, ratios first.

    Attributes:
        prompt_tokens: Depth.
        capture_cost: Prefill time with capture by that without, minus 1: of each batch the median over the
            repetitions, weighted by the batch's time.
        pass_share: Time of the pass by that of the prefill.
        speedup: Decode speed compacted by that with the full cache.
        of_short: Decode speed compacted by that after a prompt of ``budget`` tokens.
        prefill_off, prefill_on: Tokens per second, without and with capture.
        pass_ms, score_ms, select_ms, move_ms: The pass and its parts.
        pass_ns_per_cell: Time of the pass by cells before it and compacted layers.
        decode_full, decode_compacted, decode_short: Tokens per second.
        cells_before, cells_after: Of the sequence.
        bytes_before, bytes_after: K and V of these cells in the compacted layers.
        ring_bytes: Of the query ring.
        samples: The single values, by name; of the batches of the prefill, seconds by repetition and batch.
    """

    prompt_tokens: int
    capture_cost: float
    pass_share: float
    speedup: float
    of_short: float
    prefill_off: float
    prefill_on: float
    pass_ms: float
    score_ms: float
    select_ms: float
    move_ms: float
    pass_ns_per_cell: float
    decode_full: float
    decode_compacted: float
    decode_short: float
    cells_before: int
    cells_after: int
    bytes_before: int
    bytes_after: int
    ring_bytes: int
    samples: dict[str, list[float] | list[list[float]]]


def random_model(name: str) -> Path:
    """One of ``tiny.RANDOM_SHAPES`` in the cache directory (random-1b: 1.1 GB), written at the first call."""
    shape = tiny.RANDOM_SHAPES[name]
    path = models.cache_dir() / f"{name}-{shape.weights}-seed0.gguf"
    return path if path.is_file() else tiny.write_llama(path, shape, seed=0)


def default_depths(model: str) -> tuple[int, ...]:
    """2K, 4K and 8K for the small real models, up to 32K for the small random one, up to 16K for the larger ones."""
    if model == "random-30m":
        return (4096, 8192, 16384, 32768)
    return (4096, 8192, 16384) if model in tiny.RANDOM_SHAPES else (2048, 4096, 8000)


def bytes_per_cell(llm: Llama) -> int:
    """Bytes of one cell in the compacted layers of an instance with snapkv."""
    return sum(
        layer.n_head_kv * _row(tensor.type, tensor.n_embd_head)
        for layer in _capi.layers(llm.ctx)
        for tensor in layer.tensors
    )


def compacts_all_layers(llm: Llama) -> bool:
    """Whether there are no layers that a pass leaves alone, such as those with a sliding window."""
    n_readers = sum(len(layer.readers) for layer in _capi.layers(llm.ctx))
    return n_readers == int(llama_cpp.llama_model_n_layer(llm._model.model))


def _row(ggml_type: int, n: int) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)]
    return int(n // block * size)


def measure(
    model_path: Path,
    config: SnapKV,
    *,
    depths: Sequence[int],
    n_repeat: int = 5,
    n_decode: int = 64,
    on_step: Callable[[str], None] = lambda text: None,
    **kwargs: Any,
) -> list[Depth]:
    """Measure at each depth.

    Args:
        n_repeat: Repetitions, of which medians are taken.
        n_decode: Tokens decoded each time.
        on_step: Told what is measured now.
        **kwargs: Of Llama, for all three contexts.

    Raises:
        ValueError: A depth is not more than the budget.
    """
    for n in depths:
        if n <= config.resolve(n).budget:
            raise ValueError(f"depth {n} is within the budget of {config.resolve(n).budget} cells, nothing to compact")
    n_needed = max(depths) + n_decode
    with Vocabulary(model_path) as vocabulary:
        tokens = vocabulary.plain(haystack.build(max(n_needed, _MIN_TEXT), 0, vocabulary.count).text)
    while len(tokens) < n_needed:  # whole paragraphs leave a rest
        tokens += tokens[1:]

    def make(snapkv: SnapKV | None) -> Llama:
        return Llama(str(model_path), snapkv=snapkv, n_ctx=n_needed, verbose=False, **kwargs)

    full, compacted, short = make(None), make(config), make(None)
    for llm in (full, compacted, short):
        llm.eval(tokens[: llm.n_batch])  # touches weights and buffers for the first time
    results = []
    for n in depths:
        samples: dict[str, list[float]] = {}
        batches: list[list[tuple[float, float]]] = []
        for i in range(n_repeat):
            on_step(f"{n} tokens, {i + 1} of {n_repeat}")
            values, seconds = _repeat((full, compacted, short), tokens, n, config, n_decode, i)
            for name, value in values.items():
                samples.setdefault(name, []).append(value)
            batches.append(seconds)
        results.append(_summary(n, samples, batches, compacted))
    for llm in (full, compacted, short):
        llm.close()
    return results


def _repeat(
    contexts: tuple[Llama, Llama, Llama], tokens: list[int], n: int, config: SnapKV, n_decode: int, turn: int
) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """Values by name, and seconds of each batch of the prefill without and with capture."""
    full, compacted, short = contexts
    for llm in contexts:
        llm.reset()
    batches = []
    for start in range(0, n, full.n_batch):
        batch = tokens[start : min(n, start + full.n_batch)]
        # the one that comes second finds the caches warmer: take turns
        if (start // full.n_batch + turn) % 2 == 0:
            off_s = _eval(full, batch)
            on_s = _eval(compacted, batch)
        else:
            on_s = _eval(compacted, batch)
            off_s = _eval(full, batch)
        batches.append((off_s, on_s))
    stats = compacted.compact()
    short.eval(tokens[: config.resolve(n).budget])

    seconds_of = {id(llm): 0.0 for llm in contexts}
    for start in range(n, n + n_decode, _BLOCK):
        for llm in contexts:
            for token in tokens[start : min(n + n_decode, start + _BLOCK)]:
                seconds_of[id(llm)] += _eval(llm, [token])
    ms = stats.milliseconds
    values = {
        "prefill_off_s": sum(off_s for off_s, _ in batches),
        "prefill_on_s": sum(on_s for _, on_s in batches),
        "pass_ms": ms.total,
        "score_ms": ms.score,
        "select_ms": ms.select,
        "move_ms": ms.move,
        "decode_full_s": seconds_of[id(full)] / n_decode,
        "decode_compacted_s": seconds_of[id(compacted)] / n_decode,
        "decode_short_s": seconds_of[id(short)] / n_decode,
        "cells_before": stats.cells_before,
        "cells_after": stats.cells_after,
    }
    return values, batches


def _eval(llm: Llama, tokens: list[int]) -> float:
    started = time.perf_counter()
    llm.eval(tokens)
    llm._ctx.get_logits()  # waits for a device that works on its own
    return time.perf_counter() - started


def _capture_cost(batches: list[list[tuple[float, float]]]) -> float:
    """Of [repetition][batch](without, with): what else the machine did hits single batches, medians leave it out."""
    total = cost = 0.0
    for repetitions in zip(*batches, strict=True):
        seconds = statistics.median(off_s for off_s, _ in repetitions)
        total += seconds
        cost += seconds * (statistics.median(on_s / off_s for off_s, on_s in repetitions) - 1)
    return cost / total


def _summary(n: int, samples: dict[str, list[float]], batches: list[list[tuple[float, float]]], llm: Llama) -> Depth:
    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(samples[a], samples[b], strict=True))

    median = {name: statistics.median(values) for name, values in samples.items()}
    cells_before, cells_after = int(median["cells_before"]), int(median["cells_after"])
    return Depth(
        prompt_tokens=n,
        capture_cost=_capture_cost(batches),
        pass_share=ratio("pass_ms", "prefill_off_s") / 1000,
        speedup=ratio("decode_full_s", "decode_compacted_s"),
        of_short=ratio("decode_short_s", "decode_compacted_s"),
        prefill_off=n / median["prefill_off_s"],
        prefill_on=n / median["prefill_on_s"],
        pass_ms=median["pass_ms"],
        score_ms=median["score_ms"],
        select_ms=median["select_ms"],
        move_ms=median["move_ms"],
        pass_ns_per_cell=median["pass_ms"] * 1e6 / cells_before / len(_capi.layers(llm.ctx)),
        decode_full=1 / median["decode_full_s"],
        decode_compacted=1 / median["decode_compacted_s"],
        decode_short=1 / median["decode_short_s"],
        cells_before=cells_before,
        cells_after=cells_after,
        bytes_before=cells_before * bytes_per_cell(llm),
        bytes_after=cells_after * bytes_per_cell(llm),
        ring_bytes=_capi.ring_size(llm.ctx),
        samples={
            **samples,
            "batch_off_s": [[off_s for off_s, _ in seconds] for seconds in batches],
            "batch_on_s": [[on_s for _, on_s in seconds] for seconds in batches],
        },
    )


def as_json(results: Sequence[Depth]) -> list[dict[str, Any]]:
    """The results, as JSON takes them."""
    return [asdict(result) for result in results]


def check_plot() -> None:
    """Whether :func:`plot` can be used.

    Raises:
        ImportError: No matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")


def plot(results: Sequence[Depth], path: Path) -> None:
    """Decode speed and the costs over the depth, as an image; needs matplotlib."""
    from matplotlib.figure import Figure

    n = [result.prompt_tokens for result in results]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, values in (
        ("full cache", [result.decode_full for result in results]),
        ("compacted", [result.decode_compacted for result in results]),
        ("prompt as short as the budget", [result.decode_short for result in results]),
    ):
        left.plot(n, values, marker="o", label=label)
    left.set(xlabel="prompt tokens", ylabel="tokens/s", title="decoding", ylim=(0, None))
    left.legend()
    for label, values in (
        ("capture", [100 * result.capture_cost for result in results]),
        ("pass", [100 * result.pass_share for result in results]),
    ):
        right.plot(n, values, marker="o", label=label)
    right.set(xlabel="prompt tokens", ylabel="% of the prefill", title="cost")
    right.legend()
    figure.savefig(path, dpi=150)
