"""Seeded GGUF files with random weights, for tests and benchmarks; the same arguments give the same bytes.

Each writer gives a model that llama.cpp loads, tokenizes with (byte by byte) and decodes; what it says is noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Quant

# rows of a matrix that are drawn; larger ones repeat them, which is as fast to decode and much faster to write
_DRAWN_ROWS = 256

_BOS, _EOS, _FIRST_BYTE, _SPACE = 1, 2, 3, 259


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model.

    Attributes:
        n_layer: Layers.
        n_head: Query heads; n_head * n_embd_head is the width of the model.
        n_head_kv: KV heads, a divisor of n_head.
        n_embd_head: Size of a head; with weights in blocks, the width must be a multiple of 32.
        n_ff: Width of the feed-forward part.
        n_ctx: Context the model claims to be trained for.
        n_vocab: Tokens, at least 260: three special ones, 256 bytes and the space.
        n_swa: Sliding window of the architectures that have one.
        weights: Type of the matrices: "f32", "f16", "bf16", "q8_0", "q4_0", ...
    """

    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    n_embd_head: int = 32
    n_ff: int = 128
    n_ctx: int = 8192
    n_vocab: int = 320
    n_swa: int = 64
    weights: str = "f32"

    @property
    def n_embd(self) -> int:
        """Width of the model."""
        return self.n_head * self.n_embd_head

    @property
    def n_embd_kv(self) -> int:
        """Width of K and V of all KV heads."""
        return self.n_head_kv * self.n_embd_head


# for benchmarks: a small one, and Llama 3.2 1B and Llama 3.1 8B but for a smaller vocabulary
RANDOM_SHAPES = {
    "random-30m": Shape(
        n_layer=8, n_head=8, n_head_kv=2, n_embd_head=64, n_ff=1536, n_ctx=131072, n_vocab=8000, weights="q8_0"
    ),
    "random-1b": Shape(
        n_layer=16, n_head=32, n_head_kv=8, n_embd_head=64, n_ff=8192, n_ctx=131072, n_vocab=32000, weights="q8_0"
    ),
    "random-8b": Shape(
        n_layer=32, n_head=32, n_head_kv=8, n_embd_head=128, n_ff=14336, n_ctx=131072, n_vocab=32000, weights="q8_0"
    ),
}


