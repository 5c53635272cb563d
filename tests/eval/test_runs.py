from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapkv_gguf.eval import report

pytestmark = pytest.mark.usefixtures("library")


def config(model: Path, **kwargs: Any) -> Any:
    from snapkv_gguf.eval.runs import Config

    options: dict[str, Any] = {
        "model": str(model),
        "tasks": ("needle", "text"),
        "methods": ("full", "snapkv", "random"),
        "budgets": (64, 128),
        "lengths": (600,),
        "depths": (0.2, 0.8),
        "samples": 1,
        "threads": 1,
        "cost": False,
    }
    return Config(**{**options, **kwargs})


def results(folder: Path) -> list[tuple[Any, ...]]:
    """What does not depend on the time it took."""
    found = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return sorted((r["sample"], r["method"], r["budget"], r["cells"], str(r["scores"]), r["answers"]) for r in found)


def measured(settings: Any, folder: Path, **callbacks: Any) -> Any:
    from snapkv_gguf.eval.runs import Run

    with Run(settings, folder, "a test") as run:
        run.measure(**callbacks)
    return run


def test_a_whole_run(model_path: Path, tmp_path: Path) -> None:
    estimates: list[Any] = []
    steps: list[float] = []
    run = measured(
        config(model_path),
        tmp_path,
        on_estimate=estimates.append,
        on_progress=lambda what, seconds: steps.append(seconds),
    )
    assert run.is_finished
    assert len(results(run.folder)) == 3 * 5
    assert len(steps) == 3
    assert estimates[0].seconds == pytest.approx(sum(steps))
    assert estimates[0].seconds > 0
    read = report.load(run.folder)
    assert read.finished
    assert {record.method for record in read.records} == {"full", "snapkv", "random"}
    facts = json.loads((run.folder / "run.json").read_text())
    assert facts["command"] == "a test"
    assert facts["config"]["budgets"] == [64, 128]
    assert facts["config"]["model"] == model_path.name
    assert facts["model"]["architecture"] == "llama"
    assert facts["pin"]["llama_cpp"]
    assert facts["machine"]["threads"] == 1
    assert len(facts["sessions"]) == 1
    kept = json.loads((run.folder / "kept.json").read_text())
    assert {m["budget"] for m in kept["maps"]} == {64}
    # the names of this machine's folders are nobody's business
    assert str(model_path.parent) not in (run.folder / "run.json").read_text()


def test_the_folder_is_named_by_what_is_measured(model_path: Path, tmp_path: Path) -> None:
    names = {
        config(model_path, **change).name(model_path)
        for change in (
            {},
            {"seed": 2},
            {"budgets": (64,)},
            {"lengths": (700,)},
            {"type_k": "q8_0"},
            {"methods": ["full"]},
        )
    }
    assert len(names) == 6
    assert config(model_path).name(model_path).startswith("llama-600-")
    # a list or a tuple, twice the same
    assert config(model_path, budgets=[64, 128, 64]).name(model_path) == config(model_path).name(model_path)


