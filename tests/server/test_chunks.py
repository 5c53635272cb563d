"""Prompts and answers longer than a slot's cells; answers are those of snapkv_gguf.Llama with the same batches."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_client import CONFIG, Client, tokens

from snapkv_gguf import SnapKV, tiny
from snapkv_gguf.server import Server, ServerError

N = 12  # tokens of an answer
CELLS = 512
CHUNKED = replace(CONFIG, chunk=100, probe=24)
SMALL = ("-c", str(CELLS))
MORE = tokens(2, 31)[1:]


class Reference:
    """The same with the Python bindings, in as many cells."""

    def __init__(self, path: Path | str, snapkv: Any = CHUNKED, cells: int = CELLS, **kwargs: Any) -> None:
        from snapkv_gguf import Llama

        sizes = {"n_ctx": cells, "n_batch": 128, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}
        self.llm = Llama(str(path), snapkv=snapkv, verbose=False, **sizes, **kwargs)

    def answer(self, prompt: list[int], n: int = N) -> list[int]:
        from llama_cpp import LogitsProcessorList

        # as in the requests
        never = [2, *range(256, 320)]

        def bias(ids: Any, scores: Any) -> Any:
            scores[never] = -np.inf
            return scores

        with contextlib.closing(
            self.llm.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([bias]))
        ) as generator:
            return list(itertools.islice(generator, n))

    @property
    def chunk_passes(self) -> int:
        assert self.llm.snapkv_stats is not None
        return self.llm.snapkv_stats.chunk_passes


def stream(client: Client, prompt: list[int], n: int, **body: Any) -> Iterator[Any]:
    """Events of a streamed answer."""
    options = {"prompt": prompt, "n_predict": n, "temperature": 0, "return_tokens": True, "ignore_eos": True}
    with client.http.stream("POST", "/completion", json={**options, "stream": True, **body}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_a_prompt_that_fits_is_read_as_without_chunks(unified: str, start: Callable[..., Any]) -> None:
    options = ("-c", "1024", "-np", "2", unified)
    asked: list[dict[str, Any]] = [
        {"prompt": tokens(seed, n), "n_probs": 5} for seed, n in ((1, 500), (2, 40), (3, 300))
    ]
    asked += [{"prompt": tokens(3, 300) + MORE, "n_probs": 5}, {"prompt": tokens(1, 500), "snapkv": False}]
    answers = []
    for snapkv in (CONFIG, replace(CHUNKED, chunk=7)):
        client = start(*options, snapkv=snapkv)
        found = [client.complete(**body) for body in asked]
        for answer in found:
            told = answer.pop("timings")
            assert "snapkv" not in told or told["snapkv"].get("chunk_passes", 0) == 0
        answers.append([{k: v for k, v in answer.items() if k != "generation_settings"} for answer in found])
        assert [answer.get("completion_probabilities") is None for answer in found] == [False] * 4 + [True]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "snapkv",
    [
        CHUNKED,
        replace(CHUNKED, probe=0),
        replace(CHUNKED, chunk=1000),
        replace(CHUNKED, chunk=300, probe=200),
        replace(CHUNKED, budget=0.25, chunk=128),
    ],
    ids=["plain", "no probe", "chunk of all room", "long probe", "share"],
)
def test_a_prompt_longer_than_the_cells(snapkv: SnapKV, start: Callable[..., Any], tiny_llama: Path) -> None:
    client = start(*SMALL, snapkv=snapkv)
    reference = Reference(tiny_llama, snapkv)
    n_passes = 0
    for seed, n in ((1, CELLS), (2, CELLS + 1), (3, 700), (4, 3000)):
        prompt = tokens(seed, n)
        answer = client.complete(prompt)
        told = answer["timings"]["snapkv"]
        assert answer["tokens"] == reference.answer(prompt), n
        assert told["chunk_passes"] == reference.chunk_passes
        assert (told["chunk_passes"] > 0) == (n > CELLS)
        assert (told["chunk_ms"] > 0) == (n > CELLS)
        assert told["prompt_n"] == n
        assert told["cells"] == 64 if snapkv.budget == 64 else 128
        assert told["evicted"] == n - told["cells"]
        assert answer["timings"]["prompt_n"] == answer["tokens_evaluated"] == n
        assert client.cells() == [told["cells"] + N - 1]
        n_passes += told["chunk_passes"]
    assert client.metric("snapkv_chunk_passes_total") == n_passes
    assert client.metric("snapkv_passes_total") == 4
    assert client.metric("snapkv_answer_passes_total") == 0


def test_a_conversation_of_long_prompts(start: Callable[..., Any], tiny_llama: Path) -> None:
    client = start(*SMALL, snapkv=CHUNKED)
    reference = Reference(tiny_llama)
    prompt = tokens(1, 1200)
    for turn, more in enumerate((MORE, tokens(5, 900)[1:], [107], MORE)):
        answer = client.complete(prompt)
        assert answer["tokens"] == reference.answer(prompt), turn
        assert answer["timings"]["snapkv"]["chunk_passes"] == reference.chunk_passes
        assert (answer["timings"]["cache_n"] > 0) == (turn > 0)
        prompt = prompt + answer["tokens"] + more
    assert client.metric("snapkv_chunk_passes_total") > 2


@pytest.mark.parametrize("n_prompt", [300, 900])
def test_an_answer_longer_than_the_cells(n_prompt: int, start: Callable[..., Any], tiny_llama: Path) -> None:
    client = start(*SMALL, snapkv=CHUNKED)
    reference = Reference(tiny_llama)
    prompt = tokens(1, n_prompt)
    answer = client.complete(prompt, n=1500)
    assert answer["tokens"] == reference.answer(prompt, 1500)
    assert answer["truncated"] is False
    told = answer["timings"]["snapkv"]
    # 64 cells are kept, the last token is not decoded
    assert told["answer_passes"] == (1500 - 1 - 1) // (CELLS - 64)
    assert told["evicted"] == n_prompt + 1499 - client.cells()[0]
    assert client.metric("snapkv_answer_passes_total") == told["answer_passes"]
    following = prompt + answer["tokens"] + MORE
    second = client.complete(following)
    assert second["timings"]["cache_n"] == n_prompt + 1499
    assert second["tokens"] == reference.answer(following)


def test_until_the_longest_prompt(start: Callable[..., Any], tmp_path: Path) -> None:
    client = start(*SMALL, "--snapkv-prompt-max", "1000", snapkv=CHUNKED)
    answer = client.complete(tokens(1, 700), n=-1)
    assert answer["truncated"] is True
    assert answer["stop_type"] == "limit"
    assert len(answer["tokens"]) == 1000 - 700
    assert client.get("/props")["snapkv"]["prompt_max"] == 1000
    # the model's context is more than that of the option
    short = tiny.write_llama(tmp_path / "short.gguf", tiny.Shape(n_ctx=900))
    client = start(*SMALL, "--snapkv-prompt-max", "1000", model=short, snapkv=CHUNKED)
    assert "--snapkv-prompt-max 1000 is more than the context of the model, it will be 900" in client.server.log
    assert client.get("/props")["snapkv"]["prompt_max"] == 900
    answer = client.complete(tokens(1, 700), n=-1)
    assert len(answer["tokens"]) == 900 - 700


def refused(client: Client, prompt: list[int], **body: Any) -> dict[str, Any]:
    response = client.post("/completion", prompt=prompt, n_predict=2, **body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] == len(prompt)
    return error


def test_limits_are_told(start: Callable[..., Any]) -> None:
    client = start(*SMALL, snapkv=CONFIG)
    error = refused(client, tokens(1, 600))
    assert error["n_ctx"] == CELLS
    assert error["message"].startswith("request (600 tokens) exceeds the available context size (512 tokens)")
    assert "--snapkv-chunk" in error["message"]
    assert "chunk" not in client.get("/props")["snapkv"]
    assert "answer_passes" not in client.complete(tokens(1, 300))["timings"]["snapkv"]
    assert "chunk_passes_total" not in client.get("/metrics")
    told = client.post("/completion", prompt="a", snapkv={"probe": 8})
    assert told.status_code == 400
    assert "probe: the server was started without --snapkv-chunk" in told.json()["error"]["message"]

    client = start(*SMALL, snapkv=CHUNKED)
    settings = client.get("/props")["snapkv"]
    assert settings["cells"] == CELLS
    assert settings["prompt_max"] == tiny.Shape().n_ctx
    assert (settings["chunk"], settings["probe"]) == (CHUNKED.chunk, CHUNKED.probe)
    assert client.get("/props")["default_generation_settings"]["n_ctx"] == CELLS
    error = refused(client, tokens(1, 8192))
    assert error["n_ctx"] == 8192
    assert (
        "(8192 tokens), try increasing it with --snapkv-prompt-max, up to the context of the model" in error["message"]
    )
    assert "512 cells of a slot" in error["message"]
    error = refused(client, tokens(1, 600), snapkv=False)
    assert error["n_ctx"] == CELLS
    assert '"snapkv": false' in error["message"]
    error = refused(client, tokens(1, 600), snapkv={"budget": 500})
    assert "more cells than budget 500 and probe 24 together" in error["message"]
    assert client.complete(tokens(1, 300), snapkv={"budget": 500})["timings"]["snapkv"]["cells"] == 300
    assert client.complete(tokens(1, 600), snapkv={"budget": 100, "probe": 8})["timings"]["snapkv"]["cells"] == 100


@pytest.mark.parametrize(
    ("snapkv", "told"),
    [
        ({"probe": -1}, "probe -1: must be between 0 (none) and 4096"),
        ({"probe": 5000}, "probe 5000: must be between"),
        ({"probe": 2.5}, "probe must be a whole number"),
        ({"chunk": 64}, "chunk is set when the server starts"),
    ],
)
def test_wrong_settings_of_a_request(snapkv: Any, told: str, start: Callable[..., Any]) -> None:
    response = start(*SMALL, snapkv=CHUNKED).post("/completion", prompt="a", snapkv=snapkv)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_what_a_server_does_not_start_with(tiny_llama: Path) -> None:
    with pytest.raises(ServerError, match="the 512 cells of a slot must be more than budget 500 and probe 32 together"):
        Server(tiny_llama, *SMALL, "-np", "1", snapkv=replace(CHUNKED, budget=500, probe=32))
    with pytest.raises(ServerError, match="a draft model reads no prompt that is longer than its own cache"):
        Server(tiny_llama, *SMALL, "-np", "1", "-md", str(tiny_llama), "--spec-type", "draft-simple", snapkv=CHUNKED)


def test_a_request_has_its_own_probe(start: Callable[..., Any], tiny_llama: Path) -> None:
    client = start(*SMALL, snapkv=CHUNKED)
    prompt = tokens(8, 2000)
    logits = set()
    for probe in (0, 3, 24, 100):
        answer = client.complete(prompt, snapkv={"probe": probe}, n_probs=1)
        assert answer["timings"]["cache_n"] == 0
        assert answer["tokens"] == Reference(tiny_llama, replace(CHUNKED, probe=probe)).answer(prompt)
        logits.add(answer["completion_probabilities"][0]["logprob"])
    assert len(logits) == 4


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_side_by_side(unified: str, start: Callable[..., Any], tmp_path: Path) -> None:
    """Two long prompts are read in turns, and an answer goes on meanwhile."""
    # slow enough that events arrive in the order in which they happen
    model = tiny.write_llama(tmp_path / "slow.gguf", tiny.Shape(n_layer=4, n_head=8, n_embd_head=64, n_ff=1024))
    client = start("-c", str(3 * CELLS), "-np", "3", unified, "--cache-ram", "0", model=model, snapkv=CHUNKED)
    alone = {seed: client.complete(tokens(seed, 4000))["timings"]["snapkv"] for seed in (1, 2)}

    events: list[tuple[int, int]] = []  # of prompt 1 and 2: tokens read; of 3: tokens generated
    final: dict[int, Any] = {}
    is_answering = threading.Event()

    def read(seed: int) -> None:
        for event in stream(client, tokens(seed, 4000), N, return_progress=True, cache_prompt=False):
            if "prompt_progress" in event:
                assert event["prompt_progress"]["total"] == 4000
                events.append((seed, event["prompt_progress"]["processed"]))
            final[seed] = event

    def answer() -> None:
        # no event for a token that ends within a character
        for event in stream(client, tokens(3, 100), 700, timings_per_token=True):
            events.append((3, event["timings"]["predicted_n"]))
            is_answering.set()
            final[3] = event

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(answer)]
        assert is_answering.wait(60)
        running += [pool.submit(read, seed) for seed in (1, 2)]
        for future in running:
            future.result(timeout=300)
    began = max(next(i for i, event in enumerate(events) if event[0] == seed and event[1] > 0) for seed in (1, 2))
    ended = min(events.index((seed, 4000)) for seed in (1, 2))
    # in turns: when one is read, the other is half read at least
    later = 1 if events[ended][0] == 2 else 2
    assert max(n for seed, n in events[:ended] if seed == later) > 2000
    # the answer goes on meanwhile: a token with each batch
    answered = [n for seed, n in events[began:ended] if seed == 3]
    n_answered = answered[-1] - answered[0]
    n_batches = sum(seed == later for seed, _ in events[began:ended])
    assert n_batches > 20
    assert n_answered >= n_batches - 5
    for seed in (1, 2):
        told = final[seed]["timings"]["snapkv"]
        assert told["cells"] == 64
        assert told["evicted"] == 4000 - 64
        if unified == "--no-kv-unified":
            assert told["chunk_passes"] == alone[seed]["chunk_passes"]
    assert final[3]["tokens_predicted"] == 700
    assert final[3]["truncated"] is False


def test_more_prompts_than_a_unified_cache_holds(start: Callable[..., Any]) -> None:
    """Four slots share cells for two: prompts wait, are compacted or begin anew, and none fails."""
    client = start(*SMALL, "-np", "4", "--kv-unified", snapkv=CHUNKED)
    lengths = [40, 300, 2000, 480, 700, 505, 60, 1500, 400, 900, 200, 500]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda i: client.complete(tokens(i, lengths[i]), n=100 if i % 3 else 700), range(len(lengths)))
        )
    for i, answer in enumerate(answers):
        assert len(answer["tokens"]) == (100 if i % 3 else 700), i
        assert answer["truncated"] is False
        assert answer["timings"]["prompt_n"] == lengths[i]
    assert sum(client.cells()) <= CELLS
    assert client.metric("snapkv_chunk_passes_total") > 10
    assert client.metric("snapkv_answer_passes_total") > 0
    assert "Context size has been exceeded" not in client.server.log


def test_a_prompt_begins_anew_for_answers(start: Callable[..., Any]) -> None:
    """Answers within the budget have no cells to release: a prompt that is being read gives up its own, and waits."""
    options = ("-np", "3", "--kv-unified", "--cache-ram", "0")
    client = start(*SMALL, *options, snapkv=replace(CHUNKED, budget=200, chunk=30))
    is_answering = threading.Barrier(3)

    def answer(seed: int) -> Any:
        events = []
        for event in stream(client, tokens(seed, 40), 155, timings_per_token=True):
            events.append(event)
            if len(events) == 1:
                is_answering.wait(60)
        return events[-1]

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(answer, seed) for seed in (1, 2)]
        is_answering.wait(60)
        long = client.complete(tokens(3, 6000))
        answers = [future.result(timeout=300) for future in running]
    assert [answer["timings"]["predicted_n"] for answer in answers] == [155, 155]
    assert not any(answer["truncated"] for answer in answers)
    assert "the prompt is read anew" in client.server.log
    assert len(long["tokens"]) == N
    assert long["timings"]["cache_n"] == 0
    assert long["timings"]["prompt_n"] == 6000
    assert long["timings"]["snapkv"]["evicted"] == 6000 - 200


def test_an_answer_ends_with_the_cells(start: Callable[..., Any]) -> None:
    """Three answers within the budget, and no cells for all of them: one ends early, the others go on."""
    client = start(*SMALL, "-np", "3", "--kv-unified", snapkv=replace(CHUNKED, budget=300))
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda seed: client.complete(tokens(seed, 40), n=200), (1, 2, 3)))
    assert sorted(answer["truncated"] for answer in answers) == [False, False, True]
    for answer in answers:
        assert answer["stop_type"] == "limit"
        assert (len(answer["tokens"]) == 200) == (not answer["truncated"])
    assert "Context size has been exceeded" not in client.server.log


def test_conversations_that_wait_for_each_other(start: Callable[..., Any]) -> None:
    """Two of them fill the cache with as much as the budget: one gives way."""
    options = ("-np", "2", "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
    client = start(*SMALL, *options, snapkv=replace(CHUNKED, budget=240))
    prompts = [tokens(seed, 250) for seed in (1, 2)]
    for i in range(2):
        prompts[i] += client.complete(prompts[i], id_slot=i)["tokens"] + tokens(7 + i, 700)[1:]
    assert client.cells() == [240 + N - 1] * 2
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda i: client.complete(prompts[i], id_slot=i), range(2)))
    assert [answer["timings"]["snapkv"]["cells"] for answer in answers] == [240] * 2
    assert sorted(answer["timings"]["cache_n"] for answer in answers) == [0, 250 + N - 1]


def test_whole_caches_beside_long_prompts(start: Callable[..., Any]) -> None:
    """Requests for the full cache, which no pass can shorten, wait for its cells."""
    client = start(*SMALL, "-np", "4", "--kv-unified", snapkv=CHUNKED)
    lengths = [300, 1500, 350, 700, 400, 900, 270, 480]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda i: client.complete(tokens(i, lengths[i]), n=30, snapkv=i % 2 == 1), range(len(lengths)))
        )
    for i, answer in enumerate(answers):
        assert len(answer["tokens"]) == 30
        assert answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == lengths[i]
        assert ("snapkv" in answer["timings"]) == (i % 2 == 1)
    assert "Context size has been exceeded" not in client.server.log


@pytest.mark.parametrize("name", ["llama", "lfm2"])
@pytest.mark.parametrize(
    ("options", "snapkv"),
    [
        (("-c", "512", "-np", "6", "--kv-unified"), replace(CHUNKED, budget=100)),
        (("-c", "1024", "-np", "4", "--kv-unified", "--kv-unified-per-slot", "300"), CHUNKED),
        (("-c", "768", "-np", "4", "--kv-unified", "--no-cache-idle-slots", "--spec-type", "ngram-simple"), CHUNKED),
        (("-c", "2048", "-np", "4", "--no-kv-unified", "--spec-type", "ngram-simple"), CHUNKED),
    ],
    ids=["tight", "per slot", "drafts", "streams"],
)
def test_many_clients(
    name: str, options: tuple[str, ...], snapkv: SnapKV, start: Callable[..., Any], tmp_path: Path
) -> None:
    """Requests of all kinds at once, more than the cells hold: each gets its answer or one that ended early."""
    client = start(*options, "-b", "256", model=tiny.WRITERS[name](tmp_path / "m.gguf"), snapkv=snapkv)
    rng = random.Random(7)
    kinds: list[dict[str, Any]] = [{}, {}, {"snapkv": False}, {"snapkv": {"budget": 40}}, {"n_cmpl": 3}]

    def ask(i: int, kind: dict[str, Any], n_prompt: int, n: int) -> int:
        n_prompt = min(n_prompt, 280) if kind.get("snapkv") is False else n_prompt
        prompt = (tokens(i, 30) * 50)[:n_prompt] if i % 3 == 0 else tokens(i, n_prompt)
        if i % 7 == 0:
            with contextlib.closing(stream(client, prompt, n, return_progress=True)) as events:
                list(itertools.islice(events, i % 5))
            return 0
        answers = client.complete(prompt, n=n, **kind)
        for answer in answers if isinstance(answers, list) else [answers]:
            assert answer["truncated"] or len(answer["tokens"]) == n
        return 1

    lengths = [5, 150, 290, 700, 1500]
    asked = [(i, rng.choice(kinds), rng.choice(lengths), rng.choice([1, 3, 50, 400])) for i in range(40)]
    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(lambda args: ask(*args), asked)) == 34
    assert client.metric("snapkv_chunk_passes_total") > 10
    assert "Context size has been exceeded" not in client.server.log
    until = time.monotonic() + 30
    while any(slot["is_processing"] for slot in client.get("/slots")):
        assert time.monotonic() < until
        time.sleep(0.02)
    # nothing is left behind that would make the next one wait
    assert len(client.complete(tokens(1, 2000), n=300)["tokens"]) == 300


def test_cancelled_in_the_middle(start: Callable[..., Any], tiny_llama: Path) -> None:
    client = start(*SMALL, snapkv=CHUNKED)
    prompt = tokens(1, 6000)
    for n_events in (1, 9, 30):
        with contextlib.closing(stream(client, prompt, N, return_progress=True)) as events:
            read = [event["prompt_progress"]["processed"] for event in itertools.islice(events, n_events)]
        assert read == sorted(read)
        assert read[-1] < 6000
        until = time.monotonic() + 30
        while client.get("/slots")[0]["is_processing"]:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert client.get("/slots")[0]["n_prompt_tokens"] < 6000
        # what its end has chosen serves nobody
        if read[-1] > CELLS:
            assert client.cells() == [0]
    shorter = prompt[:2000]
    answer = client.complete(shorter)
    assert answer["timings"]["cache_n"] == 0
    assert answer["tokens"] == Reference(tiny_llama).answer(shorter)


def test_what_was_kept_for_one_question_does_not_serve_another(start: Callable[..., Any], tiny_llama: Path) -> None:
    client = start(*SMALL, snapkv=CHUNKED)
    text = tokens(1, 1200)
    client.complete(text + tokens(5, 25)[1:], n=1)  # no pass at its end
    assert client.get("/slots")[0]["n_cells"] < CELLS
    other = text + tokens(6, 25)[1:]
    answer = client.complete(other)
    assert answer["timings"]["cache_n"] == 0
    assert answer["tokens"] == Reference(tiny_llama).answer(other)


@pytest.mark.parametrize("n", [0, 1])
def test_no_pass_at_the_end(n: int, start: Callable[..., Any]) -> None:
    client = start(*SMALL, snapkv=CHUNKED)
    told = client.complete(tokens(1, 1200), n=n)["timings"]["snapkv"]
    assert told["chunk_passes"] > 0
    assert [told["cells"]] == client.cells()
    assert told["evicted"] == 1200 - told["cells"]


def test_progress(start: Callable[..., Any]) -> None:
    client = start(*SMALL, snapkv=CHUNKED)
    prompt = tokens(1, 2000)
    progress = [
        event["prompt_progress"]
        for event in stream(client, prompt, 2, return_progress=True)
        if "prompt_progress" in event
    ]
    assert {part["total"] for part in progress} == {2000}
    read = [part["processed"] for part in progress]
    assert read[0] == 0
    assert read[-1] == 2000
    assert read == sorted(set(read))
    assert max(after - before for before, after in itertools.pairwise(read)) <= 128


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_several_completions_of_a_long_prompt(unified: str, start: Callable[..., Any], tiny_llama: Path) -> None:
    cells = CELLS if unified == "--kv-unified" else 4 * CELLS
    client = start("-c", str(cells), "-np", "4", unified, snapkv=CHUNKED)
    prompt = tokens(1, 1500)
    answers = client.complete(prompt, n_cmpl=3)
    assert [answer["timings"]["snapkv"]["cells"] for answer in answers] == [64] * 3
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1
    if unified == "--no-kv-unified":
        assert answers[0]["tokens"] == Reference(tiny_llama).answer(prompt)
    # shared cells stay where they are: an answer ends when the cells do, at the latest
    answers = client.complete(tokens(2, 1500), n=400, n_cmpl=3)
    assert all(answer["truncated"] or len(answer["tokens"]) == 400 for answer in answers)
    assert client.complete(prompt, n=20)["timings"]["snapkv"]["cells"] == 64


def test_states_in_memory_and_in_files(start: Callable[..., Any], tiny_llama: Path, tmp_path: Path) -> None:
    client = start(*SMALL, "--cache-ram", "64", "--slot-save-path", f"{tmp_path}/", snapkv=CHUNKED)
    prompts = {seed: tokens(seed, 900 + seed) for seed in (11, 12)}
    references = {seed: Reference(tiny_llama) for seed in prompts}
    for turn, seed in itertools.product(range(3), prompts):
        answer = client.complete(prompts[seed])
        assert (answer["timings"]["cache_n"] > 0) == (turn > 0), (turn, seed)
        if turn == 0:
            assert answer["tokens"] == references[seed].answer(prompts[seed])
        prompts[seed] = prompts[seed] + answer["tokens"] + MORE
    n_saved = client.post("/slots/0?action=save", filename="long").json()["n_saved"]
    assert n_saved > CELLS
    n_cells = client.cells()
    client.post("/slots/0?action=erase")
    assert client.post("/slots/0?action=restore", filename="long").json()["n_restored"] == n_saved
    assert client.cells() == n_cells
    assert client.complete(prompts[12])["timings"]["cache_n"] == n_saved
    client.post("/slots/0?action=restore", filename="long")
    assert client.complete(prompts[12][:800])["timings"]["cache_n"] == 0


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "gemma4", "qwen2vl"])
@pytest.mark.parametrize("options", [[], ["--swa-full"]], ids=["window", "full"])
def test_other_kinds_of_memory(name: str, options: list[str], start: Callable[..., Any], tmp_path: Path) -> None:
    """Sliding windows, a hybrid, layers that share K and V: the probe leaves nothing behind."""
    path = tiny.WRITERS[name](tmp_path / "m.gguf")
    client = start(*SMALL, *options, model=path, snapkv=CHUNKED)
    reference = Reference(path, swa_full=bool(options))
    prompt = tokens(1, 1200)
    for turn in range(2):
        answer = client.complete(prompt)
        assert answer["timings"]["snapkv"]["cells"] == 64
        assert answer["tokens"] == reference.answer(prompt), turn
        assert answer["timings"]["snapkv"]["chunk_passes"] == reference.chunk_passes
        prompt = prompt + answer["tokens"] + tokens(7, 600)[1:]
    long = client.complete(prompt, n=600)
    assert len(long["tokens"]) == 600
    assert long["timings"]["snapkv"]["answer_passes"] > 0


def test_drafts_from_the_text(start: Callable[..., Any], tiny_llama: Path) -> None:
    client = start(*SMALL, "--spec-type", "ngram-simple", snapkv=CHUNKED)
    prompt = (tokens(1, 40) * 30)[:1000]
    answer = client.complete(prompt, n=900)
    assert answer["timings"].get("draft_n", 0) > 0
    assert len(answer["tokens"]) == 900
    assert answer["timings"]["snapkv"]["answer_passes"] > 0
    assert answer["tokens"][:60] == Reference(tiny_llama).answer(prompt, 60)


def test_long_drafts_that_are_rejected(start: Callable[..., Any]) -> None:
    """Every pass has its whole window, however long the drafts that were taken back."""
    client = start(
        *SMALL, "-np", "2", "--kv-unified", "--cache-ram", "0", "--spec-type", "ngram-simple",
        "--spec-ngram-simple-size-n", "8", "--spec-ngram-simple-size-m", "48", "-lv", "4", snapkv=CHUNKED,
    )  # fmt: skip
    coins = [[100, 90.0], [101, 90.0]]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            client.complete, tokens(1, 300), n=2000, id_slot=0, temperature=9.0, seed=1, logit_bias=coins
        )
        for seed in range(40):
            client.complete(tokens(2 + seed, 300 if seed % 2 else 100), n=1 if seed % 2 else 150, id_slot=1)
        answer = waiting.result()
    assert set(answer["tokens"]) == {100, 101}
    assert len(answer["tokens"]) == 2000
    assert answer["timings"]["draft_n"] > 2 * answer["timings"]["draft_n_accepted"] > 0
    assert answer["timings"]["snapkv"]["answer_passes"] > 2
    assert set(re.findall(r"made room, (\d+) tokens chose", client.server.log)) == {str(CHUNKED.window)}
