"""What reading in chunks costs and gains: prefill time and peak memory by length, with the full cache and in few cells.

The peak of a process never falls, so each measurement has a process of its own; of one length both ways take turns.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import SnapKV

if TYPE_CHECKING:
    from .llama import Llama

# a page of memory, and Linux counts the peak in KiB, macOS in bytes
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Length:
    """Medians at one length; of the full cache None where it was not measured.

    Attributes:
        prompt_tokens: Length.
        speedup: Prefill time with the full cache by that in chunks.
        seconds, seconds_full: Of the prefill.
        microseconds_per_token: In chunks.
        passes: While reading.
        pass_share: Time of these passes and their probes by that of the prefill.
        peak_bytes, peak_bytes_full: Largest resident memory of the process, after the prefill.
        samples: The single values, by name.
    """

    prompt_tokens: int
    speedup: float | None
    seconds: float
    seconds_full: float | None
    microseconds_per_token: float
    passes: int
    pass_share: float
    peak_bytes: int
    peak_bytes_full: int | None
    samples: dict[str, list[float]]


def measure(
    model: Path,
    config: SnapKV,
    *,
    cells: int,
    lengths: Sequence[int],
    full_up_to: int,
    n_repeat: int = 3,
    on_step: Callable[[str], None] = lambda text: None,
    **kwargs: Any,
) -> list[Length]:
    """Measure at each length.

    Args:
        model: A GGUF file.
        config: With ``chunk``.
        cells: KV cells of the context.
        lengths: Tokens of a prompt.
        full_up_to: Longest prompt that is also read with the full cache.
        n_repeat: Repetitions, of which medians are taken.
        on_step: Told what is measured now.
        **kwargs: Of Llama.

    Raises:
        ValueError: A length is more than the model reads.
        RuntimeError: A measurement failed, with its message.
    """
    settings = asdict(config)
    limit = int(_in_a_process("limit", str(model), settings, cells, kwargs)["tokens"])
    if max(lengths) > limit:
        raise ValueError(f"{max(lengths)} tokens: the model reads {limit} in true positions, packed ones read more")
    results = []
    for n in lengths:
        ways = {"chunks": (settings, cells)}
        if n <= full_up_to:
            ways["full"] = (asdict(replace(config, chunk=None, positions="true")), n + 1)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for i in range(n_repeat):
            for way, (way_settings, n_ctx) in sorted(ways.items(), reverse=i % 2 == 1):
                on_step(f"{n} tokens, {way}, {i + 1} of {n_repeat}")
                found[way].append(_in_a_process("read", str(model), way_settings, n_ctx, kwargs, n))
        results.append(_summary(n, found))
    return results


def as_json(results: Sequence[Length]) -> list[dict[str, Any]]:
    """The results, as JSON takes them."""
    return [asdict(result) for result in results]


def plot(results: Sequence[Length], path: Path, cells: int) -> None:
    """Prefill time and peak memory over the length, as an image; needs matplotlib."""
    from matplotlib.figure import Figure

    full = [result for result in results if result.seconds_full is not None]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, found, of in (
        ("full cache", full, ("seconds_full", "peak_bytes_full")),
        (f"{cells} cells", results, ("seconds", "peak_bytes")),
    ):
        n = [result.prompt_tokens for result in found]
        left.plot(n, [getattr(result, of[0]) for result in found], marker="o", label=label)
        right.plot(n, [getattr(result, of[1]) / 2**20 for result in found], marker="o", label=label)
    left.set(xlabel="prompt tokens", ylabel="seconds", title="prefill", ylim=(0, None))
    right.set(xlabel="prompt tokens", ylabel="MiB", title="peak memory of the process", ylim=(0, None))
    left.legend()
    figure.savefig(path, dpi=150)


def _in_a_process(*job: Any) -> dict[str, float]:
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"the process ended with {done.returncode}"]
        raise RuntimeError(last[0])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _summary(n: int, found: dict[str, list[dict[str, float]]]) -> Length:
    samples = {f"{way}_{name}": [run[name] for run in runs] for way, runs in found.items() for name in runs[0]}
    median = {name: statistics.median(values) for name, values in samples.items()}
    has_full = "full" in found
    return Length(
        prompt_tokens=n,
        speedup=statistics.median(
            full / chunks for full, chunks in zip(samples["full_seconds"], samples["chunks_seconds"], strict=True)
        )
        if has_full
        else None,
        seconds=median["chunks_seconds"],
        seconds_full=median["full_seconds"] if has_full else None,
        microseconds_per_token=1e6 * median["chunks_seconds"] / n,
        passes=int(median["chunks_passes"]),
        pass_share=statistics.median(
            ms / 1000 / seconds
            for ms, seconds in zip(samples["chunks_pass_ms"], samples["chunks_seconds"], strict=True)
        ),
        peak_bytes=int(median["chunks_peak"]),
        peak_bytes_full=int(median["full_peak"]) if has_full else None,
        samples=samples,
    )


def _load(model: str, settings: dict[str, Any], n_ctx: int, kwargs: dict[str, Any]) -> Llama:
    from .llama import Llama
    from .prompt import context_size

    return Llama(model, snapkv=SnapKV(**settings), n_ctx=context_size(n_ctx), verbose=False, **kwargs)


def _limit(model: str, settings: dict[str, Any], n_ctx: int, kwargs: dict[str, Any]) -> dict[str, float]:
    return {"tokens": _load(model, settings, n_ctx, kwargs).context_tokens}


def _read(model: str, settings: dict[str, Any], n_ctx: int, kwargs: dict[str, Any], n: int) -> dict[str, float]:
    """One prefill and its pass."""
    from . import haystack
    from .prompt import Vocabulary

    # of a longer prompt the text comes round again: nothing of the process grows with it
    with Vocabulary(model) as vocabulary:
        text = vocabulary.plain(haystack.build(min(n, 2048), 0, vocabulary.count).text)
    tokens = (text * (n // len(text) + 1))[:n]
    llm = _load(model, settings, n_ctx, kwargs)
    llm.eval(tokens[: llm.n_batch])  # touches weights and buffers for the first time
    llm.reset()
    started = time.perf_counter()
    llm.eval(tokens)
    llm._ctx.get_logits()  # waits for a device that works on its own
    seconds = time.perf_counter() - started
    passes, ms = llm._chunk_passes, llm._chunk_milliseconds
    llm.compact()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT
    return {"seconds": seconds, "passes": passes, "pass_ms": ms, "peak": peak}


if __name__ == "__main__":
    name, *args = json.load(sys.stdin)
    try:
        print(json.dumps(_limit(*args) if name == "limit" else _read(*args)))
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
