"""Folders of made-up runs, as snapkv eval writes them, for the report and its tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snapkv_gguf.eval.schema import Record

INJECTION = "<script>window.injected = true</script><img src=x onerror='window.injected = true'>"

INFO: dict[str, Any] = {
    "name": "made-up",
    "model": {
        "file": "made-up-Q8_0.gguf",
        "name": "Made-up 135M",
        "architecture": "llama",
        "n_layer": 4,
        "parameters": 134_515_008,
    },
    "config": {
        "tasks": ["needle", "icl-classification", "questions", "text"],
        "methods": ["full", "snapkv", "first-recent", "random"],
        "budgets": [512, 256],
        "lengths": [2000, 4000],
        "n_samples": 4,
        "seed": 0,
    },
    "seed": 0,
    "command": "snapkv eval -m made-up-Q8_0.gguf --quick",
    "pin": {"llama_cpp_python": "0.0.0", "llama_cpp": "b0000"},
    "version": "0.1.0",
    "machine": {"cpu": "made-up", "cores": 2, "threads": 2, "memory": "8 GiB", "system": "Linux"},
    "sessions": [{"started": "2026-01-01T10:00:00", "ended": "2026-01-01T10:20:00"}],
    "finished": True,
}


def record(sample: str, method: str, score: float | None = None, **others: Any) -> Record:
    """A record of task ``needle`` at 2000 tokens, a quarter of them kept unless it is of the full cache."""
    values: dict[str, Any] = {
        "task": "needle",
        "fields": {"length": 2000},
        "budget": 0 if method == "full" else 500,
        "prompt_tokens": 2000,
        "cells": 2000 if method == "full" else 500,
        "scores": {} if score is None else {"score": score},
    }
    return Record(sample=sample, method=method, **{**values, **others})


def write(
    folder: Path,
    records: Iterable[Record],
    *,
    kept: Mapping[str, Any] | None = None,
    cost: list[dict[str, Any]] | None = None,
    **info: Any,
) -> Path:
    """A folder with these records; ``info`` replaces fields of run.json."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({**INFO, **info}))
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(asdict(each))}\n" for each in records))
    for name, value in (("kept.json", kept), ("cost.json", cost)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    return folder


def kept(n_tokens: int = 40, n_layer: int = 2, n_head: int = 2, budget: int = 8) -> dict[str, Any]:
    """By snapkv, layer i and head j keep ``budget`` tokens from 4 i + 2 j on, at equal distances."""
    step = max(1, n_tokens // budget)
    ends = [*range(4), *range(n_tokens - budget + 4, n_tokens)]

    def of(keeps: Callable[[int, int], list[int]]) -> list[dict[str, Any]]:
        return [{"layer": i, "heads": [keeps(i, j) for j in range(n_head)]} for i in range(n_layer)]

    return {
        "sample": "needle-2000-0",
        "tokens": [f" t{i}" if i % 9 else "\n" for i in range(n_tokens)],
        "maps": [
            {"method": "first-recent", "budget": budget, "layers": of(lambda i, j: ends)},
            {
                "method": "snapkv",
                "budget": budget,
                "layers": of(lambda i, j: sorted((4 * i + 2 * j + step * k) % n_tokens for k in range(budget))),
            },
        ],
    }


def cost(
    method: str = "snapkv", budgets: tuple[int, ...] = (256, 512), depths: tuple[int, ...] = (2000, 4000)
) -> list[dict[str, Any]]:
    """Speeds that follow the number of cells."""
    return [
        {
            "method": method,
            "budget": budget,
            "prompt_tokens": n,
            "capture_cost": 0.002,
            "pass_share": 0.01 + budget / 1e6,
            "speedup": 1 + (n - budget) / 2000,
            "of_short": 0.97,
            "prefill_off": 500.0,
            "prefill_on": 499.0,
            "pass_ms": n / 100,
            "score_ms": n / 200,
            "select_ms": n / 400,
            "move_ms": n / 400,
            "decode_full": 40.0,
            "decode_compacted": 40.0 * (1 + (n - budget) / 2000),
            "cells_before": n,
            "cells_after": budget,
            "bytes_before": n * 23040,
            "bytes_after": budget * 23040,
        }
        for budget in budgets
        for n in depths
    ]


# how much of the full cache's quality is left at a share of the cells, about
_STRENGTH = {"snapkv": 0.97, "w16-max21-r0.5": 0.97, "shared": 0.8, "h2o": 0.75, "first-recent": 0.4, "random": 0.1}


def everything(
    lengths: tuple[int, ...] = (2000, 4000),
    budgets: tuple[int | float, ...] = (128, 256, 512, 1024),
    methods: tuple[str, ...] = ("full", "snapkv", "shared", "h2o", "first-recent", "random"),
    n_samples: int = 4,
    seed: int = 0,
) -> list[Record]:
    """Records of every kind of task, drawn at random."""
    rng = random.Random(seed)
    found = []
    for length in lengths:
        for task, axis in (
            ("needle", [("depth", d) for d in (0.0, 0.25, 0.5, 0.75, 1.0)]),
            ("variable-tracking", []),
            ("icl-classification", [("variant", v) for v in ("topics", "nonsense")]),
            ("questions", []),
            ("text", []),
        ):  # fmt: skip
            for name, value in axis or [("", "")]:
                for i in range(n_samples):
                    fields: dict[str, Any] = {"length": length, **({name: value} if name else {})}
                    sample = "-".join(map(str, (task, *fields.values(), i)))
                    n = length - rng.randrange(40)
                    for method in methods:
                        for budget in (0,) if method == "full" else budgets:
                            found.append(_drawn(rng, task, sample, fields, method, budget, n))
    return found


def _drawn(
    rng: random.Random, task: str, sample: str, fields: dict[str, Any], method: str, budget: int | float, n: int
) -> Record:
    cells = n if not budget else budget if isinstance(budget, int) else round(budget * n)
    left = 1.0 if method == "full" else _STRENGTH.get(method, 0.85) ** (2 * (n / cells) ** 0.5 / 3)
    scores: dict[str, float]
    answers: tuple[str, ...]
    if task == "text":
        kl = 0.0 if method == "full" else -0.1 * rng.uniform(0.6, 1.4) * (0.02 + left - 1)
        scores = {"kl": max(0.0, kl), "same_top": 1 - 2 * max(0.0, kl), "perplexity": 12 + 5 * max(0.0, kl)}
        answers = ()
    elif task == "questions":
        scores = {"score": float(rng.random() < 0.9 * left)}
        for k in (2, 3):
            scores[f"score_{k}"] = float(rng.random() < 0.9 * left**3)
            scores[f"reread_{k}"] = float(rng.random() < 0.9 * left)
        answers = ("The name is Ada.", "In 1842.", "I do not know | *really*")
    else:
        scores = {"score": float(rng.random() < (0.95 if task == "needle" else 0.8) * left)}
        answers = (INJECTION if rng.random() < 0.1 else f"The code is {rng.randrange(1000, 9999)}.",)
    prefill = n / 500
    return Record(
        sample=sample,
        task=task,
        fields=fields,
        method=method,
        budget=budget,
        prompt_tokens=n,
        cells=cells,
        scores=scores,
        answers=answers,
        references=() if task == "text" else ("4711",),
        prefill_seconds=prefill,
        pass_ms=0.0 if method == "full" else 12 * prefill,
        parts_ms={}
        if method == "full"
        else {"score_ms": 6 * prefill, "select_ms": 4 * prefill, "move_ms": 2 * prefill},
        decode_tokens=16,
        decode_seconds=16 * (0.01 + cells / 2e5) * rng.uniform(0.95, 1.05),
    )
