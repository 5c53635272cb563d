"""llama_cpp.Llama with the prompt's KV cache compacted after every prompt longer than the budget."""

# llama_cpp is typed, but not all of its functions are
# mypy: allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import contextlib
import inspect
import re
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _capi
from ._capi import SnapKVError, Status
from .config import ResolvedSnapKV, SnapKV

# after _capi, which makes llama_cpp load our libraries
import llama_cpp  # isort: skip
from llama_cpp.llama_speculative import LlamaDraftModel  # isort: skip

_GENERATE = inspect.signature(llama_cpp.Llama.generate)


@dataclass(frozen=True)
class Milliseconds:
    """Time of a pass: window attention, selection on the host, moving the rows."""

    total: float = 0.0
    score: float = 0.0
    select: float = 0.0
    move: float = 0.0


@dataclass(frozen=True)
class SnapKVStats:
    """What the last pass did.

    Attributes:
        prompt_tokens: Tokens of the sequence.
        cells_before: KV cells of the sequence before the pass.
        cells_after: KV cells after it.
        window: Tokens whose queries scored the others, fewer than asked for if older queries are gone.
        recent: Last cells that were kept in any case.
        milliseconds: Where the time went.
        bytes_freed: K and V bytes of the released cells, in the compacted layers.
        bytes_grown: Growth of llama.cpp's compute buffers by the pass.
        chunk_passes: Passes before that, while the prompt was read in chunks.
        chunk_milliseconds: Time of those, and of their probes.
        answer_passes: Passes since then, to make room for the answer.
        reason: Why nothing was done, None if the cache was compacted.
    """

    prompt_tokens: int
    cells_before: int
    cells_after: int
    window: int = 0
    recent: int = 0
    milliseconds: Milliseconds = Milliseconds()
    bytes_freed: int = 0
    bytes_grown: int = 0
    chunk_passes: int = 0
    chunk_milliseconds: float = 0.0
    answer_passes: int = 0
    reason: str | None = None


