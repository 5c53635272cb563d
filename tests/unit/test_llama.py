"""Llama on a seeded tiny model: everything llama_cpp.Llama does, with the cache compacted behind every prompt."""

from __future__ import annotations

import ctypes
import gc
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import CONFIG, N_ANSWER, TEXT, Evaluated, complete, logits, make, say, tokens_of

from snapkv_gguf import SnapKV, tiny

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
def llm(model_path: Path) -> Iterator[Any]:
    instance = make(model_path)
    yield instance
    instance.close()


@pytest.fixture
def full(model_path: Path) -> Iterator[Any]:
    instance = make(model_path, None)
    yield instance
    instance.close()


# the pass


def test_the_pass_comes_after_the_first_token(llm: Any, full: Any) -> None:
    tokens = tokens_of(llm)
    firsts, seconds = [], []
    for instance in (llm, full):
        generator = instance.generate(tokens, temp=0.0)
        next(generator)
        firsts.append(logits(instance))
        next(generator)
        seconds.append(logits(instance))
        generator.close()
    assert (firsts[0] == firsts[1]).all()
    assert (seconds[0] != seconds[1]).any()

    stats = llm.snapkv_stats
    assert (stats.prompt_tokens, stats.cells_before, stats.cells_after) == (len(tokens), len(tokens), 64)
    assert (stats.window, stats.recent, stats.reason) == (8, 16, None)
    assert stats.milliseconds.total >= stats.milliseconds.score > 0
    assert stats.bytes_freed > 0
    assert llm.kv_cells == 64 + 1
    assert full.snapkv_stats is None
    assert full.kv_cells == len(tokens) + 1


def test_a_prompt_within_the_budget_is_left_alone(llm: Any, full: Any) -> None:
    prompt = TEXT[:40]
    assert say(llm, prompt) == say(full, prompt)
    assert (logits(llm) == logits(full)).all()
    assert llm.snapkv_stats.reason == "41 cells are within the budget of 64"
    assert llm.snapkv_stats.cells_after == 41


def test_share_of_the_prompt(model_path: Path) -> None:
    llm = make(model_path, SnapKV(budget=0.25, window=8, kernel=5))
    n = len(tokens_of(llm))
    say(llm)
    assert llm.snapkv_stats.cells_after == round(n / 4)
    assert llm.snapkv_stats.recent == round(n / 4) // 2


def test_kept_positions(llm: Any) -> None:
    n = len(tokens_of(llm))
    say(llm, n=1)
    kept = [llm.kept_positions(layer, head) for layer in range(2) for head in range(2)]
    for positions in kept:
        assert positions.shape == (64,)
        assert (np.diff(positions) > 0).all()
        assert positions[-16:].tolist() == list(range(n - 16, n))
    assert any((positions != kept[0]).any() for positions in kept)
    with pytest.raises(IndexError, match=r"layer=2 is not compacted, the layers are \[0, 1\]"):
        llm.kept_positions(2, 0)
    with pytest.raises(IndexError, match="head=2: layer 0 has 2 KV heads"):
        llm.kept_positions(0, 2)


def test_only_the_full_layers_of_a_sliding_window_model(tmp_path: Path) -> None:
    llm = make(tiny.write_gemma3(tmp_path / "m.gguf"))
    say(llm, n=4)
    assert llm.snapkv_stats.cells_after == 64
    assert len(llm.kept_positions(5, 0)) == llm.kv_cells
    with pytest.raises(IndexError, match=r"the layers are \[5\]"):
        llm.kept_positions(0, 0)


def test_low_level_use(llm: Any, full: Any) -> None:
    tokens = tokens_of(llm)
    for instance in (llm, full):
        instance.eval(tokens)
    assert llm.snapkv_stats is None
    assert llm.kv_cells == len(tokens)
    stats = llm.compact()
    assert stats == llm.snapkv_stats
    assert stats.cells_after == llm.kv_cells == 64
    # the prompt's logits are still there to sample from
    assert (logits(llm) == logits(full)).all()
    assert llm.sample(temp=0.0) == full.sample(temp=0.0)
    assert llm.compact().reason == "64 cells are within the budget of 64"
    assert llm.compact(SnapKV(budget=20, window=4, recent=0, kernel=1)).cells_after == 20


