"""``snapkv plan``: its figures are those of contexts that were allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from allocated import allocated
from typer.testing import CliRunner

from snapkv_gguf import Llama, SnapKV, bench, cli, plan, tiny
from snapkv_gguf.config import ggml_type
from snapkv_gguf.plan import Engine, Limits, Planner, Sizes
from snapkv_gguf.prompt import context_size

pytestmark = pytest.mark.usefixtures("library")

SETTINGS = SnapKV(budget=64, chunk=100, window=8)
MIB = 2**20


def snapkv(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def planned(*arguments: str | Path) -> Any:
    result = snapkv("plan", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def unboxed(text: str) -> str:
    return "".join(text.replace("│", "").split())


def write(arch: str, folder: Path) -> Path:
    # heads of the sliding-window layers of gemma4 are half as wide, and quantized in blocks of 32
    shapes = {"gemma4": (tiny.Shape(n_layer=6, n_embd_head=64),)}
    return tiny.WRITERS[arch](folder / "m.gguf", *shapes.get(arch, ()))


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gemma2", "gpt-oss", "gemma4", "lfm2", "qwen2vl", "mpt", "mamba"])
def test_sizes_are_those_of_real_contexts(arch: str, tmp_path: Path) -> None:
    path = write(arch, tmp_path)
    for engine in (
        Engine(n_batch=256, n_ubatch=128),
        Engine(n_seq=3, n_ubatch=64, swa_full=False),
        Engine(flash_attn=False, n_batch=256),
    ):
        with Planner(path, engine) as planner:
            for types in (("f16", "f16"), ("q8_0", "q4_0" if engine.flash_attn else "f16")):
                for cells in (256, 2048):
                    sizes = planner.sizes(cells, types)
                    real = allocated(path, cells, engine, types)
                    assert [sizes.weights, sizes.kv, sizes.compute] == real, (engine, types, cells)
                    assert (sizes.ring, sizes.scratch) == (0, 0)
                    assert sizes.total == sum(real) + 4 * 320 * engine.n_seq
                    assert sizes.in_ram == sizes.total


def test_figures_by_hand(tmp_path: Path) -> None:
    # two layers, two KV heads of 32, K and V; a block of 32 takes 34 bytes as q8_0 and 18 as q4_0
    llama = tiny.write_llama(tmp_path / "llama.gguf")
    with Planner(llama) as planner:
        assert planner.n_ctx_train == 8192
        for types, row in ((("f16", "f16"), 128), (("q8_0", "q8_0"), 68), (("q8_0", "q4_0"), 52), (("f32",) * 2, 256)):
            assert planner.sizes(1024, types).kv == 1024 * 2 * 2 * row
            assert planner.reads(types) == plan.Reads(full=4 * row, sliding=0, n_swa=0, state=0)
        # (window + 16) rows and one for what is not kept, of four heads, in two layers
        assert planner.sizes(1024, ("f16", "f16"), SETTINGS).ring == (8 + 16 + 1) * 4 * 32 * 4 * 2
    # one full layer and five with a window of 64: 64 + 512 cells or, at full size, as many as the full one
    gemma3 = tiny.write_gemma3(tmp_path / "gemma3.gguf")
    for swa_full, cells_swa in ((True, 4096), (False, 768)):
        with Planner(gemma3, Engine(swa_full=swa_full)) as planner:
            assert planner.sizes(4096, ("f16", "f16")).kv == (4096 + 5 * cells_swa) * 256
            reads = planner.reads(("f16", "f16"))
            assert reads == plan.Reads(full=256, sliding=5 * 256, n_swa=64, state=0)
            assert reads.of(1000, 4000) == 1000 * 256 + 5 * 256 * 64
            assert reads.of(10, 10) == 10 * 6 * 256
    # two layers of each kind; a convolution keeps two inputs of the model's width, as F32
    with Planner(tiny.write_lfm2(tmp_path / "lfm2.gguf"), Engine(n_seq=2)) as planner:
        assert planner.reads(("f16", "f16")) == plan.Reads(full=2 * 256, sliding=0, n_swa=0, state=2 * 2 * 128 * 4)
        assert planner.sizes(512, ("f16", "f16")).kv == 2 * (512 * 2 * 256 + 2 * 2 * 128 * 4)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gemma4", "lfm2"])
def test_with_snapkv_as_an_instance_of_llama(arch: str, tmp_path: Path) -> None:
    from snapkv_gguf import _capi

    path = write(arch, tmp_path)
    options = {"flash_attn": True, "type_k": ggml_type("q8_0"), "type_v": ggml_type("q4_0"), "use_mmap": False}
    llm = Llama(str(path), n_ctx=512, snapkv=SETTINGS, verbose=False, **options)
    with Planner(path) as planner:
        sizes = planner.sizes(512, ("q8_0", "q4_0"), SETTINGS)
        reads = planner.reads(("q8_0", "q4_0"))
    assert [sizes.weights, sizes.kv, sizes.compute] == [sum(p[i] for p in plan.breakdown(llm.ctx)) for i in (1, 2, 3)]
    assert sizes.ring == _capi.ring_size(llm.ctx) > 0
    assert reads.full == bench.bytes_per_cell(llm)
    # a pass stays within what was set aside for it
    llm.eval([1] + [(7 * i) % 300 for i in range(1500)])
    grown = sum(part[3] for part in plan.breakdown(llm.ctx)) - sizes.compute
    assert grown <= sizes.scratch == 64 * MIB
    llm.close()


def test_what_fits_and_what_does_not(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf")
    rows = planned("-m", path, "--types", "f16", "--memory", "1G")["rows"]
    assert [row["cells"] for row in rows] == [8192, 1280, 2304, 3328, 6400]
    assert [(row["fits"], row["holds"], row["max_tokens"]) for row in rows] == [(True, "yes", 8192)] * 5
    for i, row in enumerate(rows):
        exact = planned("-m", path, "--types", "f16", "--memory", str(row["total_bytes"]))["rows"][i]
        assert exact["fits"]
        short = planned("-m", path, "--types", "f16", "--memory", str(row["total_bytes"] - 1))["rows"][i]
        assert not short["fits"]
        assert short["holds"] == "no"
        if i > 0:
            assert (short["max_cells"], short["max_tokens"]) == (0, 0)
    # the most that fit: no more than that
    few = planned("-m", path, "--types", "f16", "--memory", "4M")["rows"][0]
    with Planner(path) as planner:
        assert 0 < few["max_cells"] == few["max_tokens"] < 8192
        assert planner.sizes(few["max_cells"], ("f16", "f16")).total <= 4 * MIB
        assert planner.sizes(few["max_cells"] + 256, ("f16", "f16")).total > 4 * MIB
    nothing = planned("-m", path, "--types", "f16", "--memory", "1M")["rows"]
    assert {(row["fits"], row["max_cells"]) for row in nothing} == {(False, 0)}
    assert not Limits(10, 10, (), True).hold(Sizes(5, 5, 5, 0, 0, 0, in_ram=4))
    assert Limits(11, 4, (), True).hold(Sizes(5, 5, 5, 0, 0, 0, in_ram=4))


def test_a_wanted_length(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf")
    wide = ("-m", path, "--types", "f16", "--memory", "1G", "--budgets", "64+100")
    longer = planned(*wide, "--ctx", "20000")
    assert [row["holds"] for row in longer["rows"]] == ["no", "packed"]
    assert [row["cells"] for row in longer["rows"]] == [context_size(20000), 256]
    assert [row["max_tokens"] for row in longer["rows"]] == [8192, 8192]
    assert [row["read_bytes"] for row in longer["rows"]] == [20000 * 512, 64 * 512]
    assert [row["holds"] for row in planned(*wide, "--ctx", "8192")["rows"]] == ["yes", "yes"]
    shorter = planned(*wide, "--ctx", "50")
    assert [row["read_bytes"] for row in shorter["rows"]] == [50 * 512, 50 * 512]
    assert shorter["rows"][0]["cells"] == 256
    # positions with several dimensions cannot be packed
    qwen = tiny.write_qwen2vl(tmp_path / "q.gguf")
    found = planned("-m", qwen, "--memory", "1G", "--ctx", "20000")
    assert found["packed"] is False
    assert {row["holds"] for row in found["rows"]} == {"no"}


def test_sequences(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf")
    arguments = ("-m", path, "--types", "f16", "--memory", "1G", "--budgets", "64+100", "--ctx", "1000")
    one, four = planned(*arguments)["rows"], planned(*arguments, "-np", "4")["rows"]
    for alone, together in zip(one, four, strict=True):
        assert together["cells"] == alone["cells"]
        assert together["kv_bytes"] == 4 * alone["kv_bytes"]
        assert together["read_bytes"] == alone["read_bytes"]
    row = 4 * 32 * 4 * 2  # four heads, two layers
    assert (one[1]["ring_bytes"], four[1]["ring_bytes"]) == ((32 + 1) * row, (4 * 32 + 1) * row)
    table = snapkv("plan", *arguments, "-np", "4", "--markdown").stdout
    assert "4 x 1024" in table
    assert "holds 1000" in table


def test_table(model_path: Path) -> None:
    assert snapkv("plan", "--help").exit_code == 0
    result = snapkv("plan", "-m", model_path, "--memory", "1.5G", "--markdown")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("llama.gguf, trained for 8192 tokens, weights ")
    assert lines[0].endswith("; RAM: 1.50 GiB given")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0] == ["cache", "K, V", "cells", "KV cache", "in all", "fits", "prompt + answer", "read per token"]
    assert len(rows) == 2 + 3 * 5
    assert rows[2][:4] == ["full", "f16", "8192", "4.0 MiB"]
    assert rows[8][:4] == ["1024 + 1024", "f16", "2304", "1.1 MiB"]
    assert rows[8][5:] == ["yes", "8192, packed any", "0.5 MiB (12%)"]
    assert {row[1] for row in rows[2:]} == {"f16", "q8_0", "q4_0"}
    assert snapkv("plan", "-m", model_path).stdout.splitlines()[0].endswith(" free")


def test_models_that_cannot_be_compacted(tmp_path: Path) -> None:
    for arch, told in (("mpt", "ALiBi"), ("mamba", "recurrent")):
        path = write(arch, tmp_path)
        found = planned("-m", path)
        assert found["supported"] is False
        assert told in found["status"]
        assert {row["cache"] for row in found["rows"]} == {"full"}
        assert told in snapkv("plan", "-m", path).stdout
    bert = snapkv("plan", "-m", tiny.write_bert(tmp_path / "b.gguf"))
    assert (bert.exit_code, bert.stdout) == (1, "")
    assert "has no KV cache" in bert.stderr


def test_cache_types_that_the_model_does_not_take(tmp_path: Path) -> None:
    odd = tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_embd_head=24, n_head=4))
    found = planned("-m", odd)
    assert {row["type_k"] for row in found["rows"]} == {"f16"}
    assert found["refused_types"] == [{"type_k": name, "type_v": name} for name in ("q8_0", "q4_0")]
    assert "q8_0/q8_0: llama.cpp makes no context" in snapkv("plan", "-m", odd).stdout
    refused = snapkv("plan", "-m", odd, "--types", "q8_0")
    assert refused.exit_code == 1
    assert "makes no context with these cache types; try f16 (llama.cpp: " in refused.stderr
    assert "does not divide" in refused.stderr
    # no quantized V without flash attention
    plain = planned("-m", tiny.write_llama(tmp_path / "l.gguf"), "--no-flash-attn")
    assert [(row["type_k"], row["type_v"]) for row in plain["rows"][:3]] == [
        ("f16", "f16"),
        ("q8_0", "f16"),
        ("q4_0", "f16"),
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--memory", "lots"], "--memory 'lots': must be a size, such as 512M"),
        (["--memory", "0"], "--memory '0': must be a size"),
        (["--memory", "-5G"], "--memory '-5G': must be a size"),
        (["--types", "q9"], "--types 'q9': must be one of f32"),
        (["--types", "f16/q8"], "--types 'q8': must be one of f32"),
        (["--types", "q8_0", "--no-flash-attn"], "needs flash attention"),
        (["--budgets", "1024"], "--budgets '1024': must be budget + chunk in cells"),
        (["--budgets", "1024+1024,a+b"], "--budgets 'a+b': must be"),
        (["--budgets", "8+100"], "--budgets '8+100': budget=8: must be more than window=16"),
        (["--budgets", "100+0"], "chunk=0: must be between 1"),
        (["--ctx", "5000000000"], "1073741824"),
        (["--parallel", "1000"], "256"),
        (["--probe", "5000"], "4096"),
        (["-W", "5000"], "4096"),
    ],
)
def test_wrong_usage(arguments: list[str], told: str, model_path: Path) -> None:
    result = snapkv("plan", "-m", model_path, *arguments)
    assert result.exit_code == 2
    assert unboxed(told) in unboxed(result.stderr)


def test_errors_are_one_line(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    for arguments, told in (
        (["-m", tmp_path / "missing.gguf"], "no such model file"),
        (["-m", tmp_path / "text.gguf"], "Failed to load model from file"),
        (["-m", model_path, "--ctx", "1000000000"], "lower --ctx, the budgets or --parallel"),
        (["-m", model_path, "--budgets", "16777216+16777216"], "lower --ctx, the budgets or --parallel"),
    ):
        result = snapkv("plan", *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert told in result.stderr
        assert result.stderr.startswith("snapkv: ")
        assert result.stderr.count("\n") == 1


def test_free_ram(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n")
    assert plan.free_ram(tmp_path, meminfo) == 8000000 << 10
    # a container: what it uses, but for files in the page cache, is not free
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 500000\n")
    assert plan.free_ram(tmp_path, meminfo) == 8000000 << 10
    (tmp_path / "memory.max").write_text("3000000\n")
    assert plan.free_ram(tmp_path, meminfo) == 2000000
    (tmp_path / "memory.max").write_text("900000\n")
    assert plan.free_ram(tmp_path, meminfo) == 0
    assert plan.free_ram(tmp_path, tmp_path / "nothing") > 2**30