class Llama(llama_cpp.Llama):
    """llama_cpp.Llama, and a pass after every prompt that is longer than the budget.

    The first generated token comes from the prompt's exact logits. A prompt that continues the compacted one (the
    next chat turn) goes on from the compacted cache; the very same prompt is answered again from it, starting from
    the same exact logits; any other prompt is evaluated in full, because what was kept was chosen for the old one.

    With ``SnapKV(chunk=...)`` a prompt, and an answer, may be longer than ``n_ctx``, which is then the number of KV
    cells: whenever they are full, a pass makes room. :attr:`context_tokens` says how long.

    The low-level methods eval() and sample() run no pass: call compact() between them.

    Args:
        model_path: A GGUF file.
        snapkv: True for the recommended settings, a SnapKV or a dict of its fields for others, None or False for none.
        **kwargs: All of llama_cpp.Llama's.

    Raises:
        ValueError: As llama_cpp.Llama, and for settings out of range, embedding=True, or a model whose cache cannot be
            compacted.
        TypeError: ``snapkv`` has the wrong type.
    """

    #: With rule h2o, spent in adding up the attention of evaluated tokens since the instance was made.
    observe_seconds: float = 0.0

    #: Called in eval() after each batch with the tokens done and the tokens to do.
    on_eval: Callable[[int, int], None] | None = None

    n_tokens: int
    input_ids: npt.NDArray[np.intc]
    draft_model: LlamaDraftModel | None
    scores: npt.NDArray[np.single]
    _n_ctx: int
    _requires_eval: bool
    _n_heads = 0  # KV heads of all compacted layers, once they were counted

    _probe: int | list[int] = 0  # of chunks: last tokens of the prompt, or tokens of their own
    _cells = 0  # of chunks: at most so many, 0 for all that the context has
    _shift = 0  # tokens less positions, with packed positions
    _answering = False  # the tokens that eval() gets were generated
    _chunk_passes = 0  # since the last pass of a prompt
    _chunk_milliseconds = 0.0

    # of an instance whose arguments were refused: it is closed all the same
    _stack = contextlib.ExitStack()

    def __init__(
        self,
        model_path: str,
        *,
        snapkv: SnapKV | Mapping[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.snapkv = SnapKV.coerce(snapkv)
        self._stats: SnapKVStats | None = None
        # tokens that the kept cells were chosen for; a prompt that does not begin with all of them starts anew
        self._prompt_end = 0
        # their last logits, computed before the pass
        self._prompt_logits: npt.NDArray[np.float32] | None = None
        # the settings of that pass
        self._prompt_config: SnapKV | None = None
        if self.snapkv is not None and kwargs.get("embedding"):
            raise ValueError(
                "embedding=True and snapkv exclude each other: an embedding needs no cache after its prompt; "
                "use two instances, the one for embeddings with snapkv=False"
            )
        super().__init__(model_path, **kwargs)
        if self.snapkv is not None:
            try:
                self._enable(self.snapkv)
            except ValueError:
                self.close()
                raise

    def _enable(self, snapkv: SnapKV) -> None:
        params = _capi.Params.of(snapkv.resolve(self._n_ctx))
        problem = _capi.params_check(params)
        if problem:
            raise ValueError(f"{snapkv}: {problem}")
        status = _capi.init(self.ctx, params)
        if status is not Status.OK:
            raise ValueError(
                f"{self.model_path} cannot be used with snapkv: {_capi.status_str(status)} ({status.name}); "
                "pass snapkv=False (--no-snapkv)"
            )
        self._n_ctx = self.n_ctx()
        if snapkv.chunk is not None:
            self._enable_chunks(snapkv)
        if snapkv.positions == "packed":
            self._ctx.kv_cache_seq_rm = _RemoveByTokens(self)

    def _enable_chunks(self, snapkv: SnapKV) -> None:
        cells = self._cells or self._n_ctx
        budget = snapkv.resolve(cells).budget
        if isinstance(snapkv.probe, str):
            self._probe = self.tokenize(snapkv.probe.encode(), add_bos=False, special=True)
        else:
            self._probe = snapkv.probe
        n_probe = self._probe if isinstance(self._probe, int) else len(self._probe)
        problem = snapkv.check_cells(cells, n_probe)
        if problem:
            raise ValueError(f"n_ctx={cells}: {problem}")
        spare = cells - budget - n_probe
        if spare < (snapkv.chunk or 0) // 8:
            warnings.warn(
                f"snapkv: {cells} cells leave {spare} beside the budget of {budget} and the {n_probe} tokens of the "
                f"probe, so a long prompt takes a pass every {spare} tokens: raise n_ctx, or lower the budget",
                RuntimeWarning,
                stacklevel=4,
            )
        if self.draft_model is not None:
            # a token and its draft are evaluated at once, after a pass; a rejected one must leave a window's queries
            longest = min(cells - budget, self.n_batch) - 1
            self.draft_model = _ShortDrafts(self.draft_model, min(longest, _capi.RING_SLACK))
        # llama_cpp takes it for the longest prompt
        self._n_ctx = min(_capi.n_pos_max(self.ctx), _MAX_TOKENS)
        ids = np.zeros(self._n_ctx, dtype=np.intc)
        ids[: self.n_tokens] = self.input_ids[: self.n_tokens]
        self.input_ids = ids

    # the pass

    @property
    def snapkv_stats(self) -> SnapKVStats | None:
        """What the last pass did, None before the first prompt and without snapkv."""
        return self._stats

    @property
    def kv_cells(self) -> int:
        """KV cells in use, each one a row of K and V in every layer and KV head that is compacted."""
        if self.n_tokens == 0:
            return 0  # what is left of earlier tokens goes with the next evaluation
        n_cells = _capi.n_cells(self.ctx, 0)
        if n_cells >= 0:
            return n_cells
        last = int(llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, 0))
        first = int(llama_cpp.llama_memory_seq_pos_min(self._ctx.memory, 0))
        return last - first + 1 if last >= 0 else 0

    @property
    def context_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together: without chunks as many as there are cells."""
        return self._n_ctx

    def kept_positions(self, layer: int, head: int) -> npt.NDArray[np.int32]:
        """Positions of the tokens whose rows a KV head of a layer holds: [kv_cells].

        Args:
            layer: The layer's index in the model.
            head: KV head.

        Raises:
            IndexError: The pass does not compact this layer, or it has no such KV head.
            SnapKVError: snapkv is off.
            RuntimeError: The positions are not known: the state was restored.
        """
        self._enabled()
        layers = _capi.layers(self.ctx)
        members = [{reader.il for reader in known.readers} for known in layers]
        index = next((i for i, known in enumerate(members) if layer in known), None)
        if index is None:
            raise IndexError(f"layer={layer} is not compacted, the layers are {sorted(set().union(*members))}")
        if not 0 <= head < layers[index].n_head_kv:
            raise IndexError(f"head={head}: layer {layer} has {layers[index].n_head_kv} KV heads")
        positions = _capi.kept(self.ctx, 0, index, head)
        if positions.size == 0 and self.kv_cells > 0:
            raise RuntimeError("the kept positions are not part of a saved state; evaluate the prompt again")
        return positions

    def compact(self, config: SnapKV | None = None) -> SnapKVStats:
        """Run a pass now, over all tokens evaluated so far. The logits of the last evaluation stay valid.

        Args:
            config: Settings of this pass, None for the instance's; its window must not be larger than theirs.

        Raises:
            SnapKVError: The pass was refused (nothing was changed), or failed.
            ValueError: The window is larger than the one queries are captured for, or positions are not the instance's.
        """
        own = self._enabled()
        config = SnapKV.coerce(config) or own
        if config.window > own.window:
            raise ValueError(
                f"window={config.window}: queries are captured for {own.window} tokens; create Llama with "
                f"snapkv=SnapKV(window={config.window}, ...)"
            )
        if config.positions != own.positions:
            raise ValueError(
                f"positions={config.positions!r}: this instance's are {own.positions!r}; create Llama with "
                f"snapkv=SnapKV(positions={config.positions!r}, ...)"
            )
        status, self._stats = self._pass(config)
        if status < 0:
            raise SnapKVError(status, self._stats.reason or "")
        return self._stats

    def _enabled(self) -> SnapKV:
        if self.snapkv is None:
            raise SnapKVError(Status.NOT_ENABLED, "create Llama with snapkv=True")
        return self.snapkv

    def _chunks(self) -> bool:
        return self.snapkv is not None and self.snapkv.chunk is not None

    def _resolve(self, config: SnapKV) -> ResolvedSnapKV:
        # a share of a prompt that is longer than the cells is one of the cells
        return config.resolve(min(self.n_tokens, self._cells or self.n_ctx()) if self._chunks() else self.n_tokens)

    def _compact_prompt(self) -> None:
        status, stats = self._pass(self._enabled())
        self._stats = replace(
            stats, chunk_passes=self._chunk_passes, chunk_milliseconds=self._chunk_milliseconds, answer_passes=0
        )
        if status < 0:
            warnings.warn(
                f"snapkv: the prompt was not compacted, generation goes on with the full cache: {self._stats.reason}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _pass(self, config: SnapKV) -> tuple[Status, SnapKVStats]:
        settings = self._resolve(config)
        n_cells = self.kv_cells
        prefix = n_cells - settings.window
        if n_cells > settings.budget and settings.kernel > prefix:
            reason = f"kernel={settings.kernel} is wider than the {prefix} cells before the window, lower it"
            return Status.INVALID_PARAMS, SnapKVStats(self.n_tokens, n_cells, n_cells, reason=reason)

        logits = self._last_logits()
        before = (self._prompt_end, self._prompt_logits, self._prompt_config)
        # set first: if Ctrl-C comes in between, the prompt is evaluated again, nothing worse
        self._prompt_end, self._prompt_logits, self._prompt_config = self.n_tokens, None, config
        status, stats = _capi.compact(self.ctx, 0, _capi.Params.of(settings))
        if status is Status.SEQUENCE_LOST:
            self.reset()
            raise SnapKVError(status, "send the prompt again")
        if status is Status.OK:
            self._prompt_logits = logits
            self._synchronize()
            return status, self._read(stats)
        self._prompt_end, self._prompt_logits, self._prompt_config = before
        return status, SnapKVStats(self.n_tokens, n_cells, n_cells, reason=_reason(status, n_cells, settings))

    def _read(self, stats: _capi.Stats) -> SnapKVStats:
        times = (stats.t_total_us, stats.t_score_us, stats.t_select_us, stats.t_move_us)
        return SnapKVStats(
            prompt_tokens=self.n_tokens,
            cells_before=stats.n_cells_before,
            cells_after=stats.n_cells_after,
            window=stats.n_window,
            recent=stats.n_recent,
            milliseconds=Milliseconds(*(us / 1000 for us in times)),
            bytes_freed=stats.n_bytes_freed,
            bytes_grown=stats.n_bytes_grown,
        )

    # which part of the cache a new prompt may use

    def _forget(self) -> None:
        self._prompt_end = 0
        self._prompt_logits = None
        self._prompt_config = None

    def _last_logits(self) -> npt.NDArray[np.float32] | None:
        view = self._logits_view()
        return None if view is None else view.copy()

    def _logits_view(self) -> npt.NDArray[np.float32] | None:
        if self._requires_eval:
            return None
        pointer = self._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,)) if pointer else None

    def _prepare_prefix(self, snapkv: SnapKV, tokens: Sequence[int]) -> None:
        """Cut what is cached to the part that the prompt may go on from; llama_cpp's generate() finds it there."""
        n = len(tokens)
        if self._observes() and self._n_unobserved() > self.context_params.n_ubatch:
            self.reset()  # what was removed or restored has taken the sums of rule h2o with it
        if self._prompt_config not in (None, snapkv):
            self.reset()  # a state that was compacted with other settings, or compact() with others
        n_shared = self.longest_token_prefix(self.input_ids[: self.n_tokens].tolist(), tokens)
        if n_shared == n == self.n_tokens and not self._requires_eval:
            return  # to be sampled from at once
        if n_shared == n == self._prompt_end:
            if not self._restore_prompt():
                self.reset()  # a replay of the last token would not give its exact logits
            return
        # evaluate at least one token, for its logits, and of a prompt to be compacted at least a window, for its
        # queries: those of generated and of restored tokens are not the prompt's
        n_kept = min(n_shared, max(n - 1, 0))
        if n > snapkv.resolve(n).budget:
            n_kept = min(n_kept, max(self._prompt_end, n - snapkv.window))
        # what is cut off has left its attention in the sums of rule h2o
        if n_shared < self._prompt_end or (n_kept < self.n_tokens and (self._swa_evicts() or self._observes())):
            self.reset()
        elif n_kept < self.n_tokens:
            self._requires_eval = True
            self.n_tokens = n_kept

    def _restore_prompt(self) -> bool:
        """Back to the moment after the pass: the last logits of the prompt, and no tokens after it."""
        if self._prompt_logits is None or self._swa_evicts() or self._observes():
            return False
        # interrupted here, or between the next lines, the prompt's last token counts as not evaluated
        self._requires_eval = True
        if not self._ctx.kv_cache_seq_rm(-1, self._prompt_end, -1):
            return False
        self.n_tokens = self._prompt_end
        # any token gives a row of logits to write to; it is taken back
        self._batch.set_batch(batch=[0], n_past=self.n_tokens - self._shift, logits_all=False)
        self._ctx.decode(self._batch)
        if not self._ctx.kv_cache_seq_rm(-1, self._prompt_end, -1):
            return False
        np.ctypeslib.as_array(self._ctx.get_logits_ith(-1), shape=(self._n_vocab,))[:] = self._prompt_logits
        self._requires_eval = False
        return True

    def _swa_evicts(self) -> bool:
        # what a sliding-window layer has dropped is missing once the last tokens are taken back
        return bool(llama_cpp.llama_model_n_swa(self._model.model) > 0 and not self.context_params.swa_full)

    # llama_cpp.Llama

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """llama_cpp.Llama.generate(), with a pass between the first token's sampling and its evaluation."""
        if self.snapkv is not None and _GENERATE.bind(self, tokens, *args, **kwargs).arguments.get("reset", True):
            self._prepare_prefix(self.snapkv, tokens)
        self._chunk_passes, self._chunk_milliseconds = 0, 0.0
        with contextlib.closing(super().generate(tokens, *args, **kwargs)) as generator:
            # evaluates the prompt and samples
            token = next(generator, None)
            if self.snapkv is not None:
                self._compact_prompt()
            while token is not None:
                sent = yield token
                self._answering = True
                try:
                    token = generator.send(sent)
                except StopIteration:
                    return
                finally:
                    self._answering = False

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        try:
            yield from super()._create_completion(*args, **kwargs)
        except ValueError as error:
            if "exceed context window" not in str(error):
                raise
            raise ValueError(self._too_long(str(error))) from None

    def _too_long(self, text: str) -> str:
        if not self._chunks():
            return text if self.snapkv is None else f"{text}; snapkv=SnapKV(chunk=1024) reads prompts longer than that"
        text = re.sub(r"context window of \d+", f"the {self._n_ctx} tokens of the model's context", text)
        return f"{text}; snapkv=SnapKV(positions='packed', ...) reads longer ones, rope_freq_scale scales its context"

    def eval(self, tokens: Sequence[int]) -> None:
        """llama_cpp.Llama.eval(), which never runs a pass.

        Raises:
            RuntimeError: As llama_cpp.Llama, and if n_tokens was set back into the compacted part.
        """
        if self.snapkv is not None and self.n_tokens < self._prompt_end:
            self._prompt_logits = None
            frontier = _capi.frontier(self.ctx, 0)
            if 0 < self.n_tokens - self._shift <= frontier or 0 < self.n_tokens <= self._shift:
                # llama_cpp.Llama.eval() does not look at the cache's refusal
                raise RuntimeError(
                    f"n_tokens={self.n_tokens}: tokens up to {frontier + self._shift} were compacted and cannot be "
                    "removed one by one; call reset() and evaluate the prompt again",
                )
        if self.snapkv is not None and (self._chunks() or self.snapkv.positions == "packed"):
            self._eval_chunks(self.snapkv, list(tokens))
            return
        n_batch = min(self.n_batch, self.context_params.n_ubatch) if self._observes() else self.n_batch
        try:
            for start in range(0, max(len(tokens), 1), n_batch):
                batch = tokens[start : start + n_batch]
                self._observe(len(batch))
                super().eval(batch)
                if self.on_eval is not None:
                    self.on_eval(start + len(batch), len(tokens))
        except BaseException:
            # interrupted: the context may hold the logits of tokens that were not counted
            self._requires_eval = True
            raise

    def _eval_chunks(self, snapkv: SnapKV, tokens: list[int]) -> None:
        """eval(), and a pass whenever the cells are full."""
        if self.n_tokens + len(tokens) > self._n_ctx and not self._chunks():
            reads = "SnapKV(chunk=1024) reads longer prompts"
            raise SnapKVError(Status.NO_ROOM, f"{self.n_tokens + len(tokens)} tokens, {self._n_ctx} cells: {reads}")
        if self.n_tokens + len(tokens) > self._n_ctx:
            raise SnapKVError(Status.BEYOND_CONTEXT, f"{self.n_tokens + len(tokens)} tokens, at most {self._n_ctx}")
        bad = next((token for token in tokens if not 0 <= token < self._n_vocab), None)
        if bad is not None:
            raise SnapKVError(Status.INVALID_PARAMS, f"token {bad} is not in the vocabulary of {self._n_vocab}")
        self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        n_before, n_done = self.n_tokens, 0
        if self._logits_all and self.scores.shape[0] < n_before + len(tokens):
            grown = np.empty((2 * (n_before + len(tokens)), self._n_vocab), dtype=np.single)
            grown[:n_before] = self.scores[:n_before]
            self.scores = grown

        def on_batch(done: int, total: int) -> bool:
            nonlocal n_done
            if self._logits_all:
                logits = np.ctypeslib.as_array(self._ctx.get_logits(), shape=((done - n_done) * self._n_vocab,))
                self.scores[n_before + n_done : n_before + done].reshape(-1)[:] = logits
            n_done = done
            if self.on_eval is not None:
                self.on_eval(done, total)
            return True

        settings = _capi.Params.of(snapkv.resolve(self._cells or self.n_ctx()))
        # a generated token asks nothing: the answer's last tokens look
        probe = 0 if self._answering or len(tokens) == 1 else self._probe
        # interrupted, or refused: the context may hold the logits of tokens that were not counted
        self._requires_eval = True
        try:
            status, stats = _capi.prefill(
                self.ctx,
                0,
                tokens,
                params=settings,
                cells=self._cells,
                chunk=max(snapkv.chunk or self.n_ctx(), len(tokens) if self._answering else 0),
                probe=probe,
                logits_all=self._logits_all,
                progress=on_batch,
            )
        except BaseException:
            self.reset()
            raise
        if status is not Status.OK:
            if status in (Status.SEQUENCE_LOST, Status.CANCELLED):
                self.reset()
            raise SnapKVError(status, _REMEDIES.get(status, ""))
        self.input_ids[n_before : n_before + len(tokens)] = tokens
        self.n_tokens = n_before + len(tokens)
        self._requires_eval = not tokens
        if stats.n_passes > 0:
            # what was kept was chosen for all of them
            self._prompt_end, self._prompt_config, self._prompt_logits = self.n_tokens, snapkv, None
            self._synchronize()
        if self._answering and self._stats is not None:
            self._stats = replace(self._stats, answer_passes=self._stats.answer_passes + stats.n_passes)
        else:
            self._chunk_passes += stats.n_passes
            self._chunk_milliseconds += (stats.t_probe_us + stats.t_pass_us) / 1000

    def _synchronize(self) -> None:
        # packed cells have other positions than their tokens
        last = int(llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, 0))
        self._shift = self.n_tokens - last - 1

    def _observes(self) -> bool:
        return self.snapkv is not None and self.snapkv.rule == "h2o"

    def _observe(self, n_next: int) -> None:
        """Rule h2o: add up the attention of the last tokens, before the queries of ``n_next`` more replace theirs."""
        if not self._observes():
            return
        self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        n_new = self._n_unobserved()
        # more than a ubatch: their queries are gone, and the pass will tell
        if 0 < n_new <= self.context_params.n_ubatch < n_new + n_next:
            started = time.perf_counter()
            _capi.observe(self.ctx, 0)
            self.observe_seconds += time.perf_counter() - started

    def _n_unobserved(self) -> int:
        if not self._n_heads:
            self._n_heads = sum(layer.n_head_kv for layer in _capi.layers(self.ctx))
        return self.kv_cells - _capi.n_observed(self.ctx, 0, self._n_heads)

    def reset(self) -> None:
        """Forget all tokens."""
        self._forget()
        self._shift = 0
        super().reset()

    def save_state(self) -> llama_cpp.LlamaState:
        """llama_cpp.Llama.save_state(); after a pass the state holds the compacted cache."""
        self._observe(self.context_params.n_ubatch)
        state = super().save_state()
        state.input_ids = state.input_ids[: max(self.n_tokens, self.n_ctx())]
        observed = _capi.observed(self.ctx, 0) if self._observes() else None
        setattr(state, _STATE, (self._prompt_end, self._prompt_logits, self._prompt_config, observed))
        return state

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """llama_cpp.Llama.load_state(); a compacted state goes on decoding as before, in any process.

        Raises:
            ValueError: The state was saved after a pass, but snapkv is off here: llama_cpp would take the evicted
                prefix for complete.
            RuntimeError: The state does not fit this context; the context is empty then.
        """
        # one of an earlier version has no sums
        prompt_end, logits, config, observed = (*getattr(state, _STATE, (0, None, None)), None)[:4]
        if prompt_end > 0 and self.snapkv is None:
            raise _CompactedState
        self._forget()
        if self._logits_all and self.scores.shape[0] < state.n_tokens <= self._n_ctx:
            self.scores = np.empty((state.n_tokens, self._n_vocab), dtype=np.single)
        try:
            if state.n_tokens > self._n_ctx:
                raise RuntimeError(f"the state holds {state.n_tokens} tokens, this context takes {self._n_ctx}")
            try:
                super().load_state(state)
            except ValueError as error:
                # arrays of other sizes
                raise RuntimeError(f"the state is of an instance with other n_batch or logits_all: {error}") from error
            if self.snapkv is None and self._prefix_is_gone():
                raise _CompactedState
            if self._observes() and observed is not None:
                _capi.set_observed(self.ctx, 0, observed)
        except BaseException:
            self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
            self.reset()
            self._ctx.kv_cache_clear()
            raise
        # as long as this context, whatever the other one's was
        ids = np.zeros(self._n_ctx, dtype=np.intc)
        ids[: self.n_tokens] = self.input_ids[: self.n_tokens]
        self.input_ids = ids
        if self.snapkv is not None:
            self._synchronize()
            frontier = _capi.frontier(self.ctx, 0)
            if frontier >= 0:
                # a state without our mark: its window is not known, at most as many tokens as were captured here
                self._prompt_end = prompt_end or min(frontier + self._shift + 1 + self.snapkv.window, self.n_tokens)
                self._prompt_logits, self._prompt_config = logits, config

    def _prefix_is_gone(self) -> bool:
        # sliding-window and recurrent memories lose their beginning without a pass
        model = self._model.model
        if llama_cpp.llama_model_n_swa(model) > 0 or self._is_recurrent or self._is_hybrid:
            return False
        return bool(llama_cpp.llama_memory_seq_pos_min(self._ctx.memory, 0) > 0)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "snapkv": self.snapkv}
        if isinstance(self.draft_model, _ShortDrafts):
            state["draft_model"] = self.draft_model.model
        return state


