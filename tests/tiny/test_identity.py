"""Off is identical: logits bit-equal to libllama built from the pristine source against the same ggml."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import CACHE_TYPES
from identity import digest_with

from snapkv_gguf import _lib


@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
@pytest.mark.parametrize("flash_attn", [True, False], ids=["fa", "no-fa"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "mamba"])
def test_off_is_identical(models: dict[str, Path], pristine: Path, name: str, flash_attn: bool, type_kv: str) -> None:
    arguments = (models[name], 200, 64, flash_attn, CACHE_TYPES[type_kv])
    ours = digest_with(_lib.lib_dir(), *arguments)
    assert len(ours) == 64
    assert ours == digest_with(pristine, *arguments)
