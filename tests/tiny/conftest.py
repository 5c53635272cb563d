from __future__ import annotations

from pathlib import Path

import pytest

from snapkv_gguf import tiny

SHAPE = tiny.Shape(n_layer=3, n_head=4, n_head_kv=2, n_embd_head=64, n_ff=64)

WRITERS = {
    "llama": lambda path: tiny.write_llama(path, SHAPE),
    "gemma3": lambda path: tiny.write_gemma3(path, tiny.Shape(n_layer=6, n_embd_head=64, n_ff=64)),
    "gemma2": lambda path: tiny.write_gemma2(path, SHAPE),
    "gpt-oss": lambda path: tiny.write_gpt_oss(path, SHAPE),
    "gemma4": lambda path: tiny.write_gemma4(path, tiny.Shape(n_layer=6, n_embd_head=64, n_ff=64)),
    "lfm2": lambda path: tiny.write_lfm2(path, tiny.Shape(n_layer=4, n_embd_head=64, n_ff=64)),
    "qwen2vl": lambda path: tiny.write_qwen2vl(path, SHAPE),
    "mpt": tiny.write_mpt,
    "mamba": tiny.write_mamba,
    "bert": tiny.write_bert,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Seeded random models by architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: Path(write(folder / f"{name}.gguf")) for name, write in WRITERS.items()}
