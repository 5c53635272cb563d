"""The command ``snapkv serve`` and the helper that starts a server from Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from snapkv_gguf import SnapKV, _lib, cli, server
from snapkv_gguf.server import Server


def serve(*arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).parent / "snapkv"), "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve(number: int, tiny_llama: Path) -> None:
    port = server._free_port()
    process = serve("-m", str(tiny_llama), "--port", str(port), "-c", "512", "-np", "1", "-t", "1", "--snapkv")
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/props", timeout=5) as response:
                assert b'"snapkv":{"budget":1024' in response.read()
            break
        except OSError:
            assert process.poll() is None
            time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert f"snapkv: llama-server will listen on http://127.0.0.1:{port}\n" in output


def test_options_are_forwarded_as_they_are() -> None:
    process = serve("-md", "draft.gguf", "--snapkv-kernel", "4", "-np", "4")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--snapkv-kernel 4: must be odd" in output
    process = serve("--help")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "--snapkv-budget" in output
    assert "will listen" not in output


@pytest.mark.parametrize(
    ("arguments", "environment", "where"),
    [
        ([], {}, "http://127.0.0.1:8080"),
        (["--port", "1", "--host", "0.0.0.0"], {"LLAMA_ARG_PORT": "2"}, "http://0.0.0.0:1"),
        (["--port", "1", "--port", "3"], {}, "http://127.0.0.1:3"),
        ([], {"LLAMA_ARG_PORT": "2", "LLAMA_ARG_HOST": "::1"}, "http://[::1]:2"),
        (["--host", "/run/llama.sock"], {}, "/run/llama.sock"),
        (["--ssl-cert-file", "c", "--ssl-key-file", "k"], {}, "https://127.0.0.1:8080"),
    ],
)
def test_address(arguments: list[str], environment: dict[str, str], where: str) -> None:
    assert server.address(arguments, environment) == where


def test_names_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.models, "get_model", lambda name: Path("/cache") / name)
    assert server.resolved(["-c", "1", "-m", "smollm2"]) == ["-c", "1", "-m", "/cache/smollm2"]
    assert server.resolved(["--model", "other"]) == ["--model", "other"]


def test_flags() -> None:
    assert server.flags(False) == server.flags(None) == ["--no-snapkv"]
    assert server.flags(SnapKV(0.5, 8, 3, "avg", 0)) == [
        *("--snapkv", "--snapkv-budget", "0.5", "--snapkv-window", "8"),
        *("--snapkv-kernel", "3", "--snapkv-pool", "avg", "--snapkv-recent", "0"),
    ]
    assert server.flags(SnapKV(chunk=512, probe=8))[-4:] == ["--snapkv-chunk", "512", "--snapkv-probe", "8"]
    for settings in ({"rule": "h2o"}, {"positions": "packed"}, {"chunk": 512, "probe": "Who?"}):
        with pytest.raises(ValueError, match="llama-server"):
            server.flags(settings)


def test_no_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(_lib.ENV_LIB_PATH, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no llama-server in .*pip install"):
        server.binary()


def test_the_helper(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for this machine
    with Server(tiny_llama, "-c", "512", "-t", "1", log_file=tmp_path / "log") as one:
        assert one.returncode is None
        os.kill(one.pid, 0)
        assert "listening on" in one.log
        assert one.post("/tokenize", {"content": "abc"})["tokens"] == [100, 101, 102]
        with pytest.raises(server.ServerError, match=r"/completion: 400: .*snapkv"):
            one.post("/completion", {"prompt": "abc", "snapkv": 1})
    assert one.returncode == 0
    assert (tmp_path / "log").read_text() == one.log
    assert one.stop() == 0  # again


def test_bench_server(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = ["--prompt-tokens", "300", "-np", "2", "-n", "8", "-r", "2", "--cells", "8192", "-t", "1"]
    settings = ["--budget", "64", "--window", "8", "--kernel", "5", "--recent", "0.25"]
    result = CliRunner().invoke(
        cli.app, ["bench-server", "-m", str(tiny_llama), *arguments, *settings, "--json", str(tmp_path / "b.json")]
    )
    assert result.exit_code == 0, result.output
    assert "conversations" in result.stdout
    found = json.loads((tmp_path / "b.json").read_text())["results"]
    assert found["cells"] == 64
    # 300 cells each and 72 each
    assert 25 <= found["fit_full"] <= 28 < 60 <= found["fit_snapkv"]
    assert len(found["samples"]["full"]) == len(found["samples"]["snapkv"]) == 2


def test_llama_cli_has_the_options() -> None:
    shown = subprocess.run([_lib.lib_dir() / "llama-cli", "--help"], capture_output=True, text=True, check=True)
    assert "--snapkv-budget" in shown.stdout


def test_a_server_goes_with_its_last_reference(tiny_llama: Path) -> None:
    one = Server(tiny_llama, "-c", "512", "-t", "1")
    pid = one.pid
    del one
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