def test_an_interrupted_run_goes_on(model_path: Path, tmp_path: Path) -> None:
    whole = measured(config(model_path), tmp_path / "whole")

    def stop(what: str, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(config(model_path), tmp_path / "parts", on_progress=stop)
    folder = tmp_path / "parts" / whole.folder.name
    assert len(results(folder)) == 5
    assert not report.load(folder).finished
    assert json.loads((folder / "run.json").read_text())["sessions"][-1]["ended"] is None
    # killed while it wrote
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"sample": "needle-6')
    with pytest.raises(KeyboardInterrupt):
        measured(config(model_path), tmp_path / "parts", on_progress=stop)
    assert len(results(folder)) == 10
    run = measured(config(model_path), tmp_path / "parts")
    assert run.is_finished
    assert results(folder) == results(whole.folder)
    facts = json.loads((folder / "run.json").read_text())
    assert len(facts["sessions"]) == 3
    assert facts["finished"]


def test_a_finished_run_is_not_measured_again(model_path: Path, tmp_path: Path) -> None:
    run = measured(config(model_path), tmp_path)
    before = (run.folder / "records.jsonl").read_bytes()
    run = measured(config(model_path), tmp_path)
    assert (run.folder / "records.jsonl").read_bytes() == before


def test_two_processes_do_not_share_a_folder(model_path: Path, tmp_path: Path) -> None:
    from snapkv_gguf.eval.runs import Run

    code = (
        "import sys; from pathlib import Path; from snapkv_gguf.eval.runs import *; "
        "run = Run(read_config(Path(sys.argv[1])), Path(sys.argv[2]), ''); run.__enter__()"
    )
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{model_path}"\nlengths = [600]\nsamples = 1\n')
    from snapkv_gguf.eval.runs import read_config

    with Run(read_config(file), tmp_path, "") as run:
        other = subprocess.run(
            [sys.executable, "-c", code, file, tmp_path],
            capture_output=True,
            text=True,
            env=dict(os.environ),
            check=False,
        )
    assert other.returncode != 0
    assert f"{run.folder}: another process writes to it" in other.stderr


def test_cost(model_path: Path, tmp_path: Path) -> None:
    run = measured(
        config(model_path, tasks=("text",), cost=True, budgets=(64, 0.5, 4096), methods=("full", "snapkv")), tmp_path
    )
    assert run.is_finished
    found = json.loads((run.folder / "cost.json").read_text())
    # a budget that the prompt does not exceed costs nothing
    assert [(cost["budget"], cost["cells_after"]) for cost in found] == [(64, 64), (0.5, 300)]
    assert all(cost["prompt_tokens"] == 600 and cost["decode_full"] > 0 for cost in found)


def test_without_the_full_cache(model_path: Path, tmp_path: Path) -> None:
    """Running text still is compared with it."""
    run = measured(config(model_path, methods=("snapkv",), budgets=(64,)), tmp_path)
    assert run.is_finished
    read = report.load(run.folder)
    assert {record.method for record in read.records} == {"snapkv"}
    assert all(record.scores["kl"] > 0 for record in read.records if record.task == "text")


def test_the_full_cache_alone(model_path: Path, tmp_path: Path) -> None:
    run = measured(config(model_path, methods=("full",)), tmp_path)
    assert {record.method for record in report.load(run.folder).records} == {"full"}


def test_other_inputs_of_the_same_name_are_another_run(model_path: Path, tmp_path: Path) -> None:
    from snapkv_gguf import tiny
    from snapkv_gguf.eval.runs import Run

    folders = []
    for seed in (1, 2):
        model = tiny.write_llama(tmp_path / str(seed) / "m.gguf", seed=seed)
        folders.append(Run(config(model), tmp_path, "").folder)
    assert model.stat().st_size == (tmp_path / "1" / "m.gguf").stat().st_size
    for text in ("One paragraph of a text, long enough to be one. ", "Another paragraph of a text, as long as that. "):
        document = tmp_path / text.split()[0] / "text.txt"
        document.parent.mkdir()
        document.write_text("\n\n".join(f"{i}. {text * 3}" for i in range(40)))
        folders.append(Run(config(model_path, document=str(document)), tmp_path, "").folder)
    assert len(set(folders)) == 4
    # wherever the same files lie
    moved = document.rename(tmp_path / "moved.txt")
    assert Run(config(model_path, document=str(moved)), tmp_path, "").folder == folders[-1]


def test_a_limit_takes_from_everywhere(model_path: Path, tmp_path: Path) -> None:
    from snapkv_gguf.eval.runs import Run

    run = Run(config(model_path, tasks=("needle",), lengths=(600, 700), samples=3, limit=4), tmp_path, "")
    assert {(s.fields["length"], s.fields["depth"]) for s in run.samples} == {
        (length, depth) for length in (600, 700) for depth in (0.2, 0.8)
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("w16-max1001-r0",)}, "method w16-max1001-r0: window or kernel is too wide for "),
        ({"methods": ("w560-max1-r0",), "budgets": (590,)}, "w560-max1-r0"),
        ({"budgets": (0.01,)}, "budget 0.01 of [0-9]+ tokens is within the window of snapkv"),
    ],
)
def test_methods_that_do_not_fit_the_prompts(
    model_path: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    from snapkv_gguf.eval.runs import Run

    with pytest.raises(ValueError, match=message):
        Run(config(model_path, tasks=("text",), **change), tmp_path, "")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "", "run.json is broken .*remove it and run again"),
        ("run.json", "[]", "run.json is broken"),
        ("records.jsonl", '{"sample": "x"}\n', "records.jsonl, line 1: no field .*remove the line and run"),
        ("records.jsonl", "{\n", "records.jsonl, line 1: "),
    ],
)
def test_a_broken_folder(model_path: Path, tmp_path: Path, name: str, text: str, message: str) -> None:
    from snapkv_gguf.eval.runs import Run

    folder = Run(config(model_path), tmp_path, "").folder
    folder.mkdir()
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        measured(config(model_path), tmp_path)


