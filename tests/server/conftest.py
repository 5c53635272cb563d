from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_client import CONFIG, OPTIONS, Client

from snapkv_gguf import tiny
from snapkv_gguf.server import Server


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gemma3(tmp_path_factory.mktemp("models") / "gemma3.gguf")


@pytest.fixture
def start(tiny_llama: Path) -> Iterator[Callable[..., Client]]:
    """Starts servers, which must end without an error when the test ends."""
    servers: list[Server] = []

    def run(*arguments: str, model: Path = tiny_llama, snapkv: Any = CONFIG, **kwargs: Any) -> Client:
        servers.append(Server(model, *OPTIONS, *arguments, snapkv=snapkv, **kwargs))
        return Client(servers[-1])

    yield run
    for server in servers:
        assert server.returncode is None, f"the server ended by itself:\n{server.log}"
        assert server.stop() == 0, server.log
