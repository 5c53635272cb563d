"""Prints a digest of the logits of a prompt and of greedily generated tokens, by model; run once with each libllama.

Uses llama_cpp's low-level functions only, so that it runs with a library without SnapKV.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path


def digest(model_path: str, n_prompt: int, n_generate: int, flash_attn: bool, type_kv: int) -> str:
    import llama_cpp as L
    import numpy as np

    L.llama_log_set(_quiet := L.llama_log_callback(lambda *_: None), ctypes.c_void_p(0))
    L.llama_backend_init()
    model = L.llama_model_load_from_file(model_path.encode(), L.llama_model_default_params())
    p = L.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch, p.n_threads, p.n_threads_batch = 1024, 512, 128, 1, 1
    p.flash_attn_type, p.type_k, p.type_v = int(flash_attn), type_kv, type_kv if flash_attn else 1
    ctx = L.llama_init_from_model(model, p)
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    tokens = np.random.default_rng(0).integers(3, min(n_vocab, 30000), n_prompt).tolist()
    batch = L.llama_batch_init(512, 0, 1)
    sha = hashlib.sha256()

    def decode(part: list[int], pos: int) -> np.ndarray:
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos + i, 1, True
            batch.seq_id[i][0] = 0
        assert L.llama_decode(ctx, batch) == 0
        rows = [np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, i), (n_vocab,)) for i in range(len(part))]
        for row in rows:
            assert np.isfinite(row).all()
            sha.update(row.tobytes())
        return rows[-1]

    last = decode(tokens, 0)
    for i in range(n_generate):
        last = decode([int(last.argmax())], n_prompt + i)
    L.llama_batch_free(batch)
    L.llama_free(ctx)
    L.llama_model_free(model)
    return sha.hexdigest()


def digest_with(library: Path, model: Path, n_prompt: int, n_generate: int, flash_attn: bool, type_kv: int) -> str:
    """The digest in a process of its own, with the libraries in the folder ``library``."""
    (found,) = digests_with(library, [model], n_prompt, n_generate, flash_attn, type_kv)
    return found


def digests_with(
    library: Path, models: list[Path], n_prompt: int, n_generate: int, flash_attn: bool, type_kv: int
) -> list[str]:
    """The same of several models, one after the other."""
    arguments = [str(n_prompt), str(n_generate), str(int(flash_attn)), str(type_kv), *map(str, models)]
    return subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(library)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()


if __name__ == "__main__":
    n_prompt, n_generate, flash, kind = map(int, sys.argv[1:5])
    for path in sys.argv[5:]:
        print(digest(path, n_prompt, n_generate, bool(flash), kind), flush=True)
