"""SnapKV here beside SnapKV in NVIDIA's kvpress, on the same weights and prompts.

The weights of a GGUF are written once more as float32; llama.cpp and transformers both load that file. Compared are the
cells that each layer and KV head keeps, the scores they are chosen by, and the answers to a hidden six-digit code.
Needs the packages in requirements.txt.
"""

# torch, transformers and kvpress are imported where they are used: the rest can be tested without them
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from snapkv_gguf import Llama, SnapKV, _capi, haystack, models, reference, system
from snapkv_gguf.eval import intervals
from snapkv_gguf.prompt import Vocabulary

import llama_cpp  # isort: skip  # after snapkv_gguf, which makes it load our libraries

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

KVPRESS, KVPRESS_64, KVPRESS_ANGLES = "kvpress", "kvpress-float64", "kvpress-angles"
OURS_32, OURS = "snapkv-float32", "snapkv"

ENGINES = {
    KVPRESS: "kvpress on transformers in float32",
    KVPRESS_64: "the same in float64, but for RoPE's angles and norms, always float32 in transformers",
    KVPRESS_ANGLES: "the same in float32, with RoPE's angles rounded as llama.cpp rounds them",
    OURS_32: "snapkv-gguf with float32 weights and cache, without flash attention",
    OURS: "snapkv-gguf with the GGUF as it is, f16 cache, flash attention",
}

# (engine, compared with)
PAIRS = ((OURS_32, KVPRESS), (OURS_32, KVPRESS_ANGLES), (KVPRESS_64, KVPRESS), (OURS, KVPRESS))

_MAX_ANSWER = 32


@dataclass(frozen=True)
class Settings:
    """Of both: averages pooled over ``kernel`` cells, the window kept, nothing else kept in any case."""

    window: int = 32
    kernel: int = 5

    def snapkv(self, budget: int) -> SnapKV:
        """Ours."""
        return SnapKV(budget=budget, window=self.window, kernel=self.kernel, pool="avg", recent=0)


@dataclass(frozen=True)
class Pass:
    """What an engine kept of one prompt.

    Attributes:
        kept: Positions, ascending: [n_layer, n_head_kv, budget].
        scores: What they were chosen by: [n_layer, n_head_kv, n - window].
    """

    kept: Indices
    scores: Floats


@dataclass(frozen=True)
class Overlap:
    """Two engines' kept sets of one prompt.

    Attributes:
        seed: Of the prompt.
        budget: In cells.
        engine: The one.
        other: The other, which differences are relative to.
        overlap: Share of the chosen cells (budget - window, for the window is kept by both) that both chose:
            [n_layer][n_head_kv].
        n_swapped: Chosen by the other and not by the engine, in all heads.
        n_chosen: In all heads.
        error_median: Of the scores, over all cells.
        error_99: Its 99th percentile.
        error_swapped: Largest difference of a swapped cell's two scores, as a share of the border's score: the lowest
            that the other chose. 0 if none was swapped.
        gap_swapped: Largest distance of a swapped cell from the border in the other's scores, as a share too.
        n_wrong_rule: Heads whose sets are not those that our selection makes of their own engine's scores.
    """

    seed: int
    budget: int
    engine: str
    other: str
    overlap: list[list[float]]
    n_swapped: int
    n_chosen: int
    error_median: float
    error_99: float
    error_swapped: float
    gap_swapped: float
    n_wrong_rule: int


@dataclass(frozen=True)
class Answer:
    """``budget`` 0 is the full cache."""

    seed: int
    budget: int
    engine: str
    code: str
    text: str
    right: bool


# the same weights for both engines


