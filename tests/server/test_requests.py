"""The field "snapkv" of a request, on every endpoint, and what the server tells about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from server_client import CONFIG, tokens

CHAT = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog. " * 6}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": tokens(1, 300), "n_predict": 4},
    "/v1/completions": {"prompt": CHAT[0]["content"], "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": CHAT[0]["content"], "max_output_tokens": 4},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/infill": {"input_prefix": CHAT[0]["content"], "input_suffix": "", "n_predict": 4},
}

WRONG: list[tuple[Any, str]] = [
    (1, "must be true, false or an object"),
    ("yes", "must be true, false or an object"),
    ([], "must be true, false or an object"),
    ({"budget": 8}, "budget 8: must be more than window 8"),
    ({"budget": -1}, "budget -1: must be a whole number of cells, at most 2^30"),
    ({"budget": 1e30}, "budget 1e+30: must be"),
    ({"budget": "64"}, "budget must be a number"),
    ({"budget": None}, "budget must be a number"),
    ({"kernel": 2}, "kernel 2: must be odd"),
    ({"kernel": 2.5}, "kernel must be a whole number"),
    ({"kernel": 99999999999999}, "kernel 1000000000: must be odd, between 1"),
    ({"pool": "mean"}, "pool must be 'avg' or 'max'"),
    ({"pool": 1}, "pool must be 'avg' or 'max'"),
    ({"recent": 64}, "recent 64: must be less than budget 64"),
    ({"window": 4}, "window is set when the server starts"),
    ({"bugdet": 64}, "unknown setting 'bugdet', the settings are budget, kernel, pool, recent and probe"),
]


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != "/infill"])
def test_endpoints(path: str, start: Callable[..., Any]) -> None:
    client = start("--cache-ram", "0")  # else the last one would find the second one's cells
    body = {**ENDPOINTS[path], "temperature": 0}
    for snapkv, passes in ((False, 0), (True, 1), ({"budget": 32}, 2), ({"kernel": 3, "pool": "avg"}, 3), (None, 4)):
        response = client.post(path, **body, snapkv=snapkv)
        assert response.status_code == 200, response.text
        assert client.metric("snapkv_passes_total") == passes
    for snapkv, told in WRONG:
        response = client.post(path, **body, snapkv=snapkv)
        assert response.status_code == 400, (snapkv, response.text)
        assert told in response.json()["error"]["message"], snapkv


def test_what_is_visible(start: Callable[..., Any]) -> None:
    client = start()
    assert client.cells() == [0]
    answer = client.complete(tokens(1, 300), n=12)
    told = answer["timings"]["snapkv"]
    assert told.pop("ms") > 0
    assert told == {"prompt_n": 300, "cells": 64, "evicted": 236, "window": 8}
    assert client.cells() == [64 + 11]
    assert client.get("/slots")[0]["n_prompt_tokens"] == 300 + 11
    assert client.metric("snapkv_passes_total") == 1
    assert client.metric("snapkv_tokens_evicted_total") == 236
    assert client.metric("snapkv_seconds_total") > 0
    assert client.metric("snapkv_cells") == 64 + 11
    assert "compacted 300 tokens, 300 -> 64 cells" in client.server.log

    short = client.complete(tokens(2, 50))
    assert short["timings"]["snapkv"]["reason"] == "the sequence is within the budget"
    assert short["timings"]["snapkv"]["cells"] == 50
    assert client.metric("snapkv_passes_total") == 1


def test_streams_tell_it_too(start: Callable[..., Any]) -> None:
    client = start()
    with client.http.stream(
        "POST", "/v1/chat/completions", json={"messages": CHAT, "max_tokens": 8, "stream": True}
    ) as response:
        text = response.read().decode()
    assert '"snapkv":{"prompt_n":' in text


def test_a_share_of_the_prompt(start: Callable[..., Any]) -> None:
    client = start()
    answer = client.complete(tokens(1, 400), snapkv={"budget": 0.25})
    assert answer["timings"]["snapkv"]["cells"] == 100


def test_generation_of_one_token_leaves_the_prompt_whole(start: Callable[..., Any]) -> None:
    # to warm a cache, a prompt is sent alone; nobody has asked anything yet
    client = start()
    for n in (0, 1):
        answer = client.complete(tokens(1, 300), n=n)
        assert client.cells() == [300]
        assert client.metric("snapkv_passes_total") == 0
    assert client.complete(tokens(1, 300) + tokens(5, 40))["timings"]["cache_n"] == 300
    assert answer["timings"]["cache_n"] == 300 - CONFIG.window


def test_malformed_json(start: Callable[..., Any]) -> None:
    client = start()
    for content in (
        b"{",
        b'{"prompt": "a", "snapkv": {',
        b"[]",
        b'{"snapkv": {"budget": 1e999}, "prompt": "a"}',
        b"\xff",
    ):
        response = client.http.post("/completion", content=content, headers={"Content-Type": "application/json"})
        assert 400 <= response.status_code < 600
    assert client.complete(tokens(1, 300))["timings"]["snapkv"]["cells"] == 64
