"""The kept sets and the moved rows against the NumPy oracle."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import llama_cpp as L
import numpy as np
import pytest
from engine import CACHE_TYPES, Engine, load_model, params, random_tokens
from ggml_tensor import Tensor

from snapkv_gguf import _capi, tiny
from snapkv_gguf._capi import Status

N = 300


def settings_matrix() -> list[_capi.Params]:
    found = []
    for pool, window, kernel in itertools.product(("avg", "max"), (1, 8, 32, 64), (1, 3, 5, 7, 13, 21)):
        found.append(params(128, window, 0, kernel, pool))
        if kernel in (1, 21):
            found += [params(budget, window, 0, kernel, pool) for budget in (window + 1, N - 1)]
        if kernel in (5, 21):
            found += [params(128, window, recent, kernel, pool) for recent in {window, 64}]
    return found


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fa", "no-fa"])
def test_every_setting(models: dict[str, Path], flash_attn: bool) -> None:
    tokens = random_tokens(N, 320)
    n_differ = 0
    with Engine(models["llama"], params(N, window=64), n_ctx=512, flash_attn=flash_attn) as engine:
        for settings in settings_matrix():
            n_differ += engine.check_pass(settings, tokens).n_differ
    print(f"{len(settings_matrix())} settings, {n_differ} cells differ by rounding")


@pytest.mark.parametrize("type_v", CACHE_TYPES)
@pytest.mark.parametrize("type_k", CACHE_TYPES)
def test_every_cache_type(models: dict[str, Path], type_k: str, type_v: str) -> None:
    tokens = random_tokens(N, 320, seed=1)
    with Engine(models["llama"], params(N, window=32), n_ctx=512, type_k=type_k, type_v=type_v) as engine:
        for settings in (params(100, 16), params(64, 32, 40, 5, "avg"), params(299, 8, 100)):
            engine.check_pass(settings, tokens)


@pytest.mark.parametrize("type_v", ["f16", "f32", "bf16"])
def test_transposed_v(models: dict[str, Path], type_v: str) -> None:
    tokens = random_tokens(N, 320, seed=2)
    for type_k in ("f16", "q8_0", "q4_0"):
        with Engine(
            models["llama"], params(N, window=32), n_ctx=512, type_k=type_k, type_v=type_v, flash_attn=False
        ) as engine:
            for settings in (params(100, 16), params(64, 32, 40, 5, "avg")):
                engine.check_pass(settings, tokens)


@pytest.mark.parametrize("n_batch", [512, 100, 7])
@pytest.mark.parametrize("n_ubatch", [512, 64, 7, 1])
def test_every_split_of_the_prompt(models: dict[str, Path], n_batch: int, n_ubatch: int) -> None:
    """Also ubatches shorter than the window."""
    tokens = random_tokens(150, 320, seed=3)
    with Engine(
        models["llama"], params(64, window=32), n_ctx=512, n_batch=n_batch, n_ubatch=min(n_ubatch, n_batch)
    ) as engine:
        engine.check_pass(params(64, window=32, kernel=7), tokens)


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fa", "no-fa"])
@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt-oss"])
def test_what_the_model_adds(models: dict[str, Path], name: str, flash_attn: bool) -> None:
    """Scaled queries, soft-capping, attention sinks, sliding-window layers beside the compacted ones."""
    tokens = random_tokens(N, 320, seed=4)
    with Engine(models[name], params(N, window=32), n_ctx=512, flash_attn=flash_attn) as engine:
        assert engine.init_status == Status.OK
        layers = _capi.layers(engine.ctx)
        assert 0 < len(layers) < {"gemma3": 6, "gemma2": 3, "gpt-oss": 3}[name]
        readers = [reader for layer in layers for reader in layer.readers]
        assert all(reader.has_sinks == (name == "gpt-oss") for reader in readers)
        assert all((reader.softcap > 0) == (name == "gemma2") for reader in readers)
        for settings in (params(100, 16), params(64, 32, 40, 5, "avg"), params(33, 32, kernel=1)):
            engine.check_pass(settings, tokens)


def test_heads_of_odd_size(tmp_path: Path) -> None:
    """A quantized head of 32 elements is 18, 22 or 34 bytes: no whole number of words."""
    path = tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_embd_head=32))
    tokens = random_tokens(N, 320, seed=5)
    for type_k in CACHE_TYPES:
        with Engine(path, params(N, window=32), n_ctx=512, type_k=type_k) as engine:
            engine.check_pass(params(100, 16), tokens)


def test_the_windows_own_softmax(models: dict[str, Path]) -> None:
    """The scores are those of the model's own softmax, read from its graph without flash attention."""
    tokens, window = random_tokens(N, 320, seed=6), 16
    found: dict[str, np.ndarray] = {}

    @L.ggml_backend_sched_eval_callback
    def on_eval(pointer: int, ask: bool, _: object) -> bool:
        tensor = Tensor.at(pointer)
        if not tensor.name.startswith(b"kq_soft_max"):
            return not ask
        if not ask:
            found[tensor.name.decode()] = tensor.f32()[0]
        return True

    with Engine(models["llama"], params(N, window=window), n_ctx=512, flash_attn=False) as engine:
        sums: dict[int, np.ndarray] = {}
        engine.decode(tokens)
        for i in range(3):
            sums[i] = _capi.scores(engine.ctx, 0, i, window)
    p = L.llama_context_default_params()
    p.n_ctx, p.n_threads, p.n_threads_batch, p.flash_attn_type, p.cb_eval = 512, 2, 2, 0, on_eval
    model = load_model(models["llama"])
    ctx = L.llama_init_from_model(model, p)
    array = (ctypes.c_int32 * N)(*tokens)
    assert L.llama_decode(ctx, L.llama_batch_get_one(array, N)) == 0
    for i in range(3):
        own = found[f"kq_soft_max-{i}"][:, -window:, :N].sum(axis=1)
        assert np.abs(own - sums[i]).max() <= 2e-3 * own.max()  # llama.cpp rounds q to the type of K
    L.llama_free(ctx)
    L.llama_model_free(model)