def write_float32(source: Path, target: Path) -> Path:
    """Write a GGUF's metadata and dequantized tensors as float32, unless that was done before.

    Raises:
        NotImplementedError: gguf cannot dequantize one of its types.
    """
    if target.is_file() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(None, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        # the writer's own; those that begin with GGUF are of the file's header
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.ALL_F32)
            continue
        kind = field.types[0]
        element = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=element)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        n_bytes = 4 * math.prod(shape)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), n_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in reader.tensors:
            writer.write_tensor_data(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        writer.close()
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


# the two engines


class Ours:
    """snapkv_gguf.Llama, one pass at a time."""

    def __init__(self, path: Path, settings: Settings, n_ctx: int, n_threads: int, *, float32: bool) -> None:
        kinds = {"type_k": 0, "type_v": 0} if float32 else {}  # enum ggml_type: F32
        self.settings = settings
        self.llm = Llama(
            str(path),
            snapkv=settings.snapkv(settings.window + 1),
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            flash_attn=not float32,
            verbose=False,
            **kinds,
        )

    def prefill(self, prompt: Sequence[int]) -> Floats:
        """Evaluate the prompt, for :meth:`answer` and :meth:`run`: logits of the next token, [n_vocab]."""
        self.llm.reset()
        self.llm.eval(prompt[: -self.settings.window])
        self._state, self._window = self.llm.save_state(), prompt[-self.settings.window :]
        return self._evaluate_window()

    def _evaluate_window(self) -> Floats:
        self.llm.eval(self._window)
        pointer = self.llm._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, shape=(self.llm.n_vocab(),)).astype(np.float64)

    def run(self, budget: int) -> tuple[Pass, list[int]]:
        """A pass over the prompt evaluated last, and the answer after it."""
        self.llm.load_state(self._state)
        logits = self._evaluate_window()  # again: captured queries are not part of a state
        layers = _capi.layers(self.llm.ctx)
        scores = [
            reference.window_scores(
                _capi.scores(self.llm.ctx, 0, i, self.settings.window),
                window=self.settings.window,
                kernel=self.settings.kernel,
                pool="avg",
                n_head_kv=layer.n_head_kv,
            )
            for i, layer in enumerate(layers)
        ]
        self.llm.compact(self.settings.snapkv(budget))
        kept = [[self.llm.kept_positions(layer.il, head) for head in range(layer.n_head_kv)] for layer in layers]
        return Pass(np.array(kept, dtype=np.int64), np.array(scores)), self.answer(logits)

    def answer(self, logits: Floats) -> list[int]:
        """Greedy answer after the evaluated tokens, whose last one gave the logits."""
        tokens = [int(logits.argmax())]
        while not self.is_end(tokens[-1]) and len(tokens) < _MAX_ANSWER:
            self.llm.eval(tokens[-1:])
            tokens.append(self.llm.sample(temp=0.0))
        return tokens

    def is_end(self, token: int) -> bool:
        """Whether the token ends an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self.llm._model.vocab, token))

    def text(self, tokens: Sequence[int]) -> str:
        """What the tokens say, but for the one that ends the answer."""
        kept = [token for token in tokens if not self.is_end(token)]
        return bytes(self.llm.detokenize(kept)).decode(errors="replace")


class KVPress:
    """transformers with kvpress's SnapKVPress, as it is: only its results are read."""

    def __init__(self, path: Path, settings: Settings, n_threads: int, is_end: Callable[[int], bool]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(n_threads)
        self.settings, self.is_end = settings, is_end
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    @contextlib.contextmanager
    def float64(self) -> Iterator[None]:
        """Compute in float64; back to float32 nothing is lost, for the weights are float32 numbers."""
        self.model.double()
        try:
            yield
        finally:
            self.model.float()

    @contextlib.contextmanager
    def llama_cpp_angles(self) -> Iterator[None]:
        """Turn queries and keys by llama.cpp's RoPE angles instead of transformers', which are rounded differently."""
        import torch

        config, own = self.model.config, self.model.model.rotary_emb

        class Angles(torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: Any, position_ids: Any) -> tuple[Any, Any]:
                half = rope_angles(position_ids[0].numpy(), config.rope_theta, config.head_dim)
                angles = torch.from_numpy(np.concatenate([half, half], axis=-1))[None]
                return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        if config.rope_scaling is not None:
            raise ValueError(f"rope_scaling={config.rope_scaling}: only plain RoPE can be compared, use --controls 0")
        self.model.model.rotary_emb = Angles()
        try:
            yield
        finally:
            self.model.model.rotary_emb = own

    def prefill(self, prompt: Sequence[int]) -> tuple[Floats, Any]:
        """Logits of the next token, [n_vocab], and the cache."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([list(prompt)]), past_key_values=cache, logits_to_keep=1)
        return out.logits[0, -1].double().numpy(), cache

    def run(self, prompt: Sequence[int], budget: int) -> tuple[Pass, list[int]]:
        """The pass and the answer."""
        found, logits, cache = self.compress(prompt, budget)
        return found, self.answer(logits, cache, len(prompt))

    def compress(self, prompt: Sequence[int], budget: int) -> tuple[Pass, Floats, Any]:
        """The pass, logits of the next token, and the cache."""
        kept: list[Indices] = []
        scores: list[Floats] = []

        def compress(module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            found = press.score(module, hidden, keys, values, attentions, kwargs)
            scores.append(found[0, :, : -self.settings.window].double().numpy())
            # kvpress itself gathers the positions, as it gathers the values
            positions = values.new_tensor(range(values.shape[2]))[None, None, :, None].expand_as(values)
            chosen = plain_compress(module, hidden, keys, positions, attentions, kwargs)[1]
            kept.append(np.sort(chosen[0, :, :, 0].numpy().astype(np.int64)))
            return plain_compress(module, hidden, keys, values, attentions, kwargs)

        press = snapkv_press(len(prompt), budget, self.settings)
        plain_compress = press.compress
        press.compress = compress
        with press(self.model):
            logits, cache = self.prefill(prompt)
        return Pass(np.array(kept), np.array(scores)), logits, cache

    def answer(self, logits: Floats, cache: Any, n_prompt: int) -> list[int]:
        """Greedy answer after the prompt."""
        import torch

        tokens = [int(logits.argmax())]
        while not self.is_end(tokens[-1]) and len(tokens) < _MAX_ANSWER:
            # kvpress leaves positions as they were, as we do
            position = torch.tensor([[n_prompt + len(tokens) - 1]])
            with torch.inference_mode():
                out = self.model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache, position_ids=position)
            tokens.append(int(out.logits[0, -1].argmax()))
        return tokens


def rope_angles(positions: npt.ArrayLike, base: float, n_dims: int) -> npt.NDArray[np.float32]:
    """Angles as llama.cpp's CPU backend rounds them: each is the one before times base ** (-2 / n_dims), in float32.

    transformers multiplies the position by a float32 frequency instead. At position 2000 the two differ by up to 1e-4.

    Returns:
        [n, n_dims / 2]
    """
    scale = np.float32(base ** (-2 / n_dims))
    angles = [np.asarray(positions, dtype=np.float32)]
    while len(angles) < n_dims // 2:
        angles.append(angles[-1] * scale)
    return np.stack(angles, axis=-1)


def compression_ratio(n_tokens: int, budget: int) -> float:
    """The ratio that makes kvpress keep ``budget`` cells: it keeps int(n_tokens * (1 - ratio))."""
    return 1 - (budget + 0.5) / n_tokens


def snapkv_press(n_tokens: int, budget: int, settings: Settings) -> Any:
    """kvpress's SnapKV for a prompt of ``n_tokens``."""
    from kvpress import SnapKVPress

    return SnapKVPress(
        compression_ratio=compression_ratio(n_tokens, budget),
        window_size=settings.window,
        kernel_size=settings.kernel,
    )


# the rule alone


def rule_difference(settings: Settings, n: int = 300, n_head: int = 6, n_head_kv: int = 2) -> float:
    """Largest relative difference of kvpress's scores and ours of the same random attention, [n_head, window, n].

    In float64, so that nothing but the rule could differ: the window's mean, padding and divisor at the prefix's ends,
    the mean over a group. The score of every cell before the window is compared.
    """
    import torch
    from torch import nn

    weights = np.random.default_rng(0).dirichlet(np.full(n, 0.1), size=(n_head, settings.window))
    module = nn.Module()
    module.config = argparse.Namespace(num_attention_heads=n_head, num_key_value_heads=n_head_kv)
    rows = torch.zeros(1, n_head_kv, n, 8, dtype=torch.float64)
    press = snapkv_press(n, settings.window + 1, settings)
    scores = press.score(module, torch.zeros(1, n, 8), rows, rows, torch.from_numpy(weights)[None], {})
    theirs = scores[0, :, : -settings.window].numpy()
    ours = reference.window_scores(
        weights.sum(axis=1), window=settings.window, kernel=settings.kernel, pool="avg", n_head_kv=n_head_kv
    )
    return float((np.abs(theirs - ours) / ours).max())


def tokenizer_agrees(path: Path, text: str, expected: Sequence[int]) -> bool:
    """Whether transformers' tokenizer and chat template, from the same file, make the same prompt of a text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(chat, add_special_tokens=False)["input_ids"]) == list(expected)


# comparison


def head_overlap(a: npt.ArrayLike, b: npt.ArrayLike, window: int) -> float:
    """Share of what ``b`` chose, the window aside, that ``a`` chose too: kept cells [budget], with the same window."""
    n_chosen = np.size(b) - window
    return (np.intersect1d(a, b).size - window) / n_chosen


def swapped(scores: Floats, other: Floats, kept: Indices, other_kept: Indices) -> tuple[float, float]:
    """Of the cells that one head's two sets do not share: largest difference of their scores, and distance from the
    border, the lowest score of ``kept``'s chosen cells; both as shares of the border. Zeros if the sets are equal.

    Args:
        scores: By which ``kept`` was chosen, [n - window].
        other: By which ``other_kept`` was chosen.
    """
    cells = np.setxor1d(kept, other_kept)
    if cells.size == 0:
        return 0.0, 0.0
    border = scores[kept[kept < scores.size]].min()
    error = np.abs(other[cells] - scores[cells]).max() / border
    gap = np.abs(scores[cells] - border).max() / border
    return float(error), float(gap)


def n_wrong_rule(one: Pass, window: int) -> int:
    """Heads whose set is not the one that our selection makes of the scores that it was chosen by."""
    n = one.scores.shape[-1] + window
    budget = one.kept.shape[-1]
    wrong = 0
    for scores, kept in zip(one.scores, one.kept, strict=True):
        expected = reference.best_and_recent(scores, n=n, budget=budget, recent=window)
        wrong += int((expected != kept).any(axis=-1).sum())
    return wrong


def compare(seed: int, names: tuple[str, str], engine: Pass, other: Pass, window: int) -> Overlap:
    """One prompt's sets and scores."""
    n_layer, n_head_kv, budget = other.kept.shape
    heads = list(np.ndindex(n_layer, n_head_kv))
    overlap = [
        [head_overlap(engine.kept[i, h], other.kept[i, h], window) for h in range(n_head_kv)] for i in range(n_layer)
    ]
    moves = [swapped(other.scores[at], engine.scores[at], other.kept[at], engine.kept[at]) for at in heads]
    errors = np.abs(engine.scores - other.scores) / np.maximum(other.scores, np.finfo(np.float32).tiny)
    n_chosen = budget - window
    return Overlap(
        seed=seed,
        budget=budget,
        engine=names[0],
        other=names[1],
        overlap=overlap,
        n_swapped=sum(round((1 - share) * n_chosen) for layer in overlap for share in layer),
        n_chosen=n_chosen * len(heads),
        error_median=float(np.median(errors)),
        error_99=float(np.quantile(errors, 0.99)),
        error_swapped=max(error for error, _ in moves),
        gap_swapped=max(gap for _, gap in moves),
        n_wrong_rule=n_wrong_rule(engine, window) + n_wrong_rule(other, window),
    )


def measure(
    source: Path,
    *,
    seeds: int,
    n_tokens: int,
    budgets: Sequence[int],
    controls: int,
    settings: Settings,
    n_threads: int,
    cache: Path,
) -> dict[str, Any]:
    """All prompts by all engines, as JSON takes it.

    Args:
        controls: Prompts that kvpress also runs in float64 and with llama.cpp's angles.

    Raises:
        ValueError: A budget that is not below every prompt's length, or that is no more than the window.
    """
    started = time.perf_counter()
    with Vocabulary(source) as vocabulary:
        texts = [haystack.build(n_tokens, seed, vocabulary.count) for seed in range(1, seeds + 1)]
        prompts = [text.prompt(vocabulary) for text in texts]
    shortest = min(map(len, prompts))
    for budget in budgets:
        settings.snapkv(budget)
        if budget >= shortest:
            raise ValueError(
                f"budget={budget}: must be below the shortest prompt's {shortest} tokens, or nothing is evicted"
            )
    path = write_float32(source, cache / f"{source.stem}-float32.gguf")
    n_ctx = max(map(len, prompts)) + _MAX_ANSWER
    engines = {
        OURS_32: Ours(path, settings, n_ctx, n_threads, float32=True),
        OURS: Ours(source, settings, n_ctx, n_threads, float32=False),
    }
    kvpress = KVPress(path, settings, n_threads, engines[OURS].is_end)
    logits, sets, answers = [], [], []
    for text, prompt in zip(texts, prompts, strict=True):
        full, theirs = kvpress.prefill(prompt)
        found = {(0, KVPRESS): kvpress.answer(full, theirs, len(prompt))}
        for name, engine in engines.items():
            own = engine.prefill(prompt)
            logits.append({"seed": text.seed, "engine": name, "difference": float(np.abs(own - full).max())})
            found[0, name] = engine.answer(own)
        for budget in budgets:
            passes = {}
            passes[KVPRESS], found[budget, KVPRESS] = kvpress.run(prompt, budget)
            for name, engine in engines.items():
                passes[name], found[budget, name] = engine.run(budget)
            if text.seed <= controls:
                with kvpress.float64():
                    passes[KVPRESS_64], *_ = kvpress.compress(prompt, budget)
                with kvpress.llama_cpp_angles():
                    passes[KVPRESS_ANGLES], *_ = kvpress.compress(prompt, budget)
            for pair in PAIRS:
                if passes.keys() >= set(pair):
                    sets.append(compare(text.seed, pair, passes[pair[0]], passes[pair[1]], settings.window))
        said = {key: engines[OURS].text(tokens) for key, tokens in found.items()}
        answers += [Answer(text.seed, *key, text.code, answer, text.code in answer) for key, answer in said.items()]
        _progress(text.seed, seeds, started, [one for one in sets if one.seed == text.seed])
    for engine in engines.values():
        engine.llm.close()
    return {
        "model": source.name,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "budgets": list(budgets),
        "settings": asdict(settings),
        "tokenizer_agrees": tokenizer_agrees(path, f"{texts[0].text}\n\n{haystack.QUESTION}", prompts[0]),
        "rule_difference": rule_difference(settings),
        "logits": logits,
        "sets": [asdict(one) for one in sets],
        "answers": [asdict(one) for one in answers],
        "minutes": (time.perf_counter() - started) / 60,
    }


def _progress(seed: int, seeds: int, started: float, sets: Sequence[Overlap]) -> None:
    shares = ", ".join(f"{one.engine} {one.budget}: {mean_overlap([one]):.5f}" for one in sets if one.other == KVPRESS)
    elapsed = time.perf_counter() - started
    left = elapsed / seed * (seeds - seed) / 60
    print(f"{seed}/{seeds}, {left:.0f} min left; overlap {shares}", file=sys.stderr, flush=True)


# the report


def mean_overlap(sets: Sequence[Overlap]) -> float:
    """Over prompts, layers and heads."""
    return statistics.fmean(share for one in sets for layer in one.overlap for share in layer)


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    sets = [Overlap(**one) for one in result["sets"]]
    answers = [Answer(**one) for one in result["answers"]]
    parts = [_head(result), _rule(result), _sets(result, sets), _layers(result, sets), _accuracy(answers)]
    return "\n\n".join([*parts, _answers(answers)]) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _head(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    facts, settings, tokens = result["system"], result["settings"], result["prompt_tokens"]
    ids = "the same" if result["tokenizer_agrees"] else "others; those of llama.cpp were used"
    engines = "\n".join(f"- `{name}`: {what}" for name, what in ENGINES.items())
    differences = [
        f"{name} {max(one['difference'] for one in result['logits'] if one['engine'] == name):.2g}"
        for name in (OURS_32, OURS)
    ]
    return f"""# Beside kvpress

SnapKV here and in NVIDIA's kvpress, on the same weights and prompts: a six-digit code hidden in a text, asked for at
the end of {min(tokens)} to {max(tokens)} tokens. Model: {result["model"]}, also with its weights written as float32.
Window {settings["window"]}, average over {settings["kernel"]} cells, nothing but the window kept in any case.

    {result["command"]}

{versions}; {facts["machine"]["cpus"]} x {facts["machine"]["cpu"]}, {result["minutes"]:.0f} minutes.
Every number is in the JSON file beside this page.

{engines}

Token ids of a prompt by transformers' tokenizer: {ids}.
Largest difference of a logit after the prompt, full cache, from kvpress's: {", ".join(differences)}."""


def _rule(result: dict[str, Any]) -> str:
    return f"""## The rule

The same in both sources (kvpress: `SnapKVPress.score`, `ScorerPress.compress`; here: `reference.window_scores`):

- attention of the window's queries, causal, softmax over all cells; its mean over the window's rows
- only the cells before the window are pooled; zeros stand beyond both ends, and the divisor is always the kernel
  (`avg_pool1d` with `count_include_pad`), so that the cells next to the window and the first cells score lower
- pooled by query head, then the mean over the query heads of a KV head
- the window is kept: by a score above all others there, by its place here

Different: a kvpress ratio is rounded down to cells (the ratio given to it here makes it the budget); among equal
scores `topk` takes any, here the lower cell; kvpress sums in the model's type, here the host's part is float64.

On the same random attention in float64 the two scores differ by at most {result["rule_difference"]:.1g} of a score, the
ends of the prefix included. Heads whose set is not what our selection makes of its own engine's scores, kvpress's
included: {sum(one["n_wrong_rule"] for one in result["sets"])}."""


def _sets(result: dict[str, Any], sets: Sequence[Overlap]) -> str:
    rows = []
    for pair in PAIRS:
        for budget in result["budgets"]:
            found = [one for one in sets if (one.engine, one.other) == pair and one.budget == budget]
            if not found:
                continue
            shares = [share for one in found for layer in one.overlap for share in layer]
            rows.append(
                [
                    f"`{pair[0]}` / `{pair[1]}`",
                    str(budget),
                    str(len(found)),
                    f"{mean_overlap(found):.6f}",
                    f"{min(shares):.4f}",
                    f"{sum(share == 1 for share in shares)} of {len(shares)}",
                    f"{sum(one.n_swapped for one in found)} of {sum(one.n_chosen for one in found)}",
                    f"{statistics.median(one.error_median for one in found):.1e}",
                    f"{max(one.error_99 for one in found):.1e}",
                    f"{max(one.error_swapped for one in found):.1e}",
                    f"{max(one.gap_swapped for one in found):.1e}",
                ]
            )
    head = ["pair", "budget", "prompts", "overlap, mean", "least of a head", "heads with the same set", "cells swapped"]
    head += ["score error, median", "99 %", "of swapped cells", "their gap to the border"]
    return f"""## Kept cells

Overlap: the share of the cells chosen by a layer's KV head, the window aside, that both chose. Score error: the
difference of a cell's two scores, relative; the median, the 99th percentile of the prompt with the largest one, and the
largest among swapped cells (relative to the border, the lowest score that was kept). Two engines can swap a cell only
if its score is as near to the border as their errors reach: its gap is at most twice the error.

The float32 engines differ mostly by RoPE's angles: llama.cpp multiplies one angle by a float32 factor to get the next,
transformers multiplies the position by each frequency. `{OURS_32}` / `{KVPRESS_ANGLES}` has them rounded the same way;
what then remains is of the size of `{KVPRESS_64}` / `{KVPRESS}`, the rounding of kvpress's own float32. `{OURS}` also
rounds activations to 8 bits beside quantized weights, and keys and values to f16, as llama.cpp does without SnapKV.

{_table(head, rows)}"""


def _layers(result: dict[str, Any], sets: Sequence[Overlap]) -> str:
    budgets = result["budgets"]
    rows = []
    for i in range(len(sets[0].overlap)):
        row = [str(i)]
        for name in (OURS_32, OURS):
            for budget in budgets:
                found = [one for one in sets if (one.engine, one.other, one.budget) == (name, KVPRESS, budget)]
                shares = [share for one in found for share in one.overlap[i]]
                row.append(f"{statistics.fmean(shares):.4f} ({min(shares):.4f})")
        rows.append(row)
    head = ["layer", *(f"`{name}`, {budget}" for name in (OURS_32, OURS) for budget in budgets)]
    return f"""## By layer

Mean overlap with `{KVPRESS}` over prompts and KV heads (least of a head of a prompt).

{_table(head, rows)}"""


def _accuracy(answers: Sequence[Answer]) -> str:
    rows = []
    for budget in dict.fromkeys(answer.budget for answer in answers):
        right = {
            name: [float(one.right) for one in answers if (one.budget, one.engine) == (budget, name)]
            for name in (KVPRESS, OURS_32, OURS)
        }
        row = [str(budget or "full")]
        for values in right.values():
            share = intervals.binomial(int(sum(values)), len(values))
            row.append(f"{int(sum(values))}/{len(values)} ({share.low:.2f} to {share.high:.2f})")
        for name in (OURS_32, OURS):
            change = intervals.paired_difference(right[name], right[KVPRESS])
            row.append(f"{change.estimate:+.2f} ({change.low:+.2f} to {change.high:+.2f})")
        said = {key: [one.text for one in answers if (one.budget, one.engine) == (budget, key)] for key in right}
        for name in (OURS_32, OURS):
            row.append(f"{sum(a == b for a, b in zip(said[name], said[KVPRESS], strict=True))}/{len(said[name])}")
        rows.append(row)
    head = ["budget", *(f"`{name}`" for name in (KVPRESS, OURS_32, OURS))]
    head += [f"`{name}` - `{KVPRESS}`" for name in (OURS_32, OURS)]
    head += [f"`{name}`: same text" for name in (OURS_32, OURS)]
    return f"""## Right answers

With 95 % intervals: of the share, and of the paired difference.

{_table(head, rows)}"""


def _answers(answers: Sequence[Answer]) -> str:
    rows = []
    for seed, budget in dict.fromkeys((one.seed, one.budget) for one in answers):
        said = {one.engine: one for one in answers if (one.seed, one.budget) == (seed, budget)}
        texts = [_cell(said[name].text) for name in (KVPRESS, OURS_32, OURS)]
        same = [texts[0], *("=" if text == texts[0] else text for text in texts[1:])]
        rows.append([str(seed), str(budget or "full"), said[KVPRESS].code, *same])
    return f"""## Answers

\\= stands for the same text as `{KVPRESS}`'s; an answer ends after {_MAX_ANSWER} tokens.

{_table(["seed", "budget", "code", *(f"`{name}`" for name in (KVPRESS, OURS_32, OURS))], rows)}"""


def _cell(text: str) -> str:
    # as code, so that nothing in it is taken for markup
    plain = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else "(nothing)"


# the command


def _budgets(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers of cells, such as 512,256") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="SnapKV here beside NVIDIA's kvpress: kept cells and answers, on the same weights and prompts."
    )
    parser.add_argument(
        "-m", "--model", default="smollm2", help="a GGUF with a chat template, or a known name (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=20, help="prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="of the text (%(default)s)")
    parser.add_argument("--budgets", type=_budgets, default=[1024, 512, 256], help="in cells (1024,512,256)")
    parser.add_argument("--window", type=int, default=32, help="last tokens whose queries score the rest (%(default)s)")
    parser.add_argument("--kernel", type=int, default=5, help="cells that are averaged, odd (%(default)s)")
    parser.add_argument(
        "--controls", type=int, default=3, help="prompts that kvpress also runs in other roundings (%(default)s)"
    )
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1, help="of either engine (%(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=models.cache_dir() / "kvpress", help="folder for the float32 weights"
    )
    parser.add_argument("--json", type=Path, help="file for every number")
    parser.add_argument("--markdown", type=Path, help="file for the page, standard output without it")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison and write its files."""
    parser = _parser()
    given = parser.parse_args(arguments)
    missing = [name for name in ("torch", "transformers", "kvpress") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"no {', '.join(missing)}: run pip install -r {Path(__file__).with_name('requirements.txt')}")
    if min(given.seeds, given.threads) < 1:
        parser.error(f"--seeds {given.seeds} --threads {given.threads}: must be at least 1")
    files = [file for file in (given.json, given.markdown) if file is not None]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    try:
        result = measure(
            models.resolve_model(given.model),
            seeds=given.seeds,
            n_tokens=given.tokens,
            budgets=given.budgets,
            controls=given.controls,
            settings=Settings(given.window, given.kernel),
            n_threads=given.threads,
            cache=given.cache,
        )
    except (ValueError, models.ModelError) as error:
        parser.error(str(error))
    command = shlex.join(["python", "tools/kvpress/compare.py", *(sys.argv[1:] if arguments is None else arguments)])
    facts = system.describe(paths=False)
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch", "gguf", "llama_cpp_python")}
    versions |= {"snapkv-gguf": facts["snapkv_gguf"], "llama.cpp": facts["llama_cpp_commit"]}
    result = {"command": command, "versions": versions, "system": facts, **result}
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = markdown(result)
    if given.markdown is None:
        print(page, end="")
    else:
        given.markdown.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
