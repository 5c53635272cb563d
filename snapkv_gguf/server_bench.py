"""What SnapKV gains in llama-server: decoding of several slots at once, and conversations in one unified cache.

Two servers of the bundled binary, with and without SnapKV, take turns; of their speeds the ratio means something.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import haystack, tiny
from .config import SnapKV
from .prompt import Vocabulary, context_size
from .server import Server


@dataclass(frozen=True)
class ServerBench:
    """Ratios first.

    Attributes:
        speedup: Tokens per second of all slots together, with SnapKV by that without, median over the rounds.
        fit_snapkv, fit_full: Conversations that one unified cache holds at once.
        decode_snapkv, decode_full: Tokens per second of all slots together, medians.
        prompt_tokens: Of each slot's prompt.
        n_slots: Slots.
        cells: That a slot uses with SnapKV when its answer begins.
        n_cells: Of the unified cache.
        samples: Tokens per second, by round.
    """

    speedup: float
    fit_snapkv: int
    fit_full: int
    decode_snapkv: float
    decode_full: float
    prompt_tokens: int
    n_slots: int
    cells: int
    n_cells: int
    samples: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return asdict(self)


def measure(
    model: Path,
    config: SnapKV,
    *,
    n_prompt: int = 6000,
    n_slots: int = 4,
    n_predict: int = 32,
    n_repeat: int = 5,
    n_cells: int = 32768,
    arguments: tuple[str, ...] = (),
    on_step: Callable[[str], None] = lambda text: None,
) -> ServerBench:
    """Measure.

    Args:
        n_prompt: Tokens of each prompt, about.
        n_predict: Tokens that each slot generates per round.
        n_repeat: Rounds.
        n_cells: Of the unified cache that is filled with conversations.
        arguments: Other options of llama-server.

    Raises:
        ServerError: A server did not start.
    """
    with Vocabulary(model) as vocabulary:
        prompts = [vocabulary.plain(haystack.build(n_prompt, seed, vocabulary.count).text) for seed in range(n_slots)]
    length = max(map(len, prompts))
    options = ("-np", str(n_slots), "-c", str(n_slots * context_size(length + n_predict + 1)), "-fa", "on", *arguments)
    samples: dict[str, list[float]] = {"full": [], "snapkv": []}
    cells = 0
    with Server(model, *options, snapkv=False) as full, Server(model, *options, snapkv=config) as snapkv:
        servers = {"full": full, "snapkv": snapkv}
        for name, server in servers.items():
            on_step(f"{n_slots} prompts of {length} tokens, {name}")
            answers = _ask(server, prompts, n_predict)
            if name == "snapkv":
                cells = answers[0]["timings"]["snapkv"]["cells"]
        for turn in range(n_repeat):
            on_step(f"decoding, {turn + 1} of {n_repeat}")
            for name, server in servers.items() if turn % 2 == 0 else reversed(servers.items()):
                timings = [answer["timings"] for answer in _ask(server, prompts, n_predict)]
                n_decoded = sum(timing["predicted_n"] - 1 for timing in timings)
                samples[name].append(1000 * n_decoded / max(timing["predicted_ms"] for timing in timings))
    on_step("filling a unified cache")
    fit = {name: _fit(settings, n_cells, length, n_predict) for name, settings in (("full", False), ("snapkv", config))}
    return ServerBench(
        speedup=statistics.median(a / b for a, b in zip(samples["snapkv"], samples["full"], strict=True)),
        fit_snapkv=fit["snapkv"],
        fit_full=fit["full"],
        decode_snapkv=statistics.median(samples["snapkv"]),
        decode_full=statistics.median(samples["full"]),
        prompt_tokens=length,
        n_slots=n_slots,
        cells=cells,
        n_cells=n_cells,
        samples=samples,
    )


def _fit(snapkv: SnapKV | bool, n_cells: int, n_prompt: int, n_predict: int) -> int:
    """Conversations in a unified cache before one is dropped; cells do not depend on the model, so on a tiny one."""
    most = 64
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write_llama(Path(folder) / "tiny.gguf", tiny.Shape(n_ctx=n_cells))
        options = ("-c", str(n_cells), "-np", str(most), "--kv-unified", "--cache-ram", "0", "-t", "1", "-sps", "0")
        with Server(model, *options, snapkv=snapkv) as server:
            for n in range(most):
                prompt = [1, *((97 + (n * 31 + i * i) % 26) for i in range(n_prompt - 1))]
                server.post("/completion", {"prompt": prompt, "n_predict": n_predict, "ignore_eos": True, "id_slot": n})
                if "purging slot" in server.log or "failed to find free space" in server.log:
                    return n
    return most


def _ask(server: Server, prompts: list[list[int]], n_predict: int) -> list[Any]:
    bodies = [
        {"prompt": prompt, "n_predict": n_predict, "ignore_eos": True, "temperature": 0, "id_slot": slot}
        for slot, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.post("/completion", body), bodies))
