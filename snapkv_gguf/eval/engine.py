"""Evaluates samples: one prefill per prompt serves all methods.

The sequence is saved before the last tokens of the prompt and restored for each method, which evaluates those tokens
again: captured queries are not part of a saved sequence.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _capi
from ..config import Rule, SnapKV
from ..llama import Llama, SnapKVStats
from ..prompt import Vocabulary, context_size
from . import methods as names
from .metrics import METRICS
from .schema import N_NEXT, Question, Record, Sample

import llama_cpp  # isort: skip

Method = tuple[str, int | float]

_FULL: Method = (names.FULL, 0)

_CALIBRATION_TEXT = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class _Saved:
    tokens: tuple[int, ...]
    data: ctypes.Array[ctypes.c_uint8]
    observed: npt.NDArray[np.float64] | None


@dataclass(frozen=True)
class _Start:
    """Where a method begins to answer.

    Attributes:
        method: Its name and budget.
        stats: Of the pass, None if there was none.
        cells: In use.
        prefill_seconds: Of the prompt.
        observe_ms: Spent in adding up the attention of the prompt's tokens, which rule h2o needs.
    """

    method: Method
    stats: SnapKVStats | None
    cells: int
    prefill_seconds: float
    observe_ms: float


class Engine:
    """A model in one context, for all samples and methods of a run.

    Args:
        methods: By name and budget, None for the full cache; see ``methods.expand()``.
        n_tokens: Longest prompt with its answers, in tokens.
        **kwargs: Of Llama.

    Raises:
        ValueError: The model's cache cannot be compacted.
    """

    def __init__(self, model_path: Path, methods: Mapping[Method, SnapKV | None], n_tokens: int, **kwargs: Any) -> None:
        self.methods = methods
        # those that read in chunks set up the context for themselves
        configs = [config for config in methods.values() if config is not None and config.chunk is None]
        # the last tokens are evaluated anew for each method
        self._window = max((config.window for config in configs), default=1)
        observes = any(config.rule == "h2o" for config in configs)
        rule: Rule = "h2o" if observes else "snapkv"
        self._base = SnapKV(budget=self._window + 1, window=self._window, recent=0, rule=rule)
        self._llm = Llama(
            str(model_path),
            snapkv=self._base,
            n_ctx=context_size(n_tokens + 1),
            verbose=False,
            **kwargs,
        )
        self._vocabulary = Vocabulary(model_path)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._vocabulary.__exit__(None, None, None)
        self._llm.close()

    def calibrate(self, n_tokens: int) -> dict[str, float]:
        """Seconds by what they are spent in, as ``runs.Estimate`` has them, from ``n_tokens`` of prompt."""
        llm = self._llm
        tokens = (self._vocabulary.plain(_CALIBRATION_TEXT) * n_tokens)[:n_tokens]

        def decode() -> float:
            return sum(self._step(tokens[0]) for _ in range(4)) / 4

        llm.eval(tokens[:16])  # touches weights and buffers for the first time
        first = decode()
        llm.reset()
        starts, seconds = list(range(0, n_tokens, llm.n_batch)), []
        for start in starts:
            started = time.perf_counter()
            llm.eval(tokens[start : start + llm.n_batch])
            self._logits()
            seconds.append((time.perf_counter() - started) / llm.n_batch)
        slope, batch = np.polyfit([start + llm.n_batch / 2 for start in starts], seconds, 1)
        started = time.perf_counter()
        self._restore(self._save(tokens))
        restore = (time.perf_counter() - started) / n_tokens
        last = decode()
        return {
            "batch": max(float(batch), min(seconds) / 2),
            "slope": max(float(slope), 0.0),
            "decode": first,
            "decode_slope": max(last - first, 0.0) / n_tokens,
            "restore": restore,
        }

    def run(self, sample: Sample, wanted: Collection[Method]) -> Iterator[Record]:
        """Records of the sample by the methods wanted; the full cache is evaluated first where others need it."""
        yield from self._answers(sample, wanted) if sample.questions else self._text(sample, wanted)

    def kept(self, sample: Sample, wanted: Collection[Method]) -> dict[str, Any]:
        """Which tokens of the sample's prompt each layer and KV head keeps, as ``kept.json`` has it."""
        prompt = prompt_tokens(self._vocabulary, sample)
        maps = []
        for start in self._starts(prompt, wanted, sample.questions[0].probe):
            if start.stats is None:
                continue
            layers = [
                {
                    "layer": layer.il,
                    "heads": [self._llm.kept_positions(layer.il, head).tolist() for head in range(layer.n_head_kv)],
                }
                for layer in _capi.layers(self._llm.ctx)
            ]
            maps.append({"method": start.method[0], "budget": start.method[1], "layers": layers})
        return {"sample": sample.id, "tokens": [self._vocabulary.piece(token) for token in prompt], "maps": maps}

    # answers

    def _answers(self, sample: Sample, wanted: Collection[Method]) -> Iterator[Record]:
        score = METRICS[sample.metric]
        prompt = prompt_tokens(self._vocabulary, sample)
        first, *later = sample.questions
        records = []
        for start in self._starts(prompt, wanted, first.probe):
            answer, tokens, seconds = self._answer(first)
            answers, scores = [answer], {"score": score(answer, first)}
            for i, question in enumerate(later, start=2):
                self._llm.eval(self._next(question))
                answer, more, more_seconds = self._answer(question)
                answers.append(answer)
                scores[f"score_{i}"] = score(answer, question)
                tokens, seconds = tokens + more, seconds + more_seconds
            records.append(self._record(sample, start, len(prompt), scores, answers, tokens, seconds))
        # with the document read again, and a pass made for the question
        for i, question in enumerate(later, start=2):
            alone = replace(sample, questions=(question,))
            for j, _ in enumerate(self._starts(prompt_tokens(self._vocabulary, alone), wanted, question.probe)):
                answer, _, _ = self._answer(question)
                scores = {**records[j].scores, f"reread_{i}": score(answer, question)}
                records[j] = replace(records[j], scores=scores, answers=(*records[j].answers, answer))
        yield from records

    def _next(self, question: Question) -> list[int]:
        lead = _lead(self._vocabulary, question)
        if self._vocabulary.has_chat_template:
            return self._vocabulary.next_turn(question.text, lead)
        text = f"\n\n{question.text}\n{lead}"
        return list(self._llm.tokenize(text.encode(), add_bos=False))

    def _answer(self, question: Question) -> tuple[str, int, float]:
        """Greedy answer from the current logits, tokens evaluated for it, and their seconds."""
        tokens: list[int] = []
        seconds = 0.0
        token = int(self._logits().argmax())
        while not llama_cpp.llama_vocab_is_eog(self._llm._model.vocab, token) and len(tokens) < question.max_tokens:
            tokens.append(token)
            seconds += self._step(token)
            token = int(self._logits().argmax())
        return bytes(self._llm.detokenize(tokens)).decode(errors="replace"), len(tokens), seconds

    # running text

    def _text(self, sample: Sample, wanted: Collection[Method]) -> Iterator[Record]:
        tokens = self._vocabulary.plain(sample.context)
        n = min(int(sample.fields["length"]), len(tokens) - N_NEXT)
        prompt, following = tokens[:n], tokens[n : n + N_NEXT]
        expected = np.empty((0, 0), np.float32)
        for start in self._starts(prompt, {_FULL, *wanted}, ""):
            seconds = 0.0
            # of each token of the text, before it is evaluated
            logs = np.empty((len(following), self._llm.n_vocab()), np.float32)
            for i, token in enumerate(following):
                logs[i] = self._logits()
                logs[i] -= logs[i].max()
                logs[i] -= np.log(np.exp(logs[i], dtype=np.float64).sum())
                seconds += self._step(token)
            if start.method == _FULL:
                expected = logs
            scores = {
                "kl": float(
                    np.mean([np.exp(p, dtype=np.float64) @ (p - q) for p, q in zip(expected, logs, strict=True)])
                ),
                "same_top": float((expected.argmax(axis=1) == logs.argmax(axis=1)).mean()),
                "perplexity": float(np.exp(-logs[np.arange(len(following)), following].mean(dtype=np.float64))),
            }
            if start.method in wanted:
                yield self._record(sample, start, len(prompt), scores, [], len(following), seconds)

    # one prompt, many methods

    def _starts(self, prompt: Sequence[int], wanted: Collection[Method], question: str) -> Iterator[_Start]:
        """For each method leave the context where its answer begins, the full cache first."""
        in_chunks = {method for method, config in self.methods.items() if config is not None and config.chunk}
        at_once = {method for method in wanted if method not in in_chunks}
        if at_once:
            yield from self._at_once(prompt, at_once)
        for method in self.methods:
            if method in in_chunks and method in wanted:
                yield self._in_chunks(method, prompt, question)

    def _in_chunks(self, method: Method, prompt: Sequence[int], question: str) -> _Start:
        """Evaluate the prompt in as many cells as the method has."""
        llm, config = self._llm, self.methods[method]
        assert config is not None
        if config.probe == names.QUESTION:
            config = replace(config, probe=question or config.window)
        self._enable(config)
        started = time.perf_counter()
        llm.eval(prompt)
        self._logits()
        seconds = time.perf_counter() - started
        return _Start(method, llm.compact(), llm.kv_cells, seconds, 0.0)

    def _enable(self, config: SnapKV) -> None:
        """Empty the context, for a method's settings."""
        llm = self._llm
        llm.reset()
        llama_cpp.llama_memory_clear(llm._ctx.memory, False)
        if llm.snapkv != config:
            llm.snapkv, llm._cells = config, names.cells(config)
            llm._enable(config)

    def _at_once(self, prompt: Sequence[int], wanted: Collection[Method]) -> Iterator[_Start]:
        """Evaluate the prompt once for all methods."""
        self._enable(self._base)
        if len(prompt) <= self._window:
            raise ValueError(f"a prompt of {len(prompt)} tokens: must be longer than the window of {self._window}")
        llm = self._llm
        body, tail = prompt[: -self._window], prompt[-self._window :]
        llm.reset()
        observed_before = llm.observe_seconds
        started = time.perf_counter()
        llm.eval(body)
        self._logits()
        prefill = time.perf_counter() - started - (llm.observe_seconds - observed_before)
        saved = self._save(body)
        observing = llm.observe_seconds - observed_before
        for method, config in self.methods.items():
            if method not in wanted:
                continue
            self._restore(saved)
            started = time.perf_counter()
            llm.eval(tail)
            self._logits()
            seconds = prefill + time.perf_counter() - started
            stats = None
            # a budget that the prompt does not exceed changes nothing
            if config is not None:
                stats = llm.compact(config)
            observe_ms = 1000 * observing if config is not None and config.rule == "h2o" else 0.0
            yield _Start(method, stats, llm.kv_cells, seconds, observe_ms)

    def _save(self, tokens: Sequence[int]) -> _Saved:
        """The sequence; as Llama.save_state(), which also copies logits of a whole batch."""
        llm = self._llm
        llm._observe(llm.n_batch)
        size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
        data = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(llm.ctx, data, size, 0) != size:
            raise RuntimeError("the sequence could not be saved")
        return _Saved(tuple(tokens), data, _capi.observed(llm.ctx, 0) if llm._observes() else None)

    def _restore(self, saved: _Saved) -> None:
        llm = self._llm
        llm.reset()
        llama_cpp.llama_memory_clear(llm._ctx.memory, False)
        if llama_cpp.llama_state_seq_set_data(llm.ctx, saved.data, len(saved.data), 0) == 0:
            raise RuntimeError("the sequence could not be restored")
        llm.input_ids[: len(saved.tokens)] = saved.tokens
        llm.n_tokens = len(saved.tokens)
        if saved.observed is not None:
            _capi.set_observed(llm.ctx, 0, saved.observed)

    def _logits(self) -> npt.NDArray[np.float32]:
        """Of the last token, [n_vocab], valid until the next evaluation; waits for a device that works on its own."""
        return np.ctypeslib.as_array(self._llm._ctx.get_logits_ith(-1), shape=(self._llm.n_vocab(),))

    def _step(self, token: int) -> float:
        started = time.perf_counter()
        self._llm.eval([token])
        self._logits()
        return time.perf_counter() - started

    @staticmethod
    def _record(
        sample: Sample,
        start: _Start,
        n_prompt: int,
        scores: Mapping[str, float],
        answers: Sequence[str],
        n_decoded: int,
        decode_seconds: float,
    ) -> Record:
        ms = start.stats.milliseconds if start.stats is not None and start.stats.reason is None else None
        return Record(
            sample=sample.id,
            task=sample.task,
            fields=sample.fields,
            method=start.method[0],
            budget=start.method[1],
            prompt_tokens=n_prompt,
            cells=start.cells,
            scores=scores,
            answers=tuple(answers),
            references=sample.questions[0].references if sample.questions else (),
            prefill_seconds=start.prefill_seconds,
            pass_ms=ms.total + start.observe_ms if ms else 0.0,
            parts_ms={"score_ms": ms.score + start.observe_ms, "select_ms": ms.select, "move_ms": ms.move}
            if ms
            else {},
            decode_tokens=n_decoded,
            decode_seconds=decode_seconds,
        )


def prompt_tokens(vocabulary: Vocabulary, sample: Sample) -> list[int]:
    """The context and the first question: in the chat template, or as a document for a base model to complete."""
    if not sample.questions:
        return vocabulary.plain(sample.context)[: int(sample.fields["length"])]
    question = sample.questions[0]
    lead = _lead(vocabulary, question)
    text = f"{sample.context}\n\n{question.text}"
    if vocabulary.has_chat_template:
        return vocabulary.chat(text, lead)
    return vocabulary.plain(f"{text}\n{lead}")


def _lead(vocabulary: Vocabulary, question: Question) -> str:
    return question.lead if question.lead_in_chat or not vocabulary.has_chat_template else ""


def room_for_answers(sample: Sample) -> int:
    """Tokens after the prompt, the following questions included."""
    if not sample.questions:
        return N_NEXT
    # a token has at least a character, a turn of a chat template at most 64 tokens of its own
    later = sum(len(question.text) + len(question.lead) + 64 for question in sample.questions[1:])
    return later + sum(question.max_tokens for question in sample.questions)
