"""Options, environment variables, and what is refused when the server starts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_client import CONFIG, tokens

from snapkv_gguf import SnapKV, tiny
from snapkv_gguf.server import Server, ServerError, binary


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--snapkv-budget", "10"], "--snapkv-budget 10: must be more than --snapkv-window 16"),
        (
            ["--snapkv-budget", "-5"],
            "--snapkv-budget -5: must be a whole number of cells, at most 2^30, or between 0 and 1",
        ),
        (["--snapkv-budget", "100.5"], "--snapkv-budget 100.5: must be a whole number"),
        (["--snapkv-budget", "nan"], "--snapkv-budget nan: must be"),
        (["--snapkv-budget", "1e99"], "--snapkv-budget 1e+99: must be"),
        (["--snapkv-budget", "many"], "must be a number"),
        (["--snapkv-window", "0"], "--snapkv-window 0: must be between 1 and 4096"),
        (["--snapkv-window", "5000"], "--snapkv-window 5000: must be between 1 and 4096"),
        (["--snapkv-kernel", "4"], "--snapkv-kernel 4: must be odd"),
        (["--snapkv-kernel", "257"], "--snapkv-kernel 257: must be odd, between 1 (no pooling) and 255"),
        (["--snapkv-pool", "mean"], "must be 'avg' or 'max'"),
        (["--snapkv-recent", "5"], "--snapkv-recent 5: must be 0 or at least --snapkv-window 16"),
        (["--snapkv-recent", "1024"], "--snapkv-recent 1024: must be less than --snapkv-budget 1024"),
        (["--snapkv-chunk", "-1"], "--snapkv-chunk -1: must be a number of tokens"),
        (["--snapkv-probe", "-1"], "--snapkv-probe -1: must be between 0 (none) and 4096"),
        (["--snapkv-prompt-max", "-1"], "--snapkv-prompt-max -1: must be a number of tokens"),
    ],
)
def test_wrong_options(arguments: list[str], told: str, tiny_llama: Path) -> None:
    with pytest.raises(ServerError, match=re.escape(told)):
        Server(tiny_llama, *arguments, snapkv=False)


def test_help() -> None:
    shown = subprocess.run([binary(), "--help"], capture_output=True, text=True, check=True).stdout
    for name in ("", "-budget", "-window", "-kernel", "-pool", "-recent", "-chunk", "-probe", "-prompt-max"):
        assert f"--snapkv{name}" in shown
        assert f"LLAMA_ARG_SNAPKV{name.upper().replace('-', '_')})" in shown


def test_environment(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    for name, value in (("", "1"), ("_BUDGET", "0.25"), ("_WINDOW", "8"), ("_KERNEL", "3"), ("_POOL", "avg")):
        monkeypatch.setenv(f"LLAMA_ARG_SNAPKV{name}", value)
    monkeypatch.setenv("LLAMA_ARG_SNAPKV_RECENT", "9")
    monkeypatch.setattr("snapkv_gguf.server.flags", lambda snapkv: [])
    settings = {"budget": 0.25, "window": 8, "kernel": 3, "pool": "avg", "recent": 9}
    assert start().get("/props")["snapkv"] == settings
    for name, value in (("CHUNK", "100"), ("PROBE", "5"), ("PROMPT_MAX", "3000")):
        monkeypatch.setenv(f"LLAMA_ARG_SNAPKV_{name}", value)
    settings |= {"chunk": 100, "probe": 5, "cells": 1024, "prompt_max": 3000}
    assert start().get("/props")["snapkv"] == settings


def test_off(start: Callable[..., Any]) -> None:
    client = start(snapkv=False)
    answer = client.complete(tokens(1, 300))
    assert "snapkv" not in answer["timings"]
    assert client.get("/props")["snapkv"] is False
    assert "n_cells" not in client.get("/slots")[0]
    assert "snapkv" not in client.get("/metrics")
    refused = client.post("/completion", prompt="a", snapkv=True)
    assert refused.status_code == 400
    assert "started without --snapkv" in refused.json()["error"]["message"]
    assert client.complete(tokens(1, 300), snapkv=False)["tokens"] == answer["tokens"]


def test_models_and_contexts_that_cannot(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(ServerError, match="cannot be used with --snapkv: recurrent models have no KV cache"):
        Server(tiny.write_mamba(tmp_path / "mamba.gguf"))
    with pytest.raises(ServerError, match=r"cannot be used with --snapkv: .*embeddings"):
        Server(tiny_llama, "--embeddings")


def test_features_that_have_no_meaning_are_off(start: Callable[..., Any]) -> None:
    client = start("--context-shift", "--cache-reuse", "32")
    assert "ctx_shift is not supported by this context, it will be disabled" in client.server.log
    assert "cache_reuse is not supported by this context, it will be disabled" in client.server.log
    # a request may ask for it, and it is ignored
    client.complete(tokens(1, 300))
    client.complete(tokens(1, 150) + tokens(1, 300)[170:], n_cache_reuse=16)


def test_settings_arrive(start: Callable[..., Any]) -> None:
    for config in (CONFIG, SnapKV(), SnapKV(0.25, 8, 3, "avg", 0), SnapKV.paper()):
        settings = start(snapkv=config).get("/props")["snapkv"]
        assert SnapKV(**settings) == config


def test_a_model_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no model")
    with pytest.raises(ServerError, match="exit code 1: "):
        Server(tmp_path / "m.gguf")
