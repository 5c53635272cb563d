"""A client of llama-server, for the tests of the server."""

from __future__ import annotations

from typing import Any

import httpx

from snapkv_gguf import SnapKV
from snapkv_gguf.server import Server

CONFIG = SnapKV(budget=64, window=8, kernel=5, pool="max", recent=0.25)

# one thread: servers of several tests may run on few cores
OPTIONS = (
    "-c",
    "1024",
    "-np",
    "1",
    "-b",
    "128",
    "-ub",
    "64",
    "-t",
    "1",
    "-fa",
    "off",
    "--no-warmup",
    "--slots",
    "--metrics",
)


# the tiny model's embeddings repeat after 256 rows: of two equally likely tokens, the first one
_NO_TWINS = [[token, False] for token in range(256, 320)]


class Client:
    """Asks a server; greedy, token ids in and out."""

    def __init__(self, server: Server) -> None:
        self.server = server
        # no connection twice: after some answers the server closes it, with a request under way
        self.http = httpx.Client(base_url=server.url, timeout=600, limits=httpx.Limits(max_keepalive_connections=0))

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def get(self, path: str) -> Any:
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json() if "json" in response.headers["content-type"] else response.text

    def complete(self, prompt: list[int], n: int = 12, **body: Any) -> Any:
        """A completion that goes on for n tokens."""
        options = {"prompt": prompt, "n_predict": n, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        options["logit_bias"] = _NO_TWINS
        response = self.post("/completion", **{**options, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def cells(self) -> list[int]:
        return [slot["n_cells"] for slot in self.get("/slots")]

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return float(next(line for line in lines if line.startswith(f"llamacpp:{name} ")).split()[1])


def tokens(seed: int, n: int) -> list[int]:
    """A prompt of n tokens, the first one the beginning of text."""
    state, result = seed, [1]
    while len(result) < n:
        state = (1103515245 * state + 12345) % 2**31
        result.append(3 + 97 + (state >> 16) % 26)
    return result
