from __future__ import annotations

import json
import subprocess
import sys
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
    for command in ("run", "demo", "info", "bench", "quality"):
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
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_usage(arguments: list[str], told: str, model_path: Path) -> None:
    result = snapkv("run", "-m", model_path, "-p", TEXT, *arguments)
    assert result.exit_code == 2
    assert unboxed(told) in unboxed(result.stderr)


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


def test_demo(model_path: Path) -> None:
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


def test_info(model_path: Path, tmp_path: Path) -> None:
    from snapkv_gguf import _lib

    facts = json.loads(snapkv("info", "-m", model_path, "--json").stdout)
    assert facts["llama_cpp_python"] == _lib.LLAMA_CPP_PYTHON
    assert "TAG_SNAPKV" in facts["build"]
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
    too_short = snapkv("bench", "-m", model_path, "--depths", "64", *SETTINGS)
    assert "depth 64 is within the budget of 64 cells" in too_short.stderr


def test_quality(model_path: Path, tmp_path: Path) -> None:
    result = snapkv(
        *("quality", "-m", model_path, "--seeds", "2,5", "--settings", "full,stream,w8-avg5,w4-max3-r0.5"),
        *("--budgets", "32,64", "--tokens", "400", "--texts", "2", "-t", "1", "--json", tmp_path / "q.json"),
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "q.json").read_text())
    answers = document["answers"]
    assert {found["seed"] for found in answers} == {2, 5}
    assert len(answers) == 2 * (1 + 3 * 2)
    for found in answers:
        assert found["cells"] == (found["budget"] or found["prompt_tokens"])
    assert "w4-max3-r0.5" in result.stdout
    texts = document["texts"]
    assert len(texts) == 2 * 3 * 2
    for found in texts:
        assert found["kl"] > 0
        assert 0 <= found["same_top"] <= 1
    markdown = snapkv(
        *("quality", "-m", model_path, "--seeds", "1", "--settings", "full", "--budgets", "64"),
        *("--tokens", "400", "--texts", "0", "-t", "1", "--markdown"),
    ).stdout.splitlines()
    assert markdown[0] == "| setting | right of 1, 64 cells |"
    assert markdown[1] == "| --- | ---: |"
    assert markdown[2].startswith("| full | ")
    wrong = snapkv("quality", "-m", model_path, "--settings", "best")
    assert wrong.exit_code == 1
    assert "setting 'best': must be 'full', 'stream' or like 'w16-max21'" in wrong.stderr
