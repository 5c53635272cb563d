from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("library")


def count(text: str) -> int:
    return len(text.split())


def test_haystack() -> None:
    from snapkv_gguf import haystack

    texts = [haystack.build(2000, seed, count) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len({text.code for text in texts}) == 2
    for text in texts:
        assert re.fullmatch(r"\d{6}", text.code)
        assert text.text.count(text.code) == 1
        assert 1800 < count(text.text) <= 2000
        before = count(text.text.split(text.code)[0])
        assert before / 2000 == pytest.approx(text.depth, abs=0.1)


def test_a_haystack_shorter_than_a_paragraph() -> None:
    from snapkv_gguf import haystack

    text = haystack.build(12, 1, count)
    assert text.text.count(text.code) == 1
    assert 10 <= count(text.text) <= 12
    assert haystack.build(7, 1, count).text.startswith("Remember")
    with pytest.raises(ValueError, match="n_tokens=6: must be at least 7"):
        haystack.build(6, 1, count)


def test_prompt_of_a_model_without_a_template(model_path: Path) -> None:
    from snapkv_gguf import haystack
    from snapkv_gguf.prompt import Vocabulary

    with Vocabulary(model_path) as vocabulary:
        assert not vocabulary.has_chat_template
        assert vocabulary.n_ctx_train == 8192
        assert vocabulary.count("abc") == 3
        assert vocabulary.plain("abc") == [1, 3 + 97, 3 + 98, 3 + 99]
        text = haystack.build(500, 1, vocabulary.count)
        tokens = text.prompt(vocabulary)
    prompt = bytes(token - 3 if token != 259 else 32 for token in tokens[1:]).decode()
    assert prompt.startswith(f"Document:\n{text.text}\n\n")
    assert prompt.endswith("Answer: The secret access code is")


def test_capture_cost_is_not_that_of_an_interruption() -> None:
    from snapkv_gguf.bench import _capture_cost

    batches = [[(1.0, 1.02), (3.0, 3.0)]] * 4
    assert _capture_cost(batches) == pytest.approx(0.02 / 4)
    assert _capture_cost([*batches, [(1.0, 9.0), (30.0, 3.0)]]) == pytest.approx(0.02 / 4)