def test_limit(model_path: Path, tmp_path: Path) -> None:
    from snapkv_gguf.eval.runs import Run

    assert [sample.task for sample in Run(config(model_path, limit=1), tmp_path, "").samples] == ["needle", "text"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("haystack",)}, "task 'haystack': must be one of needle"),
        ({"methods": ("best",)}, "method 'best': must be one of full, snapkv"),
        ({"budgets": (4,)}, "budget=4: must be more than window=16"),
        ({"budgets": (2.0,)}, "budget=2.0: a float is a share of the prompt"),
        ({"budgets": ()}, r"budgets=\(\): must be a list with at least one entry"),
        ({"tasks": "needle"}, "tasks='needle': must be a list"),
        ({"lengths": (100,)}, "length 100: must be a number of tokens, at least 512"),
        ({"lengths": ("4K",)}, "length '4K'"),
        ({"depths": (1.5,)}, "depth 1.5: must be a share of the text, from 0 to 1"),
        ({"samples": 0}, "samples=0: must be a whole number, at least 1"),
        ({"samples": True}, "samples=True"),
        ({"threads": 0}, "threads=0"),
        ({"cost": "no"}, "cost='no': must be true or false"),
        ({"longbench": 5}, "longbench=5: must be text"),
        ({"tasks": (["needle"],)}, "must be a list of names or numbers"),
        ({"type_k": "f15"}, "cache type 'f15': must be one of"),
    ],
)
def test_wrong_configurations(model_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(model_path, **change)


def test_files(tmp_path: Path) -> None:
    from snapkv_gguf.eval import runs

    file = tmp_path / "mine.toml"
    file.write_text('tasks = ["needle"]\nbudgets = [512, 0.25]\n')
    found = runs.read_config(file, model="x.gguf", budgets=(64,))
    assert (found.tasks, found.budgets, found.model) == (("needle",), (64,), "x.gguf")
    file.write_text("task = 1\n")
    with pytest.raises(ValueError, match="unknown field task; the fields are model, tasks"):
        runs.read_config(file)
    file.write_text("tasks = [\n")
    with pytest.raises(ValueError, match="not a TOML file"):
        runs.read_config(file)


def test_suites() -> None:
    from snapkv_gguf.eval import runs

    default = runs.read_config(runs.suite("default"))
    # everything but what needs files
    assert set(default.tasks) == set(runs.TASKS) - {"longbench", "question-first"}
    assert {"full", "snapkv", "paper", "no-pooling", "shared", "first-recent", "random", "h2o"} == set(default.methods)
    for name in runs.SUITES:
        runs.read_config(runs.suite(name))
