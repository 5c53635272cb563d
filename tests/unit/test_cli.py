from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from snapkv_gguf import SnapKV, __version__, answer, cli, models, tiny

TEXT = "The quick brown fox jumps over the lazy dog. " * 10
SETTINGS = ["--budget", "64", "--window", "8", "--kernel", "5", "-t", "1"]

pytestmark = pytest.mark.usefixtures("library")


def snapkv(*arguments: str | Path, stdin: str | None = None) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def unboxed(text: str) -> str:
    """Without the boxes that usage errors come in, nor the spaces where they break lines."""
    return "".join(text.replace("│", "").split())


def test_version_and_help() -> None:
    assert snapkv("--version").output.strip() == __version__
    for command in ("run", "demo", "info", "plan", "bench", "bench-chunks", "eval"):
        assert snapkv(command, "--help").exit_code == 0


def test_run_as_json(model_path: Path) -> None:
    result = snapkv("run", "-m", model_path, "-p", TEXT, "-n", "5", "--json", *SETTINGS)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["settings"]["budget"] == 64
    assert found["stats"]["cells_after"] == found["kv_cells"] == 64
    assert found["prompt_tokens"] == found["stats"]["prompt_tokens"] == len(TEXT) + 1
    assert found["prefill_seconds"] > 0
    full = json.loads(snapkv("run", "-m", model_path, "-p", TEXT, "-n", "5", "--json", "--no-snapkv").stdout)
    assert full["stats"] is full["settings"] is None
    assert full["kv_cells"] == len(TEXT) + 1


def test_run_streams_and_tells(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    results = [
        snapkv("run", "-m", model_path, "-f", tmp_path / "text", "-q", "And?", "-n", "20", *SETTINGS),
        snapkv("run", "-m", model_path, "-f", "-", "-q", "And?", "-n", "20", *SETTINGS, stdin=TEXT),
        snapkv("run", "-m", model_path, "-p", f"{TEXT}\n\nAnd?", "-n", "20", *SETTINGS),
    ]
    assert [result.exit_code for result in results] == [0, 0, 0]
    assert len({result.stdout for result in results}) == 1
    assert results[0].stdout.strip()
    assert f"{len(TEXT) + 7} prompt tokens in" in results[0].stderr
    assert "64 KV cells" in results[0].stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-B", "8"], "budget=8: must be more than"),
        (["-B", "many"], "'many': must be cells"),
        (["--kernel", "4"], "kernel=4"),
        (["--pool", "mean"], "pool='mean'"),
        (["--recent", "1.5"], "recent=1.5"),
        (["--type-k", "q9"], "--type-k 'q9': must be one of"),
        (["--no-flash-attn", "--type-v", "q8_0"], "needs flash attention"),
        (["-p", " "], "the prompt is empty"),
        (["-f", "x"], "not both"),
        (["-W", "100000"], "4096"),
        (["-c", "4294967296"], "1073741824"),
        (["-n", "5000000000"], "1073741824"),
        (["-b", "4294967297"], "1073741824"),
        (["-ub", "4294967297"], "1073741824"),
        (["--ngl", "4294967296"], "2147483647"),
        (["--seed", "4294967296"], "4294967295"),
        (["--paper", "-W", "16"], "--paper sets --window itself"),
        (["--paper", "--recent", "0", "--kernel", "21", "--pool", "max"], "--paper sets --kernel, --pool, --recent"),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_usage(arguments: list[str], told: str, model_path: Path) -> None:
    result = snapkv("run", "-m", model_path, "-p", TEXT, *arguments)
    assert result.exit_code == 2
    assert unboxed(told) in unboxed(result.stderr)


def test_paper(model_path: Path) -> None:
    result = snapkv("run", "-m", model_path, "-p", TEXT, "-n", "2", "--json", "--paper", "-B", "64")
    assert json.loads(result.stdout)["settings"] == vars(SnapKV.paper(64))
    for command in ("demo", "bench"):
        refused = snapkv(command, "-m", model_path, "--paper", "--pool", "max")
        assert refused.exit_code == 2
        assert unboxed("--paper sets --pool itself") in unboxed(refused.stderr)


def test_a_prompt_longer_than_the_model_was_trained_for(tmp_path: Path) -> None:
    short = tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_ctx=256))
    told = "snapkv: warning: the prompt has 451 tokens, the model was trained for 256"
    result = snapkv("run", "-m", short, "-p", TEXT, "-n", "2", *SETTINGS)
    assert result.exit_code == 0, result.output
    assert [line.startswith(told) for line in result.stderr.splitlines()] == [True, False]
    assert "warning" not in snapkv("run", "-m", short, "-p", TEXT[:200], "-n", "2", *SETTINGS).stderr
    demo = snapkv("demo", "-m", short, "--tokens", "400", "--json", *SETTINGS)
    assert demo.exit_code == 0, demo.output
    assert demo.stderr.count("the model was trained for 256") == 1


