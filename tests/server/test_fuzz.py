"""Requests and slot files that are broken in many ways: an error, never the end of the server."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_client import Client, tokens

from snapkv_gguf import tiny

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": tokens(1, 200), "n_predict": 4, "snapkv": {"budget": 80, "kernel": 3, "pool": "max"}}),
    ("/completion", {"prompt": "a" * 150, "n_predict": 4, "snapkv": True, "cache_prompt": True, "n_cmpl": 1}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "b" * 150}], "max_tokens": 4, "snapkv": {"recent": 0.3}},
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": "c" * 150}], "max_tokens": 4, "snapkv": False}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 0.5, -0.5, 1e308, "", "x", "64", [], {}),
    *(
        [[]],
        [1, "a", None],
        {"budget": -1},
        {"budget": {"budget": 1}},
        {"kernel": []},
        {"": 0},
        {"recent": 1e-300},
        "\u0000",
    ),
]
SNAPKV_KEYS = ("budget", "kernel", "pool", "recent", "window", "enabled", "snapkv", "")


def mutate(rng: random.Random, body: dict[str, Any]) -> bytes:
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(5)
        if kind == 0:
            body[rng.choice(list(body))] = rng.choice(VALUES)
        elif kind == 1:
            body["snapkv"] = {rng.choice(SNAPKV_KEYS): rng.choice(VALUES) for _ in range(rng.randint(0, 4))}
        elif kind == 2:
            body["snapkv"] = rng.choice(VALUES)
        elif kind == 3:
            body.pop(rng.choice(list(body)), None)
            body.setdefault("prompt", "d")
        else:
            body["snapkv"] = {
                "budget": rng.choice([17, 40, 79, 80, 81, 199, 200, 0.01, 0.99]),
                "kernel": rng.choice([1, 3, 255]),
            }
    text = bytearray(json.dumps(body).encode())
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
    if rng.random() < 0.05:
        del text[rng.randrange(len(text)) :]
    return bytes(text)


@pytest.mark.parametrize("n", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_requests(n: int, start: Callable[..., Client]) -> None:
    client = start("-c", "512", "-n", "8")
    expected = client.complete(tokens(1, 200))["tokens"]
    rng = random.Random(n)
    counts: Counter[int] = Counter()
    for i in range(n):
        path, body = rng.choice(BODIES)
        content = mutate(rng, body)
        response = client.http.post(path, content=content, headers={"Content-Type": "application/json"})
        counts[response.status_code] += 1
        assert client.server.returncode is None, (i, path, content)
    print(f"\n{n} requests: {dict(counts)}")
    assert counts[200] > n / 20
    assert counts[400] > n / 20
    assert client.complete(tokens(1, 200), cache_prompt=False)["tokens"] == expected


@pytest.mark.parametrize("n", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_slot_files(n: int, start: Callable[..., Client], tmp_path: Path) -> None:
    client = start("-c", "512", "--slot-save-path", f"{tmp_path}/")
    prompt = tokens(1, 200)
    expected = client.complete(prompt)["tokens"]
    client.post("/slots/0?action=save", filename="good")
    good = (tmp_path / "good").read_bytes()
    other = tiny.write_llama(tmp_path / "other.gguf", tiny.Shape(n_layer=3, n_embd_head=64))
    stranger = start("-c", "512", "--slot-save-path", f"{tmp_path}/", model=other)
    stranger.complete(prompt)
    stranger.post("/slots/0?action=save", filename="stranger")

    rng = random.Random(n)
    counts: Counter[int] = Counter()
    for i in range(n):
        bad = bytearray(good)
        if i == 0:
            bad = bytearray((tmp_path / "stranger").read_bytes())
        elif rng.random() < 0.5:
            del bad[rng.randrange(len(bad)) :]
        else:
            # the beginning holds the sizes
            for _ in range(rng.randint(1, 6)):
                bad[int(len(bad) * rng.random() ** 6)] = rng.randrange(256)
        (tmp_path / "bad").write_bytes(bad)
        status = client.post("/slots/0?action=restore", filename="bad").status_code
        counts[status] += 1
        assert status == 400 or (i > 0 and len(bad) == len(good)), i  # another model's, or truncated
        client.complete(prompt, n=2)
        client.complete(prompt[:150], n=2)
        assert client.server.returncode is None, i
    print(f"\n{n} slot files: {dict(counts)}")
    assert client.post("/slots/0?action=restore", filename="missing").status_code == 400
    assert client.post("/slots/0?action=restore", filename="good").status_code == 200
    assert client.complete(prompt, cache_prompt=False)["tokens"] == expected