class _ShortDrafts(LlamaDraftModel):
    """Drafts of at most so many tokens."""

    def __init__(self, model: LlamaDraftModel, n_max: int) -> None:
        self.model = model
        self.n_max = n_max

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        draft: npt.NDArray[np.intc] = self.model(input_ids, **kwargs)
        return draft[: self.n_max]


class _RemoveByTokens:
    """The context's kv_cache_seq_rm() with packed positions: what was compacted is removed only as a whole."""

    def __init__(self, llm: Llama) -> None:
        self._remove = type(llm._ctx).kv_cache_seq_rm
        # the context holds this
        self._llm = weakref.ref(llm)

    def __call__(self, seq_id: int, p0: int, p1: int) -> bool:
        llm = self._llm()
        assert llm is not None
        return bool(self._remove(llm._ctx, seq_id, p0 if p0 <= 0 else max(p0 - llm._shift, 1), p1))


# of a context that takes any number: llama_cpp keeps an array of so many
_MAX_TOKENS = 2**22

_REMEDIES = {
    Status.SEQUENCE_LOST: "send the prompt again",
    Status.NO_ROOM: "raise n_ctx, or lower budget or probe",
    Status.BEYOND_CONTEXT: "SnapKV(positions='packed'), or rope_freq_scale",
}

# attribute of a LlamaState: _prompt_end, _prompt_logits, _prompt_config, and with rule h2o the sums of attention
_STATE = "snapkv"


class _CompactedState(ValueError, KeyError):
    """Also a KeyError: llama_cpp's look-up in a cache of states takes it for a miss."""

    def __str__(self) -> str:
        return "the state was saved after a SnapKV pass and its prefix is not complete; create Llama with snapkv"


def _reason(status: Status, n_cells: int, settings: ResolvedSnapKV) -> str:
    if status is Status.WITHIN_BUDGET:
        return f"{n_cells} cells are within the budget of {settings.budget}"
    if status is Status.NOT_OBSERVED:
        return f"not all tokens' attention was added up: rule h2o is needed from the prompt's start ({status.name})"
    return f"{_capi.status_str(status)} ({status.name})"
