"""What llama.cpp really allocates."""

from __future__ import annotations

from pathlib import Path

from snapkv_gguf import _lib, plan
from snapkv_gguf.config import ggml_type
from snapkv_gguf.plan import Engine

_lib.load()  # makes llama_cpp load our libraries

import llama_cpp  # noqa: E402


def allocated(path: Path, cells: int, engine: Engine, types: tuple[str, str]) -> list[int]:
    """Bytes of weights, K and V, and compute buffers of a context that exists."""
    params = llama_cpp.llama_model_default_params()
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model
    context = llama_cpp.llama_context_default_params()
    context.n_ctx, context.n_seq_max = cells * engine.n_seq, engine.n_seq
    context.n_batch, context.n_ubatch = engine.n_batch, engine.n_ubatch
    context.type_k, context.type_v = map(ggml_type, types)
    context.flash_attn_type = int(engine.flash_attn)
    context.swa_full, context.kv_unified = engine.swa_full, False
    ctx = llama_cpp.llama_init_from_model(model, context)
    assert ctx
    found = [sum(part[i] for part in plan.breakdown(ctx)) for i in (1, 2, 3)]
    llama_cpp.llama_free(ctx)
    llama_cpp.llama_model_free(model)
    return found
