"""The official client against the small real model: the roads that people take."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from snapkv_gguf import SnapKV, haystack
from snapkv_gguf.models import get_model
from snapkv_gguf.prompt import Vocabulary
from snapkv_gguf.server import Server

SEED = 2  # a code that the full cache finds


@pytest.fixture(scope="module", params=[False, True], ids=["full", "snapkv"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    snapkv = SnapKV(budget=512) if request.param else False
    with Server("smollm2", "-c", "4096", "-np", "1", "--no-warmup", snapkv=snapkv) as server:
        yield server


def test_a_question_about_a_long_first_message(server: Server) -> None:
    with Vocabulary(get_model("smollm2")) as vocabulary:
        text = haystack.build(2000, SEED, vocabulary.count)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": f"{text.text}\n\n{haystack.QUESTION}"}
    ]

    def ask() -> str:
        answer = ""
        stream = client.chat.completions.create(
            model="smollm2", messages=messages, stream=True, temperature=0, max_tokens=32
        )
        for chunk in stream:
            answer += chunk.choices[0].delta.content or "" if chunk.choices else ""
        messages.append({"role": "assistant", "content": answer})
        return answer

    assert text.code in ask()
    messages.append({"role": "user", "content": "Say that code again."})
    assert text.code in ask()
    messages.append({"role": "user", "content": "Thank you. Goodbye!"})
    assert ask()


def test_the_field_goes_through_extra_body(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Hello " * 50}],
        max_tokens=2,
        extra_body={"snapkv": False},
    )
    assert answer.usage is not None
    with pytest.raises(openai.BadRequestError, match="snapkv"):
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Hello"}], extra_body={"snapkv": {"budget": 1}}
        )
