"""Llama with prompts and answers longer than its cells, on a seeded tiny model."""

from __future__ import annotations

import contextlib
import gc
import itertools
import pickle
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import Evaluated, complete, logits, make, say, tokens_of

from snapkv_gguf import SnapKV, SnapKVError, tiny

pytestmark = pytest.mark.usefixtures("library")

N_CTX = 256
CHUNKS = SnapKV(budget=64, window=8, kernel=5, recent=0.25, chunk=64, probe=16)
PACKED = SnapKV(budget=64, window=8, kernel=5, recent=0.25, chunk=64, probe=16, positions="packed")
BOTH = pytest.mark.parametrize("config", [CHUNKS, PACKED], ids=["true", "packed"])

SHORT = "".join(f"Line {i}: the quick brown fox. " for i in range(7))
LONG = "".join(f"Line {i}: the quick brown fox jumps over lazy dog {i * i}. " for i in range(40))


def make_chunks(path: Path, config: SnapKV = CHUNKS, **kwargs: Any) -> Any:
    return make(path, config, **{"n_ctx": N_CTX, **kwargs})


@pytest.fixture(params=[CHUNKS, PACKED], ids=["true", "packed"])
def llm(model_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    instance = make_chunks(model_path, request.param)
    yield instance
    instance.close()


def test_a_prompt_that_fits_is_answered_as_without_chunks(llm: Any, model_path: Path) -> None:
    with contextlib.closing(make(model_path, SnapKV(64, 8, 5, recent=0.25), n_ctx=N_CTX)) as plain:
        assert N_CTX > len(tokens_of(plain, SHORT)) > 64
        found, first = [], []
        for instance in (llm, plain):
            generator = instance.generate(tokens_of(instance, SHORT), temp=0.0)
            next(generator)
            first.append(logits(instance))
            generator.close()
            found.append((say(instance, SHORT), instance.kv_cells))
        assert (first[0] == first[1]).all()
        assert llm.snapkv_stats.chunk_passes == 0
        # packed ones are rotated by the pass
        assert found[0] == found[1] or llm.snapkv.positions == "packed"


def test_a_prompt_longer_than_the_cells(llm: Any) -> None:
    n = len(tokens_of(llm, LONG))
    assert n > 5 * N_CTX
    result = complete(llm, LONG, max_tokens=20)
    assert result["usage"] == {"prompt_tokens": n, "completion_tokens": 20, "total_tokens": n + 20}
    assert llm.n_tokens == n + 19
    assert llm.n_ctx() == N_CTX < llm.context_tokens
    stats = llm.snapkv_stats
    assert stats.prompt_tokens == n
    assert stats.chunk_passes > 10
    assert stats.chunk_milliseconds > 0
    assert (stats.cells_after, stats.answer_passes, stats.reason) == (64, 0, None)
    assert llm.kv_cells == 64 + 19
    for layer, head in itertools.product(range(2), range(2)):
        kept = llm.kept_positions(layer, head)
        assert kept.size == llm.kv_cells
        assert np.all(np.diff(kept) > 0)
        assert kept[-16 - 19 :].tolist() == list(range(n - 16, n + 19))


def test_what_looks_while_it_reads(model_path: Path) -> None:
    found = []
    for probe in (0, 16, "Line 7: the quick", "Something else, quite different?"):
        with contextlib.closing(make_chunks(model_path, SnapKV(64, 8, 5, recent=0, chunk=64, probe=probe))) as llm:
            say(llm, LONG)
            found.append(tuple(llm.kept_positions(1, 0)))
    assert len(set(found)) == len(found)


def test_the_same_prompt_again(llm: Any, model_path: Path) -> None:
    tokens = tokens_of(llm, LONG)
    first = say(llm, tokens)
    evaluated = Evaluated(llm)
    assert say(llm, tokens) == first
    assert evaluated.since() <= 12  # from the exact logits
    with contextlib.closing(make_chunks(model_path, llm.snapkv)) as fresh:
        assert say(fresh, tokens) == first


def test_a_prompt_that_goes_on(llm: Any, model_path: Path) -> None:
    tokens = tokens_of(llm, LONG)
    answer = say(llm, tokens)
    evaluated = Evaluated(llm)
    more = [*tokens, *answer, *tokens_of(llm, "And what of the dog? ")]
    second = say(llm, more, 5)
    assert evaluated.since() < 60
    assert llm.n_tokens == len(more) + 4
    # an answer that was cut short, another question: what was kept was chosen for the first
    evaluated.since()
    assert say(llm, [*tokens, *answer[:5]], 3)
    assert evaluated.since() > 0
    other = [*tokens[:-5], *tokens_of(llm, "Why? ")]
    evaluated.since()
    third = say(llm, other)
    assert evaluated.since() >= len(other)
    with contextlib.closing(make_chunks(model_path, llm.snapkv)) as fresh:
        assert say(fresh, other) == third
        assert len(second) == 5


def test_answers_longer_than_the_cells(llm: Any) -> None:
    n = len(tokens_of(llm, SHORT))
    answer = say(llm, SHORT, 1000)
    assert len(answer) == 1000
    assert llm.n_tokens == n + 999
    assert llm.kv_cells <= N_CTX
    # 192 tokens from one pass to the next
    assert llm.snapkv_stats.answer_passes == (999 - 192 - 1) // 192 + 1
    assert np.isfinite(logits(llm)).all()
    # another turn, with the cells nearly full
    evaluated = Evaluated(llm)
    more = [*tokens_of(llm, SHORT), *answer, *tokens_of(llm, "Go on. ")]
    say(llm, more, 3)
    assert evaluated.since() < 20


def test_the_first_answer_is_not_changed_by_the_second(llm: Any) -> None:
    """After an answer for which room was made, its prompt alone is read anew."""
    first = say(llm, SHORT, 400)
    assert say(llm, SHORT, 400) == first


@BOTH
def test_beyond_the_trained_context(config: SnapKV, tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf", tiny.Shape(n_ctx=1024))
    with contextlib.closing(make_chunks(path, config)) as llm:
        tokens = tokens_of(llm, LONG)[:1024]
        if config.positions == "true":
            assert llm.context_tokens == 1024
            with pytest.raises(ValueError, match=r"1024\) exceed the 1024 tokens .*positions='packed'"):
                complete(llm, tokens)
            assert complete(llm, tokens[:1000], max_tokens=None)["usage"]["total_tokens"] == 1024
            with pytest.raises(RuntimeError, match="longer than the context"):
                llm.eval(tokens)
        else:
            assert len(say(llm, tokens * 3, 500)) == 500
            assert llm.n_tokens == 3 * 1024 + 499


def test_without_chunks_a_long_prompt_is_refused_with_a_hint(model_path: Path) -> None:
    with contextlib.closing(make(model_path, SnapKV(64, 8), n_ctx=N_CTX)) as llm:
        with pytest.raises(ValueError, match=r"exceed context window of 256; snapkv=SnapKV\(chunk=1024\)"):
            complete(llm, LONG)
        with pytest.raises(ValueError, match="chunk=1024"):
            list(llm.create_completion(LONG, stream=True))
    with contextlib.closing(make(model_path, None, n_ctx=N_CTX)) as llm, pytest.raises(ValueError, match=r"256$"):
        complete(llm, LONG)


def test_streaming_stop_and_chat(llm: Any) -> None:
    whole = complete(llm, LONG, max_tokens=20)["choices"][0]["text"]
    streamed = complete(llm, LONG, max_tokens=20, stream=True)
    assert "".join(part["choices"][0]["text"] for part in streamed) == whole
    stop = whole[5:8]
    assert complete(llm, LONG, max_tokens=20, stop=[stop])["choices"][0]["text"] == whole[: whole.index(stop)]
    turns = [{"role": "user", "content": LONG}]
    answer = llm.create_chat_completion(turns, max_tokens=5, temperature=0.0)
    assert answer["usage"]["prompt_tokens"] > len(tokens_of(llm, LONG))


@BOTH
def test_logprobs(config: SnapKV, model_path: Path) -> None:
    with contextlib.closing(make_chunks(model_path, config, logits_all=True)) as llm:
        tokens = tokens_of(llm, LONG)
        result = complete(llm, LONG, logprobs=3, echo=True, max_tokens=6)["choices"][0]["logprobs"]
        assert llm.scores.shape[0] > len(tokens) > N_CTX
        with contextlib.closing(make(model_path, None, n_ctx=2048 + 1024, logits_all=True)) as full:
            expected = complete(full, LONG, logprobs=3, echo=True, max_tokens=6)["choices"][0]["logprobs"]
        assert len(result["token_logprobs"]) == len(expected["token_logprobs"])
        # until the first pass nothing differs
        assert result["token_logprobs"][1:190] == pytest.approx(expected["token_logprobs"][1:190], abs=0.02)
        assert result["token_logprobs"][1:] != pytest.approx(expected["token_logprobs"][1:], abs=0.02)


def test_states(llm: Any, model_path: Path) -> None:
    answer = say(llm, LONG, 30)
    state = pickle.loads(pickle.dumps(llm.save_state()))
    assert state.input_ids.size == state.n_tokens == llm.n_tokens
    more = [*tokens_of(llm, LONG), *answer, *tokens_of(llm, "And then? ")]
    expected = say(llm, more, 20)
    for reuse in (True, False):
        with contextlib.closing(make_chunks(model_path, llm.snapkv)) as other:
            if not reuse:
                say(other, SHORT)
            other.load_state(state)
            assert (other.n_tokens, other.kv_cells) == (state.n_tokens, llm.snapkv.budget + 29)
            evaluated = Evaluated(other)
            assert say(other, more, 20) == expected
            assert evaluated.since() < 60


def test_a_cache_of_states(llm: Any) -> None:
    from llama_cpp import LlamaRAMCache

    llm.set_cache(LlamaRAMCache())
    first = complete(llm, LONG)["choices"][0]["text"]
    complete(llm, SHORT)
    evaluated = Evaluated(llm)
    assert complete(llm, LONG)["choices"][0]["text"] == first
    assert evaluated.since() < 60


@pytest.mark.parametrize("stop_at", [64, 512, 1200])
def test_ctrl_c(stop_at: int, llm: Any) -> None:
    expected = say(llm, LONG)
    llm.reset()

    def interrupt(done: int, _: int) -> None:
        if done >= stop_at:
            raise KeyboardInterrupt

    llm.on_eval = interrupt
    with pytest.raises(KeyboardInterrupt):
        say(llm, LONG)
    llm.on_eval = None
    assert (llm.n_tokens, llm.kv_cells) == (0, 0)
    assert say(llm, LONG) == expected


def test_low_level_use(llm: Any) -> None:
    tokens = tokens_of(llm, LONG)
    llm.reset()
    llm.eval(tokens[:1000])
    llm.eval(tokens[1000:])
    assert llm.n_tokens == len(tokens)
    assert llm.kv_cells <= N_CTX
    assert llm.compact().cells_after == 64
    llm.n_tokens = 500
    with pytest.raises(RuntimeError, match="n_tokens=500: tokens up to"):
        llm.eval(tokens[:5])
    own = llm.snapkv.positions
    other: Any = "true" if own == "packed" else "packed"
    with pytest.raises(ValueError, match=f"positions='{other}': this instance's are '{own}'"):
        llm.compact(SnapKV(64, 8, 5, positions=other))
    llm.reset()
    llm.eval(tokens[:7])
    for bad in (-1, llm.n_vocab()):
        with pytest.raises(SnapKVError, match=f"token {bad} is not in the vocabulary"):
            llm.eval([5, bad])
    assert llm.kv_cells == 7
    llm.reset()
    llm.eval([])
    llm.eval(tokens[:5])
    assert llm.kv_cells == 5


def test_draft_model(model_path: Path) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    with contextlib.closing(make_chunks(model_path)) as plain:
        expected = say(plain, LONG, 300)
    with contextlib.closing(make_chunks(model_path, draft_model=LlamaPromptLookupDecoding())) as llm:
        found = say(llm, LONG, 300)
        assert llm.kv_cells <= N_CTX
    # until room was made for the answer, which a draft can move by a few tokens
    assert found[:150] == expected[:150]
    assert len(found) == 300


@pytest.mark.parametrize(("budget", "chunk", "n_draft"), [(64, 1, 10), (64, 32, 40), (64, 64, 300), (250, 64, 10)])
def test_drafts_that_do_not_fit_at_once(model_path: Path, budget: int, chunk: int, n_draft: int) -> None:
    """A draft is sampled from as one batch: room is made for all of it before, or it is cut."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    config = SnapKV(budget, 8, 5, recent=0.25, chunk=chunk, probe=0)
    draft = LlamaPromptLookupDecoding(num_pred_tokens=n_draft)
    with contextlib.closing(make_chunks(model_path, config, draft_model=draft)) as llm:
        assert len(say(llm, LONG[:400], 300)) == 300
        assert llm.snapkv_stats.answer_passes > 0
        assert pickle.loads(pickle.dumps(llm.__getstate__()))["draft_model"].num_pred_tokens == n_draft


@BOTH
def test_freed_without_the_collector(model_path: Path, config: SnapKV) -> None:
    llm = make_chunks(model_path, config)
    say(llm, LONG, 5)
    gone = weakref.ref(llm)
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()


def test_a_state_longer_than_the_context(model_path: Path) -> None:
    with contextlib.closing(make_chunks(model_path)) as llm:
        tokens = tokens_of(llm, LONG)
        say(llm, tokens, 5)
        state = llm.save_state()
    with contextlib.closing(make(model_path, SnapKV(64, 8, 5, recent=0.25), n_ctx=N_CTX)) as other:
        expected = say(other, SHORT, 10)
        with pytest.raises(RuntimeError, match=f"tokens, this context takes {N_CTX}"):
            other.load_state(state)
        assert (other.n_tokens, other.kv_cells) == (0, 0)
        assert say(other, SHORT, 10) == expected


def test_a_state_of_another_batch(model_path: Path) -> None:
    with contextlib.closing(make_chunks(model_path)) as llm:
        say(llm, LONG, 5)
        state = llm.save_state()
    with contextlib.closing(make_chunks(model_path, n_batch=32)) as other:
        with pytest.raises(RuntimeError, match="other n_batch or logits_all"):
            other.load_state(state)
        assert (other.n_tokens, other.kv_cells) == (0, 0)


@pytest.mark.parametrize("rule", ["shared", "first-recent", "random", "h2o"])
def test_other_rules(rule: Any, model_path: Path) -> None:
    config = SnapKV(64, 8, 5, recent=0.25, chunk=64, probe=16, rule=rule)
    with contextlib.closing(make_chunks(model_path, config)) as llm:
        assert len(say(llm, LONG, 400)) == 400
        assert llm.snapkv_stats.chunk_passes > 5
        assert llm.snapkv_stats.answer_passes > 0
        if rule == "first-recent":
            assert llm.kept_positions(0, 0)[:4].tolist() == [0, 1, 2, 3]


@BOTH
def test_beside_a_sliding_window(config: SnapKV, tmp_path: Path) -> None:
    path = tiny.write_gemma3(tmp_path / "m.gguf", tiny.Shape(n_layer=6))
    with contextlib.closing(make_chunks(path, config, swa_full=False)) as llm:
        first = say(llm, LONG, 300)
        assert llm.snapkv_stats.answer_passes > 0
        more = [*tokens_of(llm, LONG), *first, *tokens_of(llm, "And? ")]
        assert len(say(llm, more, 5)) == 5
        assert say(llm, LONG, 300) == first


def test_shares_are_of_the_cells(model_path: Path) -> None:
    with contextlib.closing(make_chunks(model_path, SnapKV(0.5, 8, 5, chunk=64, probe=16))) as llm:
        say(llm, LONG)
        assert llm.snapkv_stats.cells_after == 128


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            SnapKV(N_CTX, 8, chunk=64),
            "n_ctx=256: must be more cells than the budget of 256 and the 32 tokens of the probe",
        ),
        (SnapKV(230, 8, chunk=64, probe=26), "such as 320; or lower"),
        (SnapKV(0.9, 8, chunk=64, probe=26), "such as 90.; or lower"),
        (SnapKV(0.25, 8, 59, chunk=64), "n_ctx=256: kernel=59 is wider than the 57 cells"),
        (SnapKV(64, 8, chunk=64, probe="Why? " * 60), "of the probe together"),
    ],
)
def test_settings_that_do_not_fit(config: SnapKV, match: str, model_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        make_chunks(model_path, config)


def test_what_a_message_names_is_enough(model_path: Path) -> None:
    config = SnapKV(0.9, 8, chunk=64, probe=26)
    problem = config.check_cells(N_CTX, 26)
    assert problem is not None
    enough = int(re.findall(r"such as (\d+)", problem)[0])
    assert config.check_cells(enough, 26) is None
    make_chunks(model_path, config, n_ctx=enough).close()


def test_hardly_any_cells_to_read_in(model_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="256 cells leave 1 beside .* a pass every 1 tokens"):
        make_chunks(model_path, SnapKV(239, 8, 5, chunk=64, probe=16)).close()


def test_models_whose_positions_cannot_be_packed(tmp_path: Path) -> None:
    path = tiny.write_qwen2vl(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"packed positions need .* \(UNSUPPORTED_POSITIONS\)"):
        make_chunks(path, PACKED)
    with contextlib.closing(make_chunks(path, CHUNKS)) as llm:
        assert len(say(llm, LONG)) == 12


def test_packed_without_chunks(model_path: Path) -> None:
    """One pass, whose kept keys are rotated; the prompt must fit."""
    config = SnapKV(64, 8, 5, recent=0.25, positions="packed")
    with contextlib.closing(make(model_path, config)) as llm:
        answer = say(llm, SHORT, 30)
        n = len(tokens_of(llm, SHORT))
        assert (llm.n_tokens, llm.kv_cells) == (n + 29, 64 + 29)
        assert llm.snapkv_stats.chunk_passes == 0
        more = [*tokens_of(llm, SHORT), *answer, *tokens_of(llm, "And? ")]
        evaluated = Evaluated(llm)
        assert len(say(llm, more, 5)) == 5
        assert evaluated.since() < 60
        with pytest.raises(ValueError, match="exceed context window"):
            complete(llm, LONG)
        with pytest.raises(SnapKVError, match=r"cells: SnapKV\(chunk=1024\) reads longer prompts"):
            llm.eval(tokens_of(llm, LONG))
