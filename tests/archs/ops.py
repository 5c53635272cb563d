"""Which operations the graphs of the pass hold, and what upstream's support tables say about them for each backend."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
from engine import CACHE_TYPES, Engine, params, random_tokens
from ggml_tensor import Tensor
from models import ROOT

from snapkv_gguf import tiny
from snapkv_gguf._capi import Status

BACKENDS = ("CUDA", "Metal", "Vulkan")

# they move no data
_FREE = {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}

N = 120


def used(folder: Path) -> set[tuple[str, str]]:
    """Operations and the regular expression of their parameters in the tables, of all kinds of caches and models."""
    shape = tiny.Shape(n_embd_head=64)
    llama = tiny.write_llama(folder / "llama.gguf", shape)
    odd = tiny.write_llama(folder / "odd.gguf", tiny.Shape(n_embd_head=32))  # heads that are no whole words
    found: set[tuple[str, str]] = set()
    for kind in CACHE_TYPES:
        found |= of_pass(llama, type_k=kind, type_v=kind)
        found |= of_pass(odd, type_k=kind, type_v=kind)
    for kind in ("f32", "f16", "bf16"):
        found |= of_pass(llama, type_k=kind, type_v=kind, flash_attn=False)  # the transposed V
    found |= of_pass(tiny.write_gpt_oss(folder / "gpt-oss.gguf", shape))
    found |= of_pass(tiny.write_gemma2(folder / "gemma2.gguf", shape))
    found |= of_pass(tiny.write_gemma4(folder / "gemma4.gguf", tiny.Shape(n_layer=6, n_embd_head=64)))
    return found


def of_pass(path: Path, **options: object) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()

    def on_node(node: Tensor) -> None:
        if node.op_name() not in _FREE:
            found.add((node.op_name(), pattern(node)))

    with Engine(path, params(64, 16), n_ctx=256, on_node=on_node, **options) as engine:
        engine.decode(random_tokens(N, 320))
        found.clear()  # the model's own
        status, _ = engine.compact()
        assert status is Status.OK
    return found


def pattern(node: Tensor) -> str:
    """The class of the node: types, and what of its shape the backends treat differently."""
    sources = node.sources()
    types = [gguf.GGMLQuantizationType(source.type).name.lower() for source in sources]
    out = gguf.GGMLQuantizationType(node.type).name.lower()
    name = node.op_name()
    if name == "GET_ROWS":
        return rf"type={types[0]},.*v=0"
    if name == "SET_ROWS":
        index = types[1]
        return rf"(type={out}|type_src={types[0]},type_dst={out}),type_idx={index},.*v=0"
    if name == "MUL_MAT":
        assert sources[0].ne[3] == sources[1].ne[3] == 1
        return rf"type_a={types[0]},type_b={types[1]},.*nr=\[\d+,1\],"
    if name == "SOFT_MAX":
        assert len(sources) < 3 or not sources[1]
        return rf"type={types[0]},.*mask=0,sinks={int(len(sources) > 1)},"
    if name == "CPY":
        return rf"type_src={types[0]},type_dst={out},.*permute_src=\[0,0,0,0\],permute_dst=\[0,0,0,0\]"
    if name == "ADD":
        return rf"type={types[0]},(?!.*perm1=1)"
    if name == "TANH":
        return rf"type={types[0]},.*v=0"
    return rf"type={out},"


def types_of(pattern: str) -> str:
    """A short name of a class for the table."""
    if found := re.search(r"type_a=(\w+),type_b=(\w+)", pattern):
        return f"{found[1]} and {found[2]}"
    if found := re.search(r"type_src=(\w+),type_dst=(\w+)", pattern):
        return f"{found[1]} to {found[2]}"
    found = re.search(r"type=(\w+)", pattern)
    assert found
    return found[1] + (" with sinks" if "sinks=1" in pattern else "")


def support(backend: str) -> Iterator[tuple[str, str, bool]]:
    """Operation, parameters, and whether the backend runs it, from the table in llama.cpp's documentation."""
    table = ROOT / f"vendor/llama.cpp/docs/ops/{backend}.csv"
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            yield row["op_name"], row["op_params"], row["supported"] == "1"


def verdicts(found: set[tuple[str, str]]) -> dict[tuple[str, str], dict[str, str]]:
    """For each operation and backend: yes, no, some of the tested shapes, or not tested."""
    result: dict[tuple[str, str], dict[str, str]] = {key: {} for key in sorted(found)}
    for backend in BACKENDS:
        rows = list(support(backend))
        for op, regex in result:
            hits = {ok for name, text, ok in rows if name == op and re.match(regex, text)}
            result[op, regex][backend] = {
                frozenset(): "not tested",
                frozenset({True}): "yes",
                frozenset({False}): "no",
                frozenset({True, False}): "some shapes",
            }[frozenset(hits)]
    return result
