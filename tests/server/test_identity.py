"""Without --snapkv the server is upstream's: byte-identical greedy output, request by request."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_client import Client, tokens

from snapkv_gguf.models import get_model

# what differs from run to run
VOLATILE = {
    "timings",
    "id",
    "created",
    "system_fingerprint",
    "id_slot",
    "model",
    "response_id",
    "item_id",
    "created_at",
    "completed_at",
}

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours of the rainbow."}]
LONG = tokens(1, 400)


def requests(model: str) -> list[tuple[str, dict[str, Any]]]:
    prompt: Any = LONG if model == "tiny" else "Once upon a time, in a small village by the sea,"
    common = {"temperature": 0, "n_predict": 24, "max_tokens": 24}
    return [
        ("/completion", {"prompt": prompt, **common, "return_tokens": True}),
        ("/completion", {"prompt": prompt, **common, "return_tokens": True}),  # from the cache
        ("/completion", {"prompt": prompt, **common, "n_probs": 5}),
        ("/completion", {"prompt": prompt, **common, "stream": True}),
        ("/completion", {"prompt": prompt, **common, "seed": 3, "temperature": 1.5}),
        ("/completion", {"prompt": prompt, **common, "n_cmpl": 2}),
        ("/completion", {"prompt": [prompt, LONG[:50]], **common}),
        ("/completion", {"prompt": prompt, **common, "grammar": "root ::= [a-z ]*"}),
        ("/completion", {"prompt": prompt, **common, "stop": ["e", "a"]}),
        ("/completion", {"prompt": LONG[:200] + LONG[230:], **common, "n_cache_reuse": 16}),
        ("/completion", {"prompt": LONG[:300], **common, "n_predict": 300, "ignore_eos": True}),  # shifts the context
        ("/v1/completions", {"prompt": "The sea", **common, "logprobs": 3}),
        ("/v1/chat/completions", {"messages": CHAT, **common}),
        ("/v1/chat/completions", {"messages": CHAT, **common, "stream": True}),
        ("/v1/chat/completions", {"messages": CHAT, **common, "logprobs": True, "top_logprobs": 4}),
        ("/v1/messages", {"messages": CHAT[1:], "system": "Be brief.", **common}),
        ("/v1/responses", {"input": "The sea", "max_output_tokens": 24, "temperature": 0}),
        ("/completion", {"prompt": "x" * 5000, **common}),  # too long
        ("/completion", {"prompt": prompt, "n_predict": "many"}),
        ("/tokenize", {"content": "The sea", "with_pieces": True}),
    ]


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: stable(part) for key, part in value.items() if key not in VOLATILE}
    return [stable(part) for part in value] if isinstance(value, list) else value


def answers(client: Client, model: str) -> list[Any]:
    import json

    found = []
    for path, body in requests(model):
        response = client.post(path, **body)
        if body.get("stream"):
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            found.append((response.status_code, [stable(json.loads(line)) for line in lines]))
        else:
            found.append((response.status_code, stable(response.json())))
    return found


@pytest.fixture
def pristine_server() -> Path:
    """Upstream's llama-server, which the Makefile builds."""
    path = Path(os.environ.get("SNAPKV_PRISTINE_LIB", "")) / "llama-server"
    if not path.is_file():
        pytest.fail(f"no {path}: run the tests with make test-server")
    return path


@pytest.mark.parametrize(
    "options", [[], ["--context-shift", "--kv-unified", "--cache-reuse", "8"]], ids=["plain", "more"]
)
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_off_is_identical(
    model: str, options: list[str], start: Callable[..., Client], pristine_server: Path, tiny_llama: Path
) -> None:
    path = tiny_llama if model == "tiny" else get_model("smollm2")
    more = ("-np", "2", "-fa", "auto", *options)
    ours = answers(start(*more, model=path, snapkv=False), model)
    upstreams = answers(start(*more, model=path, executable=pristine_server), model)
    for request, one, other in zip(requests(model), ours, upstreams, strict=True):
        assert one == other, request