class _Writer:
    """Collects metadata and tensor shapes, then writes the tensors one at a time."""

    def __init__(self, arch: str, shape: Shape, seed: int) -> None:
        if shape.n_vocab < _SPACE + 1:
            raise ValueError(f"n_vocab={shape.n_vocab}: at least {_SPACE + 1} for the bytes and special tokens")
        if shape.n_head % shape.n_head_kv != 0:
            raise ValueError(f"n_head={shape.n_head} is not a multiple of n_head_kv={shape.n_head_kv}")
        self.arch, self.shape, self.seed = arch, shape, seed
        self.quant = Quant[shape.weights.upper()]
        self.gguf = gguf.GGUFWriter(None, arch)
        # name: (shape in numpy's order, type, mean, standard deviation)
        self.tensors: dict[str, tuple[tuple[int, ...], Quant, float, float]] = {}

        self.gguf.add_name(f"random {arch}, seed {seed}")
        self.gguf.add_block_count(shape.n_layer)
        self.gguf.add_context_length(shape.n_ctx)
        self.gguf.add_embedding_length(shape.n_embd)
        self.gguf.add_vocab_size(shape.n_vocab)
        self._vocabulary()

    def _vocabulary(self) -> None:
        # private-use characters for the rest: no text holds them, and they print
        n_rest = self.shape.n_vocab - _SPACE - 1
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
        tokens += [chr(0xE000 + i if i < 6400 else 0xF0000 + i) for i in range(n_rest)]
        kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (1 + n_rest)
        self.gguf.add_tokenizer_model("llama")
        self.gguf.add_tokenizer_pre("default")
        self.gguf.add_token_list(tokens)
        self.gguf.add_token_scores([0.0] * len(tokens))
        self.gguf.add_token_types(kinds)
        self.gguf.add_bos_token_id(_BOS)
        self.gguf.add_eos_token_id(_EOS)
        self.gguf.add_unk_token_id(0)
        self.gguf.add_add_space_prefix(False)

    def attention(self, *, rope: bool = True, n_head_kv: list[int] | None = None) -> None:
        self.gguf.add_head_count(self.shape.n_head)
        self.gguf.add_head_count_kv(n_head_kv or self.shape.n_head_kv)
        self.gguf.add_key_length(self.shape.n_embd_head)
        self.gguf.add_value_length(self.shape.n_embd_head)
        self.gguf.add_feed_forward_length(self.shape.n_ff)
        if rope:
            self.gguf.add_rope_dimension_count(self.shape.n_embd_head)

    def matrix(self, name: str, *shape: int) -> None:
        """Weights [..., out, in], scaled to keep the variance."""
        self.tensors[f"{name}.weight"] = (shape, self.quant, 0.0, shape[-1] ** -0.5)

    def embedding(self, name: str, n: int, *, std: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = ((n, self.shape.n_embd), self.quant, 0.0, std)

    def vector(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        """Norms, biases and the like, always F32."""
        self.tensors[name] = (shape, Quant.F32, mean, std)

    def norm(self, name: str, n: int | None = None, *, bias: bool = False) -> None:
        self.vector(f"{name}.weight", n or self.shape.n_embd, mean=1.0)
        if bias:
            self.vector(f"{name}.bias", n or self.shape.n_embd)

    def qkv(self, layer: str) -> None:
        self.matrix(f"{layer}.attn_q", self.shape.n_embd, self.shape.n_embd)
        self.matrix(f"{layer}.attn_k", self.shape.n_embd_kv, self.shape.n_embd)
        self.matrix(f"{layer}.attn_v", self.shape.n_embd_kv, self.shape.n_embd)
        self.matrix(f"{layer}.attn_output", self.shape.n_embd, self.shape.n_embd)

    def ffn(self, layer: str, *, gate: bool = True) -> None:
        if gate:
            self.matrix(f"{layer}.ffn_gate", self.shape.n_ff, self.shape.n_embd)
        self.matrix(f"{layer}.ffn_up", self.shape.n_ff, self.shape.n_embd)
        self.matrix(f"{layer}.ffn_down", self.shape.n_embd, self.shape.n_ff)

    def head(self) -> None:
        self.embedding("token_embd", self.shape.n_vocab)
        self.norm("output_norm")
        self.matrix("output", self.shape.n_vocab, self.shape.n_embd)

    def tied_head(self) -> None:
        # Gemma scales its embeddings by the square root of the width: larger ones would drown what the layers add
        self.embedding("token_embd", self.shape.n_vocab, std=self.shape.n_embd**-0.5)
        self.norm("output_norm")

    def layers(self) -> list[str]:
        return [f"blk.{i}" for i in range(self.shape.n_layer)]

    def write(self, path: str | os.PathLike[str]) -> Path:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        for name, (shape, quant, _, _) in self.tensors.items():
            block, size = gguf.GGML_QUANT_SIZES[quant]
            if shape[-1] % block != 0:
                raise ValueError(f"{name}: rows of {shape[-1]} do not divide into {quant.name} blocks of {block}")
            row = shape[-1] // block * size
            n_bytes = int(np.prod(shape[:-1], dtype=np.int64)) * row
            self.gguf.add_tensor_info(name, (*shape[:-1], row), np.dtype(np.uint8), n_bytes, raw_dtype=quant)
        try:
            self.gguf.write_header_to_file(temporary)
            self.gguf.write_kv_data_to_file()
            self.gguf.write_ti_data_to_file()
            for index in range(len(self.tensors)):
                self.gguf.write_tensor_data(self._data(index))
            self.gguf.close()
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def _data(self, index: int) -> npt.NDArray[np.uint8]:
        shape, quant, mean, std = list(self.tensors.values())[index]
        n_rows = int(np.prod(shape[:-1], dtype=np.int64))
        rng = np.random.default_rng((self.seed, index))
        drawn = rng.standard_normal((min(n_rows, _DRAWN_ROWS), shape[-1]), dtype=np.float32)
        rows = gguf.quants.quantize(drawn * np.float32(std) + np.float32(mean), quant).view(np.uint8)
        repeated: npt.NDArray[np.uint8] = np.resize(rows, (n_rows, rows.shape[-1])).reshape(*shape[:-1], -1)
        return repeated


def write_llama(path: str | os.PathLike[str], shape: Shape = Shape(), seed: int = 0) -> Path:
    """Full attention, grouped queries, RoPE."""
    w = _Writer("llama", shape, seed)
    w.attention()
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.head()
    for layer in w.layers():
        w.norm(f"{layer}.attn_norm")
        w.qkv(layer)
        w.norm(f"{layer}.ffn_norm")
        w.ffn(layer)
    return w.write(path)


def write_gemma3(path: str | os.PathLike[str], shape: Shape = Shape(n_layer=6), seed: int = 0) -> Path:
    """Five sliding-window layers, then a full one; normed queries and keys; scales its queries itself."""
    w = _Writer("gemma3", shape, seed)
    w.attention()
    w.gguf.add_layer_norm_rms_eps(1e-6)
    w.gguf.add_sliding_window(shape.n_swa)
    w.tied_head()
    for layer in w.layers():
        w.norm(f"{layer}.attn_norm")
        w.qkv(layer)
        w.norm(f"{layer}.attn_q_norm", shape.n_embd_head)
        w.norm(f"{layer}.attn_k_norm", shape.n_embd_head)
        w.norm(f"{layer}.post_attention_norm")
        w.norm(f"{layer}.ffn_norm")
        w.ffn(layer)
        w.norm(f"{layer}.post_ffw_norm")
    return w.write(path)


def write_gemma2(path: str | os.PathLike[str], shape: Shape = Shape(), seed: int = 0) -> Path:
    """Every other layer with a sliding window; attention logits capped (low, so that it shows)."""
    w = _Writer("gemma2", shape, seed)
    w.attention()
    w.gguf.add_layer_norm_rms_eps(1e-6)
    w.gguf.add_sliding_window(shape.n_swa)
    w.gguf.add_attn_logit_softcapping(2.0)
    w.gguf.add_final_logit_softcapping(30.0)
    w.tied_head()
    for layer in w.layers():
        w.norm(f"{layer}.attn_norm")
        w.qkv(layer)
        w.norm(f"{layer}.post_attention_norm")
        w.norm(f"{layer}.ffn_norm")
        w.ffn(layer)
        w.norm(f"{layer}.post_ffw_norm")
    return w.write(path)


def write_gpt_oss(path: str | os.PathLike[str], shape: Shape = Shape(), seed: int = 0) -> Path:
    """Attention sinks, every other layer with a sliding window, four experts of which two are used."""
    n_expert = 4
    w = _Writer("gpt-oss", shape, seed)
    w.attention()
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_sliding_window(shape.n_swa)
    w.gguf.add_expert_count(n_expert)
    w.gguf.add_expert_used_count(2)
    w.gguf.add_expert_feed_forward_length(shape.n_ff)
    w.head()
    for layer in w.layers():
        w.norm(f"{layer}.attn_norm")
        w.qkv(layer)
        w.vector(f"{layer}.attn_output.bias", shape.n_embd)
        w.vector(f"{layer}.attn_sinks.weight", shape.n_head, mean=2.0, std=1.0)
        w.norm(f"{layer}.post_attention_norm")
        w.vector(f"{layer}.ffn_gate_inp.weight", n_expert, shape.n_embd)
        w.vector(f"{layer}.ffn_gate_inp.bias", n_expert)
        for name, n_out, n_in in (
            ("ffn_gate_exps", shape.n_ff, shape.n_embd),
            ("ffn_up_exps", shape.n_ff, shape.n_embd),
            ("ffn_down_exps", shape.n_embd, shape.n_ff),
        ):
            w.matrix(f"{layer}.{name}", n_expert, n_out, n_in)
            w.vector(f"{layer}.{name}.bias", n_expert, n_out)
    return w.write(path)


def write_mpt(path: str | os.PathLike[str], shape: Shape = Shape(), seed: int = 0) -> Path:
    """ALiBi instead of RoPE: the pass refuses it."""
    w = _Writer("mpt", shape, seed)
    w.attention(rope=False)
    w.gguf.add_layer_norm_eps(1e-5)
    w.gguf.add_max_alibi_bias(8.0)
    w.head()
    for layer in w.layers():
        w.norm(f"{layer}.attn_norm")
        w.matrix(f"{layer}.attn_qkv", shape.n_embd + 2 * shape.n_embd_kv, shape.n_embd)
        w.matrix(f"{layer}.attn_output", shape.n_embd, shape.n_embd)
        w.norm(f"{layer}.ffn_norm")
        w.ffn(layer, gate=False)
    return w.write(path)


def write_qwen2vl(path: str | os.PathLike[str], shape: Shape = Shape(), seed: int = 0) -> Path:
    """Positions with several dimensions (M-RoPE)."""
    w = _Writer("qwen2vl", shape, seed)
    w.attention()
    w.gguf.add_layer_norm_rms_eps(1e-6)
    half = shape.n_embd_head // 2
    w.gguf.add_rope_dimension_sections([half - 2 * (half // 3), half // 3, half // 3, 0])
    w.head()
    for layer in w.layers():
        w.norm(f"{layer}.attn_norm")
        w.qkv(layer)
        w.norm(f"{layer}.ffn_norm")
        w.ffn(layer)
    return w.write(path)


def write_gemma4(path: str | os.PathLike[str], shape: Shape = Shape(n_layer=6), seed: int = 0) -> Path:
    """The last two layers read K and V of the two before; every other layer has a sliding window and smaller heads."""
    w = _Writer("gemma4", shape, seed)
    n_embd_head_swa = shape.n_embd_head // 2
    is_swa = [i % 2 == 0 for i in range(shape.n_layer)]
    n_shared = 2
    w.attention()
    w.gguf.add_layer_norm_rms_eps(1e-6)
    w.gguf.add_sliding_window(shape.n_swa)
    w.gguf.add_sliding_window_pattern(is_swa)
    w.gguf.add_shared_kv_layers(n_shared)
    w.gguf.add_key_length_swa(n_embd_head_swa)
    w.gguf.add_value_length_swa(n_embd_head_swa)
    w.gguf.add_rope_dimension_count_swa(n_embd_head_swa)
    w.gguf.add_rope_freq_base_swa(10000.0)
    w.gguf.add_embedding_length_per_layer_input(0)
    w.gguf.add_final_logit_softcapping(30.0)
    w.tied_head()
    w.vector("rope_freqs.weight", shape.n_embd_head // 2, mean=1.0)
    for i, layer in enumerate(w.layers()):
        n_embd_head = n_embd_head_swa if is_swa[i] else shape.n_embd_head
        w.norm(f"{layer}.attn_norm")
        w.matrix(f"{layer}.attn_q", shape.n_head * n_embd_head, shape.n_embd)
        w.norm(f"{layer}.attn_q_norm", n_embd_head)
        if i < shape.n_layer - n_shared:
            w.matrix(f"{layer}.attn_k", shape.n_head_kv * n_embd_head, shape.n_embd)
            w.matrix(f"{layer}.attn_v", shape.n_head_kv * n_embd_head, shape.n_embd)
            w.norm(f"{layer}.attn_k_norm", n_embd_head)
        w.matrix(f"{layer}.attn_output", shape.n_embd, shape.n_head * n_embd_head)
        w.norm(f"{layer}.post_attention_norm")
        w.norm(f"{layer}.ffn_norm")
        w.ffn(layer)
        w.norm(f"{layer}.post_ffw_norm")
    return w.write(path)


def write_lfm2(path: str | os.PathLike[str], shape: Shape = Shape(n_layer=4), seed: int = 0) -> Path:
    """Hybrid: every other layer a short convolution, whose state is recurrent."""
    n_conv = 3
    w = _Writer("lfm2", shape, seed)
    w.attention(n_head_kv=[0 if i % 2 == 0 else shape.n_head_kv for i in range(shape.n_layer)])
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_shortconv_l_cache(n_conv)
    w.embedding("token_embd", shape.n_vocab)
    w.norm("token_embd_norm")
    w.matrix("output", shape.n_vocab, shape.n_embd)
    for i, layer in enumerate(w.layers()):
        w.norm(f"{layer}.attn_norm")
        if i % 2 == 0:
            w.vector(f"{layer}.shortconv.conv.weight", shape.n_embd, n_conv, std=0.5)
            w.matrix(f"{layer}.shortconv.in_proj", 3 * shape.n_embd, shape.n_embd)
            w.matrix(f"{layer}.shortconv.out_proj", shape.n_embd, shape.n_embd)
        else:
            w.qkv(layer)
            w.norm(f"{layer}.attn_q_norm", shape.n_embd_head)
            w.norm(f"{layer}.attn_k_norm", shape.n_embd_head)
        w.norm(f"{layer}.ffn_norm")
        w.ffn(layer)
    return w.write(path)


def write_mamba(path: str | os.PathLike[str], shape: Shape = Shape(), seed: int = 0) -> Path:
    """Recurrent, without attention: no cells to release."""
    n_inner, n_state, n_conv, n_dt = 2 * shape.n_embd, 16, 4, 8
    w = _Writer("mamba", shape, seed)
    w.gguf.add_feed_forward_length(0)
    w.gguf.add_head_count(0)
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_ssm_conv_kernel(n_conv)
    w.gguf.add_ssm_inner_size(n_inner)
    w.gguf.add_ssm_state_size(n_state)
    w.gguf.add_ssm_time_step_rank(n_dt)
    w.head()
    for layer in w.layers():
        w.norm(f"{layer}.attn_norm")
        w.matrix(f"{layer}.ssm_in", 2 * n_inner, shape.n_embd)
        w.vector(f"{layer}.ssm_conv1d.weight", n_inner, n_conv)
        w.vector(f"{layer}.ssm_conv1d.bias", n_inner)
        w.vector(f"{layer}.ssm_x.weight", n_dt + 2 * n_state, n_inner)
        w.vector(f"{layer}.ssm_dt.weight", n_inner, n_dt)
        w.vector(f"{layer}.ssm_dt.bias", n_inner)
        w.vector(f"{layer}.ssm_a", n_inner, n_state, mean=-1.0)
        w.vector(f"{layer}.ssm_d", n_inner, mean=1.0)
        w.matrix(f"{layer}.ssm_out", shape.n_embd, n_inner)
    return w.write(path)


def write_bert(path: str | os.PathLike[str], shape: Shape = Shape(), seed: int = 0) -> Path:
    """An encoder: attention to both sides and no cache. Heads are not grouped."""
    shape = replace(shape, n_head_kv=shape.n_head, n_ctx=min(shape.n_ctx, 512))
    w = _Writer("bert", shape, seed)
    w.attention(rope=False)
    w.gguf.add_layer_norm_eps(1e-12)
    w.gguf.add_causal_attention(False)
    w.gguf.add_pooling_type(gguf.PoolingType.MEAN)
    w.gguf.add_token_type_count(2)
    w.embedding("token_embd", shape.n_vocab)
    w.embedding("token_types", 2)
    w.vector("position_embd.weight", shape.n_ctx, shape.n_embd)
    w.norm("token_embd_norm", bias=True)
    for layer in w.layers():
        w.qkv(layer)
        w.norm(f"{layer}.attn_output_norm", bias=True)
        w.ffn(layer, gate=False)
        w.norm(f"{layer}.layer_output_norm", bias=True)
    return w.write(path)


WRITERS: dict[str, Callable[..., Path]] = {
    "llama": write_llama,
    "gemma3": write_gemma3,
    "gemma2": write_gemma2,
    "gpt-oss": write_gpt_oss,
    "gemma4": write_gemma4,
    "lfm2": write_lfm2,
    "qwen2vl": write_qwen2vl,
    "mpt": write_mpt,
    "mamba": write_mamba,
    "bert": write_bert,
}