@pytest.mark.parametrize("arguments", [[], ["--probe", "8"], ["--probe", "quick fox?"], ["--positions", "packed"]])
def test_a_prompt_longer_than_the_cells(model_path: Path, arguments: list[str]) -> None:
    result = snapkv(
        "run", "-m", model_path, "-p", 4 * TEXT, "-q", "Why?", "-n", "9", "--json", "--cells", "200", "--chunk", "64",
        *SETTINGS, *arguments,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["prompt_tokens"] > 4 * len(TEXT)
    assert found["stats"]["chunk_passes"] > 5
    assert found["settings"]["chunk"] == 64
    assert found["kv_cells"] == 64


def test_cells_that_do_not_do(model_path: Path, tmp_path: Path) -> None:
    short = tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_ctx=256))
    for arguments, told in (
        (["-m", model_path, "--cells", "200", "-c", "300"], "not both"),
        (["-m", model_path, "--cells", "200", "--no-snapkv"], "--cells needs SnapKV"),
        (["-m", model_path, "--chunk", "64"], "--chunk: only with --cells"),
        (["-m", model_path, "--cells", "200", "-B", "250"], "--cells 256: must be more cells than the budget of 250"),
        (["-m", model_path, "--cells", "200", "-q", "Why? " * 60], "tokens of the probe together, such as"),
        (["-m", model_path, "--cells", "200", "--kernel", "61"], "kernel=61 is wider than the 57 cells"),
        (["-m", model_path, "--cells", "200", "--probe", "-5"], "probe=-5: must be between 0"),
        (["-m", model_path, "--cells", "200", "--probe", "3.5"], "--probe '3.5': must be a whole number"),
        (["-m", model_path, "--cells", "200", "--probe", ""], "probe='': must be a text, or a number"),
        (["-m", short, "--cells", "200"], "the model was trained for 256: --positions packed reads it"),
    ):
        result = snapkv("run", "-p", TEXT, *SETTINGS, *arguments)
        assert result.exit_code == 2, result.output
        assert unboxed(told) in unboxed(result.stderr)


def test_prompts_must_be_utf_8(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"hello \xff world")
    run = [sys.executable, "-m", "snapkv_gguf.cli", "run", "-m", model_path, "-n", "2", *SETTINGS]
    for arguments, stdin, told in (
        (["-f", tmp_path / "text"], b"", f"{tmp_path / 'text'}: must be UTF-8"),
        (["-f", "-"], b"a\xffb", "standard input: must be UTF-8"),
        (["-p", b"a\xffb"], b"", "--prompt: must be UTF-8"),
        (["-p", "a", "-q", b"\xff"], b"", "--question: must be UTF-8"),
    ):
        result = subprocess.run([*run, *arguments], input=stdin, capture_output=True)
        assert result.returncode == 1
        assert result.stderr.decode().startswith(f"snapkv: {told}")
        assert result.stderr.count(b"\n") == 1
    # whatever the locale
    posix = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run([*run, "--json", "-f", "-"], input="gr\u00fcn".encode(), capture_output=True, env=posix)
    assert json.loads(result.stdout)["prompt_tokens"] == 1 + 5, result.stderr


def test_errors_are_one_line(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    mpt = tiny.write_mpt(tmp_path / "mpt.gguf")
    for arguments, told in (
        (["-m", tmp_path / "missing.gguf", "-p", "x"], "no such model file"),
        (["-m", "gpt5", "-p", "x"], "unknown model 'gpt5'"),
        (["-m", tmp_path / "text.gguf", "-p", "x"], "Failed to load model from file"),
        (["-m", mpt, "-p", "x"], "UNSUPPORTED_ALIBI); pass snapkv=False (--no-snapkv)"),
        (["-m", model_path, "-f", tmp_path / "nothing"], "No such file"),
        (["-m", model_path, "-p", TEXT, "-c", "256"], "exceed context window of 256"),
    ):
        result = snapkv("run", *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert told in result.stderr
        assert result.stderr.startswith("snapkv: ")
        assert result.stderr.count("\n") == 1
    assert snapkv("run", "-m", mpt, "-p", "x", "-n", "2", "--no-snapkv").exit_code == 0
    monkeypatch.setattr(models, "resolve_model", lambda _: 1 / 0)
    assert isinstance(snapkv("--debug", "run", "-m", "x.gguf", "-p", "x").exception, ZeroDivisionError)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (MemoryError, 1)])