def test_compact_while_generating(llm: Any) -> None:
    generator = llm.generate(tokens_of(llm), temp=0.0)
    for _ in range(30):
        next(generator)
    before = llm.kv_cells
    stats = llm.compact()
    assert (stats.cells_before, stats.cells_after) == (before, 64)
    assert len([next(generator) for _ in range(5)]) == 5


def test_compact_refuses(llm: Any, full: Any) -> None:
    from snapkv_gguf import SnapKVError

    with pytest.raises(SnapKVError, match="create Llama with snapkv=True"):
        full.compact()
    with pytest.raises(SnapKVError, match="create Llama with snapkv=True"):
        full.kept_positions(0, 0)
    llm.eval(tokens_of(llm))
    before = llm.kv_cells
    with pytest.raises(ValueError, match="window=16: queries are captured for 8 tokens"):
        llm.compact(SnapKV(window=16))
    with pytest.raises(SnapKVError, match=r"kernel=1001 is wider than the .* cells before the window, lower it"):
        llm.compact(SnapKV(budget=64, window=8, kernel=1001))
    assert llm.kv_cells == before
    assert llm.compact().cells_after == 64


def test_a_refused_pass_is_told_and_generation_goes_on(llm: Any, full: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from snapkv_gguf import _capi

    monkeypatch.setattr(_capi, "compact", lambda *_: (_capi.Status.SHARED_CELLS, _capi.Stats()))
    with pytest.warns(RuntimeWarning, match=r"goes on with the full cache: .*shares cells.*\(SHARED_CELLS\)"):
        assert say(llm) == say(full)
    assert "SHARED_CELLS" in llm.snapkv_stats.reason
    assert llm.snapkv_stats.cells_after == len(tokens_of(llm))
    monkeypatch.undo()
    llm.reset()
    say(llm)
    assert llm.snapkv_stats.reason is None


def test_a_lost_sequence(llm: Any, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snapkv_gguf import SnapKVError, _capi

    def lose(ctx: Any, seq_id: int, params: Any) -> Any:
        llm._ctx.kv_cache_clear()
        return _capi.Status.SEQUENCE_LOST, _capi.Stats()

    monkeypatch.setattr(_capi, "compact", lose)
    with pytest.raises(SnapKVError, match=r"SEQUENCE_LOST\): send the prompt again") as caught:
        say(llm)
    assert caught.value.status == _capi.Status.SEQUENCE_LOST
    assert pickle.loads(pickle.dumps(caught.value)).status == _capi.Status.SEQUENCE_LOST
    assert llm.n_tokens == 0
    monkeypatch.undo()
    assert say(llm) == say(make(model_path))


# which part of the cache the next prompt uses


def test_the_same_prompt_again(llm: Any) -> None:
    evaluated = Evaluated(llm)
    first = say(llm)
    # the last token is sampled, not evaluated
    assert evaluated.since() == len(tokens_of(llm)) + N_ANSWER - 1
    for _ in range(3):
        assert say(llm) == first
        assert evaluated.since() == N_ANSWER - 1
    assert say(llm, n=1) == first[:1]
    assert llm.kv_cells == 64


def test_a_prompt_that_goes_on_uses_the_compacted_cache(llm: Any) -> None:
    answer = say(llm)
    tokens = [*llm.input_ids[: llm.n_tokens].tolist(), *tokens_of(llm, "And now another question?")[1:]]
    n_cached = llm.n_tokens
    evaluated = Evaluated(llm)
    say(llm, tokens, n=1)
    assert answer
    assert evaluated.since() == len(tokens) - n_cached
    # 64 cells, those of the answer, those of the question: over the budget again
    assert llm.snapkv_stats.cells_before == 64 + len(tokens) - len(tokens_of(llm))
    assert llm.snapkv_stats.cells_after == 64
    assert llm.snapkv_stats.window == 8


@pytest.mark.parametrize("change", ["first", "frontier", "window", "last", "shorter"])
def test_any_other_prompt_is_evaluated_in_full(change: str, llm: Any, model_path: Path) -> None:
    tokens = tokens_of(llm)
    other = list(tokens)
    if change == "shorter":
        del other[-3:]
    else:
        other[{"first": 1, "frontier": -9, "window": -5, "last": -1}[change]] += 1
    say(llm, tokens)
    evaluated = Evaluated(llm)
    answer = say(llm, other)
    assert evaluated.since() == len(other) + N_ANSWER - 1
    assert llm.snapkv_stats.cells_before == len(other)
    assert answer == say(make(model_path), other)


def test_a_window_of_the_prompt_is_always_evaluated(llm: Any, model_path: Path) -> None:
    """Generated tokens overwrite the queries of a prompt that was too short for a pass."""
    short = tokens_of(llm)[:60]
    say(llm, short, n=40)
    assert llm.snapkv_stats.reason
    longer = [*short, *([55] * 6)]
    evaluated = Evaluated(llm)
    answer = say(llm, longer)
    assert evaluated.since() == 8 + N_ANSWER - 1
    assert (llm.snapkv_stats.window, llm.snapkv_stats.cells_after) == (8, 64)
    assert answer == say(make(model_path), longer)


@pytest.mark.parametrize("budget", [64, 900])
def test_sliding_windows_that_have_moved_on(budget: int, tmp_path: Path) -> None:
    """Without swa_full those layers have dropped what precedes a prompt that is asked again after a long answer."""
    path = tiny.write_gemma3(tmp_path / "m.gguf")
    llm, fresh = (make(path, SnapKV(budget=budget, window=8), swa_full=False) for _ in range(2))
    tokens = tokens_of(llm)
    first = say(llm, tokens, n=400)
    assert say(llm, tokens, n=20) == first[:20]
    say(llm, tokens, n=400)
    for instance in (llm, fresh):
        say(instance, [*tokens, *[77] * 10], n=1)
    assert np.abs(logits(llm) - logits(fresh)).max() < 1e-4


def test_reset(llm: Any) -> None:
    first = say(llm)
    llm.reset()
    evaluated = Evaluated(llm)
    assert say(llm) == first
    assert evaluated.since() == len(tokens_of(llm)) + N_ANSWER - 1


def test_without_reset_tokens_are_appended(llm: Any) -> None:
    tokens = tokens_of(llm)
    llm.eval(tokens[:50])
    next(llm.generate(tokens[50:], temp=0.0, reset=False))
    assert llm.snapkv_stats.prompt_tokens == len(tokens)
    assert llm.snapkv_stats.cells_after == 64


def test_set_back_by_hand(llm: Any) -> None:
    say(llm)
    n = len(tokens_of(llm))
    llm.n_tokens = n - 1  # within the window: the replay of a token
    llm.eval(tokens_of(llm)[-1:])
    llm.n_tokens = n - 9
    with pytest.raises(RuntimeError, match=f"n_tokens={n - 9}: tokens up to {n - 9} were compacted"):
        llm.eval([50])
    llm.n_tokens = 0
    llm.eval([50])
    assert llm.kv_cells == 1


def test_several_instances(model_path: Path) -> None:
    one, two = make(model_path), make(model_path, SnapKV(budget=32, window=4))
    expected = [say(one), say(two)]
    assert (one.kv_cells, two.kv_cells) == (64 + N_ANSWER - 1, 32 + N_ANSWER - 1)
    for llm in (one, two):
        llm.reset()
    mixed: list[list[int]] = [[], []]
    generators = [llm.generate(tokens_of(llm), temp=0.0) for llm in (one, two)]
    for _ in range(N_ANSWER):
        for out, generator in zip(mixed, generators, strict=True):
            out.append(next(generator))
    assert [say(llm) for llm in (one, two)] == expected


# interruptions


@pytest.mark.parametrize("compacted_before", [False, True])
def test_ctrl_c_in_the_prefill(compacted_before: bool, llm: Any, model_path: Path) -> None:
    if compacted_before:
        say(llm, TEXT[::-1])

    def interrupt(done: int, total: int) -> None:
        if done == 200:
            raise KeyboardInterrupt

    llm.on_eval = interrupt
    with pytest.raises(KeyboardInterrupt):
        say(llm)
    llm.on_eval = None
    assert say(llm) == say(make(model_path))
    assert llm.snapkv_stats.cells_after == 64


def test_ctrl_c_between_decode_and_bookkeeping(llm: Any, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context then holds the logits of tokens that were not counted."""
    tokens = tokens_of(llm)[:150]
    decode = llm._ctx.decode

    def interrupted(batch: Any) -> None:
        decode(batch)
        if llm.n_tokens == 100:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm._ctx, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        say(llm, tokens)
    monkeypatch.undo()
    assert llm.n_tokens == 100
    assert say(llm, tokens[:100]) == say(make(model_path), tokens[:100])


def test_ctrl_c_in_the_pass(llm: Any, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snapkv_gguf import _capi

    compact = _capi.compact

    def interrupted(*arguments: Any) -> Any:
        compact(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(_capi, "compact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        say(llm)
    monkeypatch.undo()
    other = TEXT[:-4] + "!"
    assert say(llm, other) == say(make(model_path), other)


def test_a_closed_stream(llm: Any, model_path: Path) -> None:
    stream = complete(llm, stream=True)
    next(stream)
    stream.close()
    assert say(llm) == say(make(model_path))


# everything else llama_cpp.Llama does


def test_streaming(llm: Any) -> None:
    whole = complete(llm)["choices"][0]["text"]
    assert len(whole) == N_ANSWER
    assert "".join(chunk["choices"][0]["text"] for chunk in complete(llm, stream=True)) == whole
    assert llm.snapkv_stats.cells_after == 64


def test_stop(llm: Any) -> None:
    whole = complete(llm, max_tokens=40)["choices"][0]["text"]
    stop = whole[5:7]
    assert complete(llm, max_tokens=40, stop=[stop])["choices"][0]["text"] == whole[: whole.index(stop)]


def test_stopping_criteria(llm: Any) -> None:
    from llama_cpp import StoppingCriteriaList

    n = len(tokens_of(llm))
    criteria = StoppingCriteriaList([lambda ids, _: len(ids) >= n + 3])
    assert len(list(llm.generate(tokens_of(llm), temp=0.0, stopping_criteria=criteria))) == 3
    at_once = StoppingCriteriaList([lambda *_: True])
    llm.reset()
    assert list(llm.generate(tokens_of(llm), temp=0.0, stopping_criteria=at_once)) == []
    assert llm.snapkv_stats.cells_after == 64


def test_grammar(llm: Any) -> None:
    from llama_cpp import LlamaGrammar

    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    assert complete(llm, grammar=grammar)["choices"][0]["text"] in ("yes", "no")
    assert llm.snapkv_stats.cells_after == 64


def test_chat(llm: Any) -> None:
    from llama_cpp import LlamaGrammar

    letters = LlamaGrammar.from_string("root ::= [a-z ]*", verbose=False)
    options = {"max_tokens": 8, "temperature": 0.0, "grammar": letters}
    messages = [{"role": "user", "content": TEXT}]
    answer = llm.create_chat_completion(messages, **options)["choices"][0]["message"]["content"]
    stream = llm.create_chat_completion(messages, stream=True, **options)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in stream) == answer
    assert llm.snapkv_stats.cells_after == 64
    # the next turn goes on from the compacted cache
    messages += [{"role": "assistant", "content": answer.strip()}, {"role": "user", "content": "and then?"}]
    evaluated = Evaluated(llm)
    llm.create_chat_completion(messages, **options)
    assert evaluated.since() < 80


def test_logprobs(model_path: Path, full: Any) -> None:
    llm = make(model_path, logits_all=True)
    found = complete(llm, max_tokens=4, logprobs=3)["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 4
    assert all(value <= 0 for value in found["token_logprobs"])
    full.eval(tokens_of(full))
    llm.reset()
    next(llm.generate(tokens_of(llm), temp=0.0))
    # a batch of 64 that gives all logits takes another matrix multiplication
    np.testing.assert_allclose(llm.scores[llm.n_tokens - 1], logits(full), rtol=1e-4, atol=1e-4)


def test_draft_model(model_path: Path) -> None:
    from llama_cpp.llama_speculative import LlamaDraftModel

    plain = make(model_path, logits_all=True)
    expected = list(itertools.islice(plain.generate(tokens_of(plain), temp=0.0), 20))

    class Draft(LlamaDraftModel):
        """Right for a token, then wrong."""

        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            n_done = len(input_ids) - len(tokens_of(plain))
            right = expected[n_done : n_done + 1]
            return np.array([*right, 70, 71], dtype=np.intc)

    drafted = make(model_path, draft_model=Draft(), logits_all=True)
    evaluated = Evaluated(drafted)
    found = list(itertools.islice(drafted.generate(tokens_of(drafted), temp=0.0), 20))
    assert found == expected
    assert evaluated.since() > len(tokens_of(drafted)) + 20
    assert drafted.snapkv_stats.cells_after == 64


def test_pickling(llm: Any) -> None:
    answer = say(llm)
    again = pickle.loads(pickle.dumps(llm))
    assert again.snapkv == CONFIG
    assert say(again) == answer


# states


def test_a_state_goes_on_as_before(llm: Any, model_path: Path) -> None:
    say(llm)
    state = pickle.loads(pickle.dumps(llm.save_state()))
    other = make(model_path)
    other.load_state(state)
    assert other.kv_cells == llm.kv_cells
    for instance in (llm, other):
        instance.eval([60, 61])
    assert (logits(llm) == logits(other)).all()
    with pytest.raises(RuntimeError, match="kept positions are not part of a saved state"):
        other.kept_positions(0, 0)
    # a prompt that is another one, is evaluated in full
    changed = TEXT[:-4] + "!"
    assert say(other, changed) == say(make(model_path), changed)


@pytest.mark.parametrize("seed", range(8))
def test_a_restored_prompt_is_answered_from_its_exact_logits(seed: int, model_path: Path) -> None:
    """In another instance, through pickle, without evaluating any of the prompt again."""
    prompt = np.random.default_rng(seed).integers(3, 260, 200).tolist()
    llm, other = make(model_path), make(model_path)
    expected = say(llm, prompt)
    other.load_state(pickle.loads(pickle.dumps(llm.save_state())))
    evaluated = Evaluated(other)
    assert say(other, prompt) == expected
    assert evaluated.since() == N_ANSWER - 1
    assert other.snapkv_stats.reason == "64 cells are within the budget of 64"


@pytest.mark.parametrize("seed", range(8))
def test_the_same_prompt_after_an_interrupted_answer(seed: int, model_path: Path) -> None:
    prompt = np.random.default_rng(seed).integers(3, 260, 200).tolist()
    llm = make(model_path)
    expected = say(llm, prompt)
    decode, calls = llm._ctx.decode, iter([False, False, True])

    def interrupted(batch: Any) -> None:
        if next(calls, False):
            raise KeyboardInterrupt
        decode(batch)

    llm._ctx.decode = interrupted
    with pytest.raises(KeyboardInterrupt):
        say(llm, [*prompt, 7, 8])
    llm._ctx.decode = decode
    assert say(llm, prompt) == expected


def test_a_state_compacted_with_other_settings(llm: Any, model_path: Path) -> None:
    """It can be gone on from, but a prompt is not answered from what another budget kept."""
    say(llm)
    state = llm.save_state()
    wide = SnapKV(budget=128, window=8, kernel=5)
    other = make(model_path, wide)
    other.load_state(state)
    assert other.kv_cells == llm.kv_cells
    assert say(other) == say(make(model_path, wide))
    assert other.snapkv_stats.cells_after == 128


def test_a_shared_cache_of_states(llm: Any, full: Any, model_path: Path) -> None:
    """An instance without snapkv, or with another budget, takes a compacted state for a miss."""
    from llama_cpp import LlamaRAMCache

    cache = LlamaRAMCache()
    wide = make(model_path, SnapKV(budget=128, window=8, kernel=5))
    for instance in (llm, full, wide):
        instance.set_cache(cache)
    complete(llm)
    for instance, config in ((full, None), (wide, wide.snapkv)):
        assert complete(instance)["choices"] == complete(make(model_path, config))["choices"]


def test_a_state_of_a_smaller_context(model_path: Path) -> None:
    small, llm = make(model_path, n_ctx=512), make(model_path)
    say(small)
    llm.load_state(small.save_state())
    long = TEXT + TEXT[::-1]
    assert len(tokens_of(llm, long)) > 512
    same = make(model_path)
    say(same)
    assert say(llm, long) == say(same, long)


def test_a_restored_full_prefix_gets_a_whole_window(full: Any, model_path: Path) -> None:
    full.eval(tokens_of(full)[:-2])
    llm = make(model_path)
    llm.load_state(full.save_state())
    evaluated = Evaluated(llm)
    answer = say(llm)
    assert evaluated.since() == 8 + N_ANSWER - 1
    assert (llm.snapkv_stats.window, llm.snapkv_stats.cells_after) == (8, 64)
    assert answer == say(make(model_path))


@pytest.mark.parametrize("marked", [True, False])
def test_a_compacted_state_without_snapkv(marked: bool, llm: Any, full: Any, model_path: Path) -> None:
    say(llm)
    state = llm.save_state()
    if not marked:
        del state.snapkv
        other = make(model_path)
        other.load_state(state)
        changed = TEXT[:-4] + "!"
        assert say(other, changed) == say(make(model_path), changed)
    expected = say(full, "hello")
    with pytest.raises(ValueError, match=r"saved after a SnapKV pass .* create Llama with snapkv"):
        full.load_state(state)
    assert say(full, "hello") == expected


def test_a_state_that_does_not_fit(llm: Any, full: Any, model_path: Path) -> None:
    full.eval(tokens_of(full))
    state = full.save_state()
    state.llama_state = state.llama_state[: len(state.llama_state) // 2]
    state.llama_state_size = len(state.llama_state)
    with pytest.raises(RuntimeError, match="Failed to set llama state data"):
        llm.load_state(state)
    assert (llm.n_tokens, llm.kv_cells, llm.input_ids.shape) == (0, 0, (1024,))
    assert say(llm) == say(make(model_path))


def test_a_cache_of_states(llm: Any, model_path: Path) -> None:
    from llama_cpp import LlamaRAMCache

    llm.set_cache(LlamaRAMCache())
    complete(llm)
    complete(llm, TEXT[::-1])
    evaluated = Evaluated(llm)
    complete(llm, [*tokens_of(llm), 50, 51, 52], max_tokens=1)
    assert evaluated.since() == 3
    # diverges before the frontier of the cached state
    changed = TEXT[:100] + "X" + TEXT[101:]
    assert complete(llm, changed)["choices"] == complete(make(model_path), changed)["choices"]
    assert evaluated.since() == len(tokens_of(llm, changed)) + N_ANSWER - 1


# wrong input


def test_h2o(model_path: Path) -> None:
    """In any batches, and from a restored state, the same is kept."""
    config = SnapKV(budget=64, window=8, recent=0.25, rule="h2o")
    kept = []
    for n_ubatch, n_batch in ((64, 100), (512, 512), (16, 16)):
        llm = make(model_path, config, n_batch=n_batch, n_ubatch=n_ubatch)
        answer = say(llm)
        assert llm.snapkv_stats.cells_after == 64
        assert llm.observe_seconds > 0 or n_ubatch == 512
        kept.append([llm.kept_positions(layer, head)[:64] for layer in range(2) for head in range(2)])
        tokens = tokens_of(llm)
        # the next turn
        say(llm, [*tokens, *answer, *tokens[1:40]])
        assert llm.snapkv_stats.reason is None
        # a prompt that is cut back has to be evaluated anew
        assert say(llm) == answer
        assert llm.snapkv_stats.reason is None
        llm.reset()
        llm.eval(tokens[:-8])
        state = llm.save_state()
        for _ in range(2):
            llm.load_state(state)
            llm.eval(tokens[-8:])
            llm.compact()
            again = [llm.kept_positions(layer, head) for layer in range(2) for head in range(2)]
            assert np.array_equal(kept[-1], again)
        llm.close()
    assert np.array_equal(kept[0], kept[1])
    assert np.array_equal(kept[0], kept[2])


def test_h2o_after_its_sums_are_lost(model_path: Path) -> None:
    """The same prompt again, after more generated tokens than queries are kept of, and the chat goes on."""
    llm = make(model_path, SnapKV(budget=64, window=8, recent=0.25, rule="h2o"), n_ubatch=64)
    tokens = tokens_of(llm)
    answer = say(llm, n=150)
    assert say(llm, n=150) == answer
    assert llm.snapkv_stats.reason is None
    for n in (3, 40):
        say(llm, [*tokens, *answer[:n], *tokens[1:40]])
        assert llm.snapkv_stats.reason is None
        assert llm.snapkv_stats.cells_after == 64
    # a state of another version, without sums
    llm.reset()
    llm.eval(tokens)
    state = llm.save_state()
    state.snapkv = state.snapkv[:3]
    llm.load_state(state)
    llm.eval(tokens[1:20])
    with pytest.raises(RuntimeError, match="rule h2o is needed from the prompt's start"):
        llm.compact()
    say(llm, [*tokens, *tokens[1:40]])
    assert llm.snapkv_stats.reason is None
    llm.close()


def test_embedding_is_refused(model_path: Path) -> None:
    with pytest.raises(ValueError, match="embedding=True and snapkv exclude each other"):
        make(model_path, embedding=True)
    llm = make(model_path, None, embedding=True)
    assert len(llm.embed("hello")[0]) == tiny.Shape().n_embd


@pytest.mark.parametrize("name", ["mamba", "mpt", "bert"])
def test_models_that_cannot(name: str, tmp_path: Path) -> None:
    path = tiny.WRITERS[name](tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"cannot be used with snapkv: .*UNSUPPORTED_.*pass snapkv=False"):
        make(path, n_ctx=256)
    make(path, False, n_ctx=256)


def test_wrong_settings(model_path: Path) -> None:
    with pytest.raises(ValueError, match="budget=16: must be more than window=16"):
        make(model_path, {"budget": 16})
    with pytest.raises(TypeError, match="snapkv=1024"):
        make(model_path, 1024)


def test_wrong_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="Model path does not exist"):
        make(tmp_path / "missing.gguf")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ValueError, match="Failed to load model from file"):
        make(tmp_path / "text.gguf")
    # nor does a half-made instance complain when it is deleted
    assert "Exception ignored" not in capfd.readouterr().err


def test_a_prompt_longer_than_the_context(model_path: Path) -> None:
    llm = make(model_path, n_ctx=256)
    with pytest.raises(ValueError, match=r"Requested tokens \(\d+\) exceed context window of 256"):
        complete(llm)
    say(llm, TEXT[:150])
    assert llm.snapkv_stats.cells_after == 64


def test_a_kernel_wider_than_the_prefix(model_path: Path, full: Any) -> None:
    llm = make(model_path, SnapKV(budget=64, window=8, kernel=101))
    prompt = TEXT[:90]
    with pytest.warns(RuntimeWarning, match="kernel=101 is wider than the 83 cells before the window"):
        assert say(llm, prompt) == say(full, prompt)
    assert llm.kv_cells == 91 + N_ANSWER - 1


def test_a_closed_instance(model_path: Path) -> None:
    llm = make(model_path)
    say(llm)
    llm.close()
    for use in (llm.compact, lambda: llm.kv_cells, lambda: llm.kept_positions(0, 0)):
        with pytest.raises(ctypes.ArgumentError, match="the context was closed"):
            use()


def test_refused_arguments_leave_nothing_to_close(model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from snapkv_gguf import Llama

    with pytest.raises(TypeError):
        Llama(str(model_path), True)  # type: ignore[misc]
    gc.collect()
    assert "Exception ignored" not in capfd.readouterr().err


# other kinds of memory


@pytest.mark.parametrize("name", ["lfm2", "gemma4", "qwen2vl"])
def test_turns_with_other_kinds_of_memory(name: str, tmp_path: Path) -> None:
    """A hybrid, layers that share K and V, M-RoPE."""
    path = tiny.WRITERS[name](tmp_path / "m.gguf")
    llm = make(path, swa_full=True)
    counter = Evaluated(llm)
    prompt = tokens_of(llm)
    first = say(llm, prompt)
    assert llm.snapkv_stats.cells_after == 64
    counter.since()
    assert say(llm, prompt) == first
    # the answer's tokens are cached but for its last one: the turn's own tokens, and a window of the prompt at least
    longer = [*prompt, *first, *tokens_of(llm, "and what then?")]
    say(llm, prompt)
    counter.since()
    second = say(llm, longer)
    assert counter.since() < len(longer)
    assert llm.snapkv_stats.cells_after == 64
    again = make(path, swa_full=True)
    assert (say(again, prompt), say(again, longer)) == (first, second)

    # another prompt is evaluated in full
    other = tokens_of(llm, "Something else. " + TEXT)
    assert say(llm, other) == say(make(path, swa_full=True), other)

    # saved and restored
    say(llm, prompt)
    state = llm.save_state()
    restored = make(path, swa_full=True)
    restored.load_state(state)
    assert say(restored, longer) == say(llm, longer)
