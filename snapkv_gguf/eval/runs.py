"""A run: its configuration, its folder, which is never overwritten, and what is measured in it."""

# mypy: allow-untyped-calls

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .. import __version__, _lib, bench, models, system
from ..config import SnapKV, ggml_type
from ..prompt import Vocabulary
from . import methods, records
from .engine import Engine, Method, prompt_tokens, room_for_answers
from .schema import Request, Sample
from .tasks import TASKS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUITES = ("default", "quick", "ablations", "chunks")

_COST_TOKENS = 32  # decoded to measure speed
_CALIBRATION = 2048  # tokens evaluated for the estimate


@dataclass(frozen=True)
class Config:
    """What a run measures; a results folder is named by it.

    Attributes:
        model: Path of a GGUF file, or a name of ``models.MODELS``.
        tasks: Names of ``tasks.TASKS``.
        methods: Names that ``methods.parse()`` knows.
        budgets: Cells (int) or shares of the prompt (float).
        lengths: Tokens of a prompt.
        samples: Per task and length, and per depth or variant where the task has such.
        depths: Of needles.
        seed: Of the samples.
        limit: Samples of each task at most, 0 for all.
        cost: Whether to measure prefill overhead and decode speed on their own.
        longbench: Directory with LongBench's files.
        document: A text of one's own for the tasks on real text.
        threads: CPU threads.
        gpu_layers: As llama.cpp's -ngl.
        type_k, type_v: Cache types.
        flash_attn: Flash attention.

    Raises:
        ValueError: An unknown task or method, or a value out of range.
    """

    model: str = "smollm2"
    tasks: tuple[str, ...] = ("needle",)
    methods: tuple[str, ...] = (methods.FULL, "snapkv")
    budgets: tuple[int | float, ...] = (1024,)
    lengths: tuple[int, ...] = (4096,)
    samples: int = 10
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    seed: int = 1
    limit: int = 0
    cost: bool = True
    longbench: str = ""
    document: str = ""
    threads: int = os.cpu_count() or 1
    gpu_layers: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: bool = True

    def __post_init__(self) -> None:
        for name, kind in (
            *((name, bool) for name in ("cost", "flash_attn")),
            *((name, str) for name in ("model", "longbench", "document", "type_k", "type_v")),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be {'true or false' if kind is bool else 'text'}"
                )
        for name, least in (("samples", 1), ("seed", 0), ("limit", 0), ("threads", 1), ("gpu_layers", -1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: must be a whole number, at least {least}")
        for name in ("tasks", "methods", "budgets", "lengths", "depths"):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, (list, tuple)) or not values:
                raise ValueError(f"{name}={values!r}: must be a list with at least one entry")
            if not all(isinstance(value, (str, int, float)) for value in values):
                raise ValueError(f"{name}={values!r}: must be a list of names or numbers")
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(f"task {task!r}: must be one of {', '.join(TASKS)}")
        for length in self.lengths:
            if isinstance(length, bool) or not isinstance(length, int) or length < 512:
                raise ValueError(f"length {length!r}: must be a number of tokens, at least 512")
        for depth in self.depths:
            if isinstance(depth, bool) or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
                raise ValueError(f"depth {depth!r}: must be a share of the text, from 0 to 1")
        for name in (self.type_k, self.type_v):
            ggml_type(name)
        methods.expand(self.methods, self.budgets)

    def name(self, model: Path, samples: Sequence[Sample] = ()) -> str:
        """Of the results folder: the model, the lengths, and a digest of everything that decides about the results."""
        # files by what is in them, wherever they lie
        what = {
            **{key: value for key, value in asdict(self).items() if key not in ("model", "longbench", "document")},
            "model": _digest_of_file(model),
            "samples": hashlib.sha256(repr([asdict(sample) for sample in samples]).encode()).hexdigest(),
            "version": __version__,
            "llama_cpp": system.llama_cpp_commit(),
        }
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
        lengths = "-".join(str(length) for length in self.lengths)
        return f"{model.stem}-{lengths}-{digest}"


def read_config(file: Path, **overrides: Any) -> Config:
    """A configuration from a TOML file with the fields of :class:`Config`; what ``overrides`` has goes before it.

    Raises:
        ValueError: Not TOML, an unknown field, or a value out of range.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a TOML file: {error}") from error
    known = [field.name for field in fields(Config)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{file}: unknown field {', '.join(unknown)}; the fields are {', '.join(known)}")
    return Config(**{**values, **overrides})


def suite(name: str) -> Path:
    """The file of one of :data:`SUITES`."""
    return Path(str(importlib.resources.files(__package__) / "suites" / f"{name}.toml"))


class Run:
    """The results folder of a configuration, new or one that is gone on with.

    Holds ``run.json`` (configuration, pin, machine, command), ``records.jsonl`` (a line per sample and method),
    ``kept.json`` (which tokens are kept of one sample), ``cost.json`` and, made from these, ``report.html``.

    Raises:
        ValueError: A task cannot be made from the configuration, or another process writes to the folder.
    """

    def __init__(self, config: Config, results: Path, command: str) -> None:
        self.config = config
        self.model = models.resolve_model(config.model)
        self.methods = methods.expand(config.methods, config.budgets)
        self._wanted = [
            method for method in self.methods if method[0] != methods.FULL or methods.FULL in config.methods
        ]
        with Vocabulary(self.model) as vocabulary:
            self.n_ctx_train = vocabulary.n_ctx_train
            self.samples = list(_samples(config, vocabulary.count))
            self.n_tokens = {sample.id: len(prompt_tokens(vocabulary, sample)) for sample in self.samples}
            self._facts = _model_facts(self.model, vocabulary.metadata)
        self._check_methods()
        self.folder = results / config.name(self.model, self.samples)
        self._command = command
        self._machine = system.describe(paths=False)
        self._lock = FileLock(self.folder / ".lock", blocking=False)
        self.done = self._read_done()

    def _check_methods(self) -> None:
        """Before a long prefill, not after it."""
        sample = min(self.samples, key=lambda sample: self.n_tokens[sample.id])
        n = self.n_tokens[sample.id]
        for (name, budget), config in self.methods.items():
            if config is None:
                continue
            longest = max(self.n_tokens[s.id] + room_for_answers(s) for s in self.samples)
            if config.chunk is not None and config.positions == "true" and 0 < self.n_ctx_train < longest:
                raise ValueError(
                    f"method {name}: {longest} tokens are more than the {self.n_ctx_train} the model was trained for; "
                    f"{name}:packed reads them"
                )
            if isinstance(config.budget, float) and round(config.budget * n) <= config.window:
                raise ValueError(f"budget {budget} of {n} tokens is within the window of {name}: raise it")
            if config.resolve(n).budget < n and max(config.kernel, config.window) > n - config.window:
                raise ValueError(f"method {name}: window or kernel is too wide for {sample.id} of {n} tokens")

    def __enter__(self) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(f"{self.folder}: another process writes to it") from None
        records.cut_broken_line(self._file(records.FILE))
        self.done = self._read_done()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def n_context(self) -> int:
        """Cells that the context must have."""
        # what follows a running text is compared with the full cache's
        at_once = any(not sample.questions for sample in self.samples) or any(
            config is None or config.chunk is None for config in (self.methods[method] for method in self._wanted)
        )
        room = max(room_for_answers(sample) for sample in self.samples)
        in_chunks = max((methods.cells(config) for config in self.methods.values() if config), default=0)
        whole = max(self.n_tokens[sample.id] + room_for_answers(sample) for sample in self.samples)
        return whole if at_once else in_chunks + room

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to be measured."""
        if not self._file("run.json").is_file():
            return False
        return not self.missing() and (not self.config.cost or self._file("cost.json").is_file())

    def missing(self) -> list[tuple[Sample, list[Method]]]:
        """What there is no record of yet."""
        found = []
        for sample in self.samples:
            left = [method for method in self._wanted if (sample.id, *method) not in self.done]
            if left:
                found.append((sample, left))
        return found

    def measure(
        self,
        on_estimate: Callable[[Estimate], None] = lambda estimate: None,
        on_progress: Callable[[str, float], None] = lambda what, seconds: None,
    ) -> None:
        """All that is missing. Each record is on the disk before the next one is begun.

        Args:
            on_estimate: Called once, before anything is measured.
            on_progress: Told what was done and how many seconds of the estimate that were.
        """
        started = _now()
        facts = self._read_facts()
        self._write_facts(facts, started, None)
        options = {
            "n_threads": self.config.threads,
            "n_threads_batch": self.config.threads,
            "n_gpu_layers": self.config.gpu_layers,
            "type_k": ggml_type(self.config.type_k),
            "type_v": ggml_type(self.config.type_v),
            "flash_attn": self.config.flash_attn,
        }
        missing = self.missing()
        with Engine(self.model, self.methods, max(self.n_context, _CALIBRATION), **options) as engine:
            estimate = Estimate.of(engine, self, missing)
            on_estimate(estimate)
            self._measure_kept(engine)
            with self._file(records.FILE).open("a", encoding="utf-8") as file:
                for sample, left in missing:
                    for record in engine.run(sample, left):
                        records.append(file, record)
                        self.done.add((record.sample, record.method, record.budget))
                    on_progress(sample.id, estimate.seconds_of(sample, left))
                    self._write_facts(facts, started, None)
        if self.config.cost and not self._file("cost.json").is_file():
            self._measure_cost(options, on_progress, estimate)
        self._write_facts(facts, started, _now(), finished=True)

    def _measure_kept(self, engine: Engine) -> None:
        """Of the first sample with a question, by every method with the middle budget."""
        file = self._file("kept.json")
        sample = next((sample for sample in self.samples if sample.questions), None)
        if file.is_file() or sample is None:
            return
        budgets = sorted(self.config.budgets)
        budget = budgets[(len(budgets) - 1) // 2]
        _write_json(file, engine.kept(sample, [method for method in self._wanted if method[1] == budget]))

    def _measure_cost(
        self, options: Mapping[str, Any], on_progress: Callable[[str, float], None], estimate: Estimate
    ) -> None:
        found = []
        for length in self.config.lengths:
            for budget in self.config.budgets:
                config = SnapKV(budget=budget)
                if config.resolve(length).budget >= length:
                    continue
                depths = bench.measure(
                    self.model, config, depths=[length], n_repeat=1, n_decode=_COST_TOKENS, **options
                )
                found += [{"method": "snapkv", "budget": budget, **depth} for depth in bench.as_json(depths)]
                on_progress(f"cost of {budget} at {length}", estimate.cost_seconds(length))
        _write_json(self._file("cost.json"), found)

    # the folder

    def _file(self, name: str) -> Path:
        return self.folder / name

    def _read_done(self) -> set[tuple[str, str, int | float]]:
        return {(r.sample, r.method, r.budget) for r in records.read(self._file(records.FILE))}

    def _read_facts(self) -> dict[str, Any]:
        file = self._file("run.json")
        if file.is_file():
            try:
                found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return found | {"sessions": list(found["sessions"])}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file} is broken ({error!r}): remove it and run again") from error
        return {
            "name": self.folder.name,
            "model": self._facts,
            "config": {**asdict(self.config), "model": self.model.name},
            "seed": self.config.seed,
            "command": self._command,
            "pin": {"llama_cpp_python": _lib.LLAMA_CPP_PYTHON, "llama_cpp": system.llama_cpp_commit()},
            "version": __version__,
            "machine": self._machine["machine"] | {"devices": self._machine["devices"], "threads": self.config.threads},
            "sessions": [],
        }

    def _write_facts(self, facts: Mapping[str, Any], started: str, ended: str | None, finished: bool = False) -> None:
        session = {"started": started, "ended": ended, "command": self._command, "machine": self._machine["machine"]}
        sessions = [*facts["sessions"], session]
        _write_json(self._file("run.json"), {**facts, "sessions": sessions, "finished": finished})


@dataclass(frozen=True)
class Estimate:
    """How long a run takes, from a short measurement on its model and machine.

    Attributes:
        batch: Seconds of a prompt token at the beginning.
        slope: Seconds by which one grows for each token before it.
        decode, decode_slope: The same of generated tokens.
        restore: Seconds to restore a token of a sequence.
        seconds: Of all that is missing.
    """

    batch: float
    slope: float
    decode: float
    decode_slope: float
    restore: float
    seconds: float = 0.0
    run: Any = None

    @classmethod
    def of(cls, engine: Engine, run: Run, missing: Iterable[tuple[Sample, list[Method]]]) -> Estimate:
        """Measure for some seconds."""
        rates = engine.calibrate(_CALIBRATION)
        estimate = cls(**rates, run=run)
        total = sum(estimate.seconds_of(sample, left) for sample, left in missing)
        if run.config.cost and not (run.folder / "cost.json").is_file():
            total += sum(estimate.cost_seconds(n) for n in run.config.lengths for _ in run.config.budgets)
        return replace(estimate, seconds=total)

    def prefill(self, n: int) -> float:
        """Seconds of a prompt."""
        return self.batch * n + self.slope * n * n / 2

    def decoding(self, n: int, cells: int) -> float:
        """Seconds of ``n`` tokens after ``cells``."""
        return n * (self.decode + self.decode_slope * cells)

    def seconds_of(self, sample: Sample, left: Iterable[Method]) -> float:
        """Seconds of a sample by some methods."""
        n = self.run.n_tokens[sample.id]
        # answers of small models often run to their end
        n_answer = sum(question.max_tokens for question in sample.questions) or room_for_answers(sample)
        n_prompts = max(1, len(sample.questions))
        left = list(left)
        configs = [self.run.methods[method] for method in left]
        at_once = not sample.questions or any(config is None or config.chunk is None for config in configs)
        seconds = n_prompts * self.prefill(n) if at_once else 0.0
        for config in configs:
            cells = n if config is None else min(n, config.resolve(n).budget)
            if config is not None and config.chunk is not None:
                # a probe for each chunk, and attention to the cells at most
                n_probes = n / config.chunk * (config.probe if isinstance(config.probe, int) else 32)
                attention = self.slope * min(n / 2, cells + config.chunk / 2)
                seconds += n_prompts * (n + n_probes) * (self.batch + attention) + self.decoding(n_answer, cells)
                continue
            seconds += n_prompts * (self.restore * n + self.prefill(n) * 0.02) + self.decoding(n_answer, cells)
        return seconds

    def cost_seconds(self, length: int) -> float:
        """Seconds of a measurement of cost: two prefills and three times decoding."""
        return 2 * self.prefill(length) + 3 * self.decoding(_COST_TOKENS, length)


def _samples(config: Config, count: Callable[[str], int]) -> Iterator[Sample]:
    request = Request(
        lengths=config.lengths,
        n_samples=config.samples,
        seed=config.seed,
        count=count,
        depths=config.depths,
        longbench=Path(config.longbench) if config.longbench else None,
        document=Path(config.document) if config.document else None,
    )
    for name in config.tasks:
        every = list(TASKS[name].build(request))
        n = min(config.limit or len(every), len(every))
        # spread over lengths, depths and variants
        yield from (every[i * len(every) // n] for i in range(n))


def _digest_of_file(file: Path) -> str:
    with file.open("rb") as data:
        digest = hashlib.sha256()
        while block := data.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _model_facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture", "")
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "name": metadata.get("general.name", path.stem),
        "architecture": architecture,
        "n_layer": int(metadata.get(f"{architecture}.block_count", 0)),
        "n_ctx_train": int(metadata.get(f"{architecture}.context_length", 0)),
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _write_json(file: Path, value: Any) -> None:
    """Whole or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) if file.name == "run.json" else json.dumps(value), "utf-8")
    temporary.replace(file)
