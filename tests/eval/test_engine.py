"""What is measured equals what a user of Llama gets."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snapkv_gguf import SnapKV
from snapkv_gguf.eval import engine as engines
from snapkv_gguf.eval import methods
from snapkv_gguf.eval.schema import Question, Record, Sample

pytestmark = pytest.mark.usefixtures("library")

TEXT = "".join(f"Line {i}: the quick brown fox jumps over lazy dog {i * i}. " for i in range(9))
OPTIONS: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "n_batch": 128, "n_ubatch": 128}
BUDGETS = (64, 0.5)
METHODS = ("full", "snapkv", "paper", "first-recent", "random", "h2o", "w4-avg3-r0")


def sample(*questions: Question, text: str = TEXT, metric: str = "string_match_any") -> Sample:
    return Sample("one", "needle", metric, text, questions, {"length": 512})


def records(path: Path, one: Sample, names: tuple[str, ...] = METHODS) -> dict[tuple[str, float], Record]:
    every = methods.expand(names, BUDGETS)
    with engines.Engine(path, every, 1024, **OPTIONS) as engine:
        # the result of a method does not depend on those before it
        found = {(record.method, record.budget): record for record in engine.run(one, list(every))}
        for method in list(every)[::3]:
            (again,) = engine.run(one, [method])
            assert (again.scores, again.answers, again.cells) == (
                found[method].scores,
                found[method].answers,
                found[method].cells,
            )
    assert list(found) == list(every)
    return found


def llama(path: Path, config: SnapKV | None) -> Any:
    from snapkv_gguf import Llama

    return Llama(str(path), snapkv=config, n_ctx=1024, verbose=False, **OPTIONS)


def test_answers(model_path: Path) -> None:
    question = Question("And then?", ("x",), lead="Then", max_tokens=10)
    found = records(model_path, sample(question))
    for (name, budget), record in found.items():
        config = methods.parse(name, budget)
        llm = llama(model_path, config)
        prompt = llm.tokenize(f"{TEXT}\n\nAnd then?\nThen".encode())
        with contextlib.closing(llm.generate(prompt, temp=0.0)) as generator:
            tokens = list(itertools.islice(generator, 10))
        assert record.answers == (llm.detokenize(tokens).decode(errors="replace"),), name
        assert record.prompt_tokens == len(prompt)
        assert record.cells == (len(prompt) if config is None else config.resolve(len(prompt)).budget)
        assert record.decode_tokens == 10
        assert record.decode_seconds > 0
        assert record.prefill_seconds > 0
        assert (record.pass_ms > 0) == (name != "full")
        assert sum(record.parts_ms.values()) <= record.pass_ms
        llm.close()
    # the choice makes a difference
    assert len({record.answers for record in found.values()}) > 2


def test_in_chunks(model_path: Path) -> None:
    """As a user's context of so many cells; the order of methods does not matter."""
    from snapkv_gguf import Llama

    question = Question("And then?", ("x",), lead="Then", max_tokens=10, asks="What of the dog?")
    names = ("full", "snapkv+budget", "snapkv", "snapkv+100:probe0", "snapkv+80:question:packed", "random+100", "h2o")
    every = methods.expand(names, (92, 156))
    with engines.Engine(model_path, every, 1024, **OPTIONS) as engine:
        found = {(r.method, r.budget): r for r in engine.run(sample(question), list(every))}
        for method in reversed(list(every)):
            (again,) = engine.run(sample(question), [method])
            assert (again.answers, again.cells) == (found[method].answers, found[method].cells)
        kept = engine.kept(sample(question), [("snapkv+budget", 92)])["maps"][0]["layers"][0]["heads"][0]
    assert len(kept) == 92
    assert len({record.answers for record in found.values()}) > 3
    for (name, budget), record in found.items():
        config = methods.parse(name, budget)
        if config is None or config.chunk is None:
            continue
        if config.probe == methods.QUESTION:
            config = replace(config, probe="What of the dog?")
        # llama.cpp's contexts are multiples of 256 cells
        llm = Llama(str(model_path), snapkv=config, n_ctx=1024, verbose=False, **OPTIONS)
        llm._cells = methods.cells(config)
        prompt = llm.tokenize(f"{TEXT}\n\nAnd then?\nThen".encode())
        assert len(prompt) > llm._cells
        with contextlib.closing(llm.generate(prompt, temp=0.0)) as generator:
            tokens = list(itertools.islice(generator, 10))
        assert record.answers == (llm.detokenize(tokens).decode(errors="replace"),), name
        assert record.cells == budget
        llm.close()


def test_scores(model_path: Path) -> None:
    answer = records(model_path, sample(Question("?", ("x",), max_tokens=6)), ("full",))["full", 0].answers[0]
    assert answer
    right = records(model_path, sample(Question("?", (answer,), max_tokens=6)), ("full",))["full", 0]
    wrong = records(model_path, sample(Question("?", ("no such",), max_tokens=6)), ("full",))["full", 0]
    assert (right.scores, wrong.scores) == ({"score": 1.0}, {"score": 0.0})
    assert right.references == (answer,)


