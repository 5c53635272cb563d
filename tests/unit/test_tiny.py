from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from snapkv_gguf import tiny


@pytest.mark.parametrize("name", tiny.WRITERS)
def test_the_same_seed_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    write = tiny.WRITERS[name]
    digests = [hashlib.sha256(write(tmp_path / "m.gguf", seed=seed).read_bytes()).digest() for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("weights", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.usefixtures("library")
def test_weight_types_load(weights: str, tmp_path: Path) -> None:
    from snapkv_gguf import Llama

    path = tiny.write_llama(tmp_path / "m.gguf", replace(tiny.Shape(), weights=weights, n_vocab=600))
    llm = Llama(str(path), n_ctx=64, verbose=False)
    llm.eval(llm.tokenize(b"abc"))
    assert llm.n_tokens == 4  # with the token of the beginning


@pytest.mark.parametrize("name", tiny.WRITERS)
@pytest.mark.usefixtures("library")
def test_architectures_load_and_decode(name: str, tmp_path: Path) -> None:
    from snapkv_gguf import Llama

    path = tiny.WRITERS[name](tmp_path / "m.gguf")
    encoder = name == "bert"
    llm = Llama(str(path), n_ctx=64, embedding=encoder, verbose=False)
    text = "hello wörld ☺"
    assert llm.detokenize(llm.tokenize(text.encode())).decode() == text
    if encoder:
        assert len(llm.embed("hi")) == tiny.Shape().n_embd
    else:
        assert llm("hi", max_tokens=4, temperature=0)["usage"]["completion_tokens"] >= 1


def test_wrong_shapes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_head=4 is not a multiple of n_head_kv=3"):
        tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_head_kv=3))
    with pytest.raises(ValueError, match="n_vocab=100: at least 260"):
        tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_vocab=100))
    with pytest.raises(ValueError, match="do not divide into Q8_0 blocks of 32"):
        tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_embd_head=20, weights="q8_0"))
    assert list(tmp_path.iterdir()) == []