def test_interruptions(
    error: type[BaseException], code: int, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(answer, "ask", stop)
    result = snapkv("run", "-m", model_path, "-p", TEXT)
    assert result.exit_code == code
    assert "Traceback" not in result.output


# Ctrl-C in the n-th call of the function that llama.cpp logs to, 0 for never
INTERRUPTED = """
import signal, sys
from snapkv_gguf import cli

def profile(frame, event, argument):
    global at
    if event == "call" and frame.f_code.co_name in ("_collect", "llama_log_callback"):
        at -= 1
        if at == 0:
            signal.raise_signal(signal.SIGINT)

at = int(sys.argv.pop(1))
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it would be ignored
if at:
    sys.setprofile(profile)
print("ready", flush=True)
cli.main()
"""


@pytest.mark.parametrize("debug", [False, True])
def test_ctrl_c_while_llama_logs(debug: bool, model_path: Path) -> None:
    arguments = [*(["--debug"] if debug else []), "run", "-m", str(model_path), "-p", TEXT, *SETTINGS]
    for at in ("1", "40", "100"):
        result = subprocess.run([sys.executable, "-c", INTERRUPTED, at, *arguments], capture_output=True)
        assert (at, result.returncode) == (at, 130)
        assert b"Traceback" not in result.stderr
        assert b"tokens decoded" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one process")
@pytest.mark.parametrize("delay", [0.0, 0.2, 0.4, 0.5, 0.6, 0.7])
def test_ctrl_c_at_any_time(delay: float, model_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, "0", "run", "-m", str(model_path), "-p", TEXT * 10, *SETTINGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 or b"tokens decoded" in errors


def test_ctrl_c_is_left_to_who_handles_it(model_path: Path) -> None:
    def handler(*_: Any) -> None:
        pass

    for expected in (signal.SIG_IGN, handler, signal.default_int_handler):
        before = signal.signal(signal.SIGINT, expected)
        try:
            assert snapkv("run", "-m", model_path, "-p", "a", "-n", "1", *SETTINGS).exit_code == 0
            assert signal.getsignal(signal.SIGINT) is expected
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_closed_streams(model_path: Path) -> None:
    run = [sys.executable, "-m", "snapkv_gguf.cli", "run", "-m", model_path, "-n", "2", *SETTINGS]
    for redirection, arguments, code, told in (
        (">&-", ["-p", TEXT], 1, "snapkv: standard output is closed\n"),
        ("<&-", ["-f", "-"], 1, "snapkv: standard input is closed\n"),
        ("2>&-", ["-p", TEXT], 0, ""),
    ):
        script = f'exec "$@" {redirection}'
        result = subprocess.run(["sh", "-c", script, "sh", *run, *arguments], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (code, told)


def test_a_reader_that_goes_away(model_path: Path) -> None:
    code = "from snapkv_gguf.cli import main; main()"
    arguments = ["run", "-m", str(model_path), "-p", TEXT, "-n", "300", *SETTINGS]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate()
    assert process.returncode == 141
    assert errors == b""


def test_demo(model_path: Path, tmp_path: Path) -> None:
    result = snapkv("demo", "-m", model_path, "--tokens", "600", "--json", *SETTINGS)
    assert result.exit_code == 0, result.output
    answers = json.loads(result.stdout)
    full, compacted = answers["full cache"], answers["SnapKV"]
    assert full["prompt_tokens"] == full["kv_cells"] == compacted["prompt_tokens"]
    assert compacted["kv_cells"] == 64
    # two layers, two KV heads, K and V of 32 in f16
    assert compacted["kv_bytes"] == 64 * 2 * 2 * 2 * 32 * 2
    table = snapkv("demo", "-m", model_path, "--tokens", "600", *SETTINGS)
    assert table.exit_code == 0
    for row in ("answer", "prefill", "compaction", "decode", "KV cells in use", "KV cache in use"):
        assert row in table.stdout
    assert "compacted layers" not in table.stdout
    swa = snapkv("demo", "-m", tiny.write_gemma3(tmp_path / "m.gguf"), "--tokens", "600", *SETTINGS)
    assert "KV cache in use (compacted layers)" in swa.stdout


def test_info(model_path: Path, tmp_path: Path) -> None:
    from snapkv_gguf import _lib

    facts = json.loads(snapkv("info", "-m", model_path, "--json").stdout)
    assert facts["llama_cpp_python"] == _lib.LLAMA_CPP_PYTHON
    assert "TAG_SNAPKV" in facts["build"]
    pin = (Path(__file__).parents[2] / "vendor" / "llama.cpp.toml").read_text()
    assert len(facts["llama_cpp_commit"]) == 40
    assert f'"{facts["llama_cpp_commit"]}"' in pin
    assert facts["llama_cpp_commit"] in snapkv("info").stdout
    wide = snapkv("info", "-m", model_path, "-W", "100000")
    assert wide.exit_code == 2
    assert "4096" in wide.stderr
    assert "CPU" in facts["backends"]
    assert facts["devices"][0]["name"]
    assert facts["model"]["supported"] is True
    assert facts["model"]["compacted_layers"] == [0, 1]
    assert facts["model"]["ring_bytes"] >= SnapKV().window * 2 * 4 * 32 * 4
    mamba = tiny.write_mamba(tmp_path / "m.gguf")
    refused = json.loads(snapkv("info", "-m", mamba, "--json").stdout)["model"]
    assert refused["supported"] is False
    assert "recurrent" in refused["status"]
    assert str(_lib.lib_dir()) in "".join(snapkv("info").stdout.split())


def test_bench(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", tmp_path / "b.json", "--plot", tmp_path / "b.png"]
    result = snapkv("bench", "-m", model_path, "--depths", "200,300", "-r", "2", "-n", "8", *files, *SETTINGS)
    assert result.exit_code == 0, result.output
    assert "compacted : full" in result.stdout
    document = json.loads((tmp_path / "b.json").read_text())
    assert [depth["prompt_tokens"] for depth in document["results"]] == [200, 300]
    for depth in document["results"]:
        assert (depth["cells_before"], depth["cells_after"]) == (depth["prompt_tokens"], 64)
        assert depth["bytes_after"] == 64 * 512
        assert depth["speedup"] > 0
        assert len(depth["samples"]["prefill_on_s"]) == 2
    assert document["settings"]["budget"] == 64
    assert document["system"]["build"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    nowhere = snapkv("bench", "-m", model_path, "--json", tmp_path / "missing" / "b.json")
    assert nowhere.exit_code == 2
    assert "nosuchdirectory" in unboxed(nowhere.stderr)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "--plot needs matplotlib" in snapkv("bench", "-m", model_path, "--plot", tmp_path / "b.png").stderr
    tiny_depth = (
        "--depths",
        "20",
        "-B",
        "18",
        "-W",
        "16",
        "--recent",
        "0",
        "--kernel",
        "1",
        "-n",
        "8",
        "-r",
        "1",
        "-t",
        "1",
    )
    assert snapkv("bench", "-m", model_path, *tiny_depth).exit_code == 0
    too_short = snapkv("bench", "-m", model_path, "--depths", "64", *SETTINGS)
    assert "depth 64 is within the budget of 64 cells" in too_short.stderr


def test_bench_chunks(model_path: Path, tmp_path: Path) -> None:
    def bench_chunks(*arguments: str | Path) -> Any:
        return snapkv(
            "bench-chunks", "-m", model_path, "--cells", "256", "--chunk", "64", "-r", "2", *SETTINGS, *arguments
        )

    pytest.importorskip("matplotlib")
    file, image = tmp_path / "b.json", tmp_path / "b.png"
    result = bench_chunks("--lengths", "200,600,1200", "--full-up-to", "600", "--json", file, "--plot", image)
    assert result.exit_code == 0, result.output
    assert "prefill in 256 cells" in result.stdout
    document = json.loads(file.read_text())
    assert image.read_bytes().startswith(b"\x89PNG")
    assert document["cells"] == 256
    assert document["settings"]["chunk"] == 64
    short, middle, long = document["results"]
    assert [r["prompt_tokens"] for r in document["results"]] == [200, 600, 1200]
    assert short["passes"] == 0
    assert long["passes"] > middle["passes"] > 0
    assert short["pass_share"] == 0 < long["pass_share"] < 1
    assert (long["seconds_full"], long["peak_bytes_full"], long["speedup"]) == (None, None, None)
    for r in (short, middle):
        full, chunks = r["samples"]["full_seconds"], r["samples"]["chunks_seconds"]
        assert len(full) == len(chunks) == 2
        assert r["speedup"] == pytest.approx(sum(a / b for a, b in zip(full, chunks, strict=True)) / 2)
        assert r["peak_bytes"] > 2**20
    beyond = bench_chunks("--lengths", "300,9000", "-r", "100000")  # before anything is measured
    assert beyond.exit_code == 1
    assert unboxed("snapkv: 9000 tokens: the model reads 8192 in true positions") in unboxed(beyond.stderr)
    assert bench_chunks("--lengths", "9000", "--full-up-to", "0", "--positions", "packed").exit_code == 0
