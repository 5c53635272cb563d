"""snapkv eval as a user gives it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from snapkv_gguf import cli
from snapkv_gguf.eval import methods

pytestmark = pytest.mark.usefixtures("library")

SMALL = ("--tasks", "needle,text", "--methods", "full,snapkv", "--budgets", "64,0.25", "--lengths", "600", "-n", "1")
FAST = ("--depths", "0.5", "--no-cost", "-t", "1")


def snapkv(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def unboxed(text: str) -> str:
    return "".join(text.replace("│", "").split())


def test_a_run_and_its_report(model_path: Path, tmp_path: Path) -> None:
    command = ("eval", "-m", model_path, *SMALL, *FAST, "-o", tmp_path)
    dry = snapkv(*command, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "2 samples of " in dry.stderr
    assert not list(tmp_path.iterdir())
    result = snapkv(*command)
    assert result.exit_code == 0, result.output
    assert "about 1 minute" in result.stderr
    (folder,) = tmp_path.iterdir()
    assert str(folder / "report.html") in result.stdout.replace("\n", "")
    assert "needle" in result.stdout
    assert (folder / "report.html").read_text().lstrip().startswith("<!doctype html>")
    again = snapkv(*command)
    assert "2 of them are there from before" in again.stderr
    assert "about" not in again.stderr
    other = snapkv(*command, "--seed", "2")
    assert other.exit_code == 0, other.output
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    both = snapkv("eval", "report", *folders, "-o", tmp_path / "both.html")
    assert both.exit_code == 0, both.output
    assert folders[1].name in (tmp_path / "both.html").read_text()
    markdown = snapkv("eval", "report", folder, "--markdown")
    assert markdown.exit_code == 0, markdown.output
    assert "| task | method | budget | score |" in markdown.stdout


def test_a_file_and_options_before_it(model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('tasks = ["needle"]\nlengths = [600]\nsamples = 3\ndepths = [0.5]\n')
    assert "3 samples" in snapkv("eval", "-m", model_path, "--config", file, "--dry-run").stderr
    assert "2 samples" in snapkv("eval", "-m", model_path, "--config", file, "-n", "2", "--dry-run").stderr


def test_lists() -> None:
    tasks = snapkv("eval", "tasks")
    assert tasks.exit_code == 0
    assert "variable-tracking" in tasks.stdout
    found = snapkv("eval", "methods").stdout
    assert all(name in found for name in methods.NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a model: -m FILE.gguf"),
        (("-m", "no.gguf", "--suite", "slow"), "--suite slow: must be one of default, quick, ablations"),
        (("-m", "no.gguf", "--budgets", "many"), "--budgets many: must be numbers separated by commas"),
        (("-m", "no.gguf", "--tasks", "all"), "task 'all': must be one of needle"),
        (("-m", "no.gguf", "--quick"), "no such model file: no.gguf"),
        (("-m", "smollm2", "--config", "no.toml"), "no.toml"),
        (("report", "no-such-folder"), "no-such-folder: no such folder"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    result = snapkv("eval", *arguments)
    assert result.exit_code in (1, 2)
    assert unboxed(message) in unboxed(result.stderr)


def test_longbench_without_its_files(model_path: Path) -> None:
    result = snapkv("eval", "-m", model_path, "--tasks", "longbench", "--dry-run")
    assert result.exit_code == 1
    assert "--longbench DIR" in result.stderr


def test_missing_packages(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else find(name))
    result = snapkv("eval", "-m", model_path, "--dry-run")
    assert result.exit_code == 1
    assert "snapkv eval needs scipy: pip install 'snapkv-gguf[eval]'" in result.stderr