def test_questions_after_the_pass_and_with_the_text_read_again(model_path: Path) -> None:
    questions = [Question(f"What of {word}?", ("x",), max_tokens=6) for word in ("foxes", "dogs", "lines")]
    found = records(model_path, sample(*questions), ("full", "snapkv"))
    for (name, budget), record in found.items():
        assert set(record.scores) == {"score", "score_2", "score_3", "reread_2", "reread_3"}
        llm = llama(model_path, methods.parse(name, budget))
        answers = []
        tokens = llm.tokenize(f"{TEXT}\n\n{questions[0].text}\n".encode())
        llm.eval(tokens)
        first = greedy(llm)
        if name != "full":
            llm.compact()
        answers.append(answer(llm, first, 6))
        for question in questions[1:]:
            llm.eval(llm.tokenize(f"\n\n{question.text}\n".encode(), add_bos=False))
            answers.append(answer(llm, greedy(llm), 6))
        for question in questions[1:]:
            llm.reset()
            llm.eval(llm.tokenize(f"{TEXT}\n\n{question.text}\n".encode()))
            first = greedy(llm)
            if name != "full":
                llm.compact()
            answers.append(answer(llm, first, 6))
        assert record.answers == tuple(answers)
        llm.close()


def greedy(llm: Any) -> int:
    return int(logits(llm).argmax())


def logits(llm: Any) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()


def answer(llm: Any, token: int, n: int) -> str:
    tokens = []
    for _ in range(n):
        tokens.append(token)
        llm.eval([token])
        token = greedy(llm)
    return str(llm.detokenize(tokens).decode(errors="replace"))


def test_running_text(model_path: Path) -> None:
    text = TEXT * 2
    found = records(model_path, sample(text=text, metric="divergence"), ("full", "snapkv", "random"))
    following: dict[tuple[str, float], np.ndarray[Any, Any]] = {}
    for name, budget in found:
        llm = llama(model_path, methods.parse(name, budget))
        tokens = llm.tokenize(text.encode())
        llm.eval(tokens[:512])
        rows = [logits(llm)]
        if name != "full":
            llm.compact()
        for token in tokens[512 : 512 + engines.N_NEXT - 1]:
            llm.eval([token])
            rows.append(logits(llm))
        llm.close()
        x = np.array(rows, np.float64)
        following[name, budget] = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    p = following["full", 0]
    for key, q in following.items():
        scores = found[key].scores
        assert scores["kl"] == pytest.approx((np.exp(p) * (p - q)).sum(axis=1).mean(), rel=1e-3, abs=1e-7)
        # the prompt was evaluated in other batches
        assert scores["same_top"] == pytest.approx((p.argmax(axis=1) == q.argmax(axis=1)).mean(), abs=0.02)
        mean = q[np.arange(engines.N_NEXT), tokens[512 : 512 + engines.N_NEXT]].mean()
        assert scores["perplexity"] == pytest.approx(np.exp(-mean), rel=1e-4)
        assert found[key].decode_tokens == engines.N_NEXT
    assert found["full", 0].scores["kl"] == 0
    assert found["snapkv", 64].scores["kl"] > 0


def test_kept_tokens(model_path: Path) -> None:
    one = sample(Question("And?", ("x",)))
    every = methods.expand(("full", "snapkv", "first-recent"), [64])
    with engines.Engine(model_path, every, 1024, **OPTIONS) as engine:
        kept = engine.kept(one, list(every))
    assert "".join(kept["tokens"][1:]).startswith("Line 0: the quick")
    assert [(m["method"], m["budget"]) for m in kept["maps"]] == [("snapkv", 64), ("first-recent", 64)]
    llm = llama(model_path, SnapKV(64))
    llm.eval(llm.tokenize(f"{TEXT}\n\nAnd?\n".encode()))
    llm.compact()
    for layer in kept["maps"][0]["layers"]:
        for i, head in enumerate(layer["heads"]):
            assert head == llm.kept_positions(layer["layer"], i).tolist()
    n = len(kept["tokens"])
    assert kept["maps"][1]["layers"][0]["heads"][0] == [*range(4), *range(n - 60, n)]
    llm.close()


def test_a_prompt_within_the_window(model_path: Path) -> None:
    with (
        engines.Engine(model_path, methods.expand(["paper"], [64]), 1024, **OPTIONS) as engine,
        pytest.raises(ValueError, match="must be longer than the window of 32"),
    ):
        list(engine.run(sample(Question("And?", ("x",)), text="A"), [("paper", 64)]))


def test_calibration(model_path: Path) -> None:
    with engines.Engine(model_path, methods.expand(["h2o"], [64]), 1024, **OPTIONS) as engine:
        found = engine.calibrate(512)
    assert set(found) == {"batch", "slope", "decode", "decode_slope", "restore"}
    assert min(found.values()) >= 0
    assert found["batch"] > 0
    assert found["decode"] > 0


def test_what_h2o_costs_is_its_own(model_path: Path) -> None:
    """Adding up the attention counts as part of its pass, all of it, and not as prefill."""
    every = methods.expand(["snapkv", "h2o"], [64])
    with engines.Engine(model_path, every, 1024, **OPTIONS) as engine:
        before = engine._llm.observe_seconds
        found = {
            record.method: record for record in engine.run(sample(Question("?", ("x",), max_tokens=2)), list(every))
        }
        observed = engine._llm.observe_seconds - before
    assert found["h2o"].pass_ms > 1000 * observed > 0
    assert found["h2o"].parts_ms["score_ms"] > 1000 * observed
    assert found["snapkv"].pass_ms < 1000 * observed
