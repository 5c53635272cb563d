"""Every road on which a prompt meets what a slot holds; answers are those of snapkv_gguf.Llama in the same turns."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_client import CONFIG, tokens

from snapkv_gguf import tiny

N = 12  # tokens of an answer
PROMPT = tokens(1, 300)
MORE = tokens(2, 31)[1:]


class Reference:
    """The same turns with the Python bindings: answers, and how many tokens of the prompt were not evaluated again."""

    def __init__(self, path: Path, snapkv: Any = CONFIG, **kwargs: Any) -> None:
        from snapkv_gguf import Llama

        self.llm = Llama(
            str(path),
            snapkv=snapkv,
            n_ctx=1024,
            n_batch=128,
            n_ubatch=64,
            n_threads=1,
            n_threads_batch=1,
            verbose=False,
            **kwargs,
        )

    def answer(self, prompt: list[int], n: int = N) -> list[int]:
        with contextlib.closing(self.llm.generate(prompt, temp=0.0)) as generator:
            return list(itertools.islice(generator, n))


@pytest.fixture
def reference(tiny_llama: Path) -> Reference:
    return Reference(tiny_llama)


@pytest.fixture
def full(tiny_llama: Path) -> Reference:
    return Reference(tiny_llama, snapkv=False)


def test_a_conversation_goes_on(start: Callable[..., Any], reference: Reference) -> None:
    client = start()
    prompt = PROMPT
    for turn in range(4):
        answer = client.complete(prompt, n=N)
        assert answer["tokens"] == reference.answer(prompt), turn
        assert answer["timings"]["cache_n"] == (0 if turn == 0 else len(prompt) - len(MORE) - 1), turn
        assert answer["timings"]["snapkv"]["cells"] == 64
        assert client.cells() == [64 + N - 1]
        prompt = prompt + answer["tokens"] + MORE
    assert client.metric("snapkv_passes_total") == 4


def test_the_same_prompt_again(start: Callable[..., Any], reference: Reference) -> None:
    client = start()
    first = client.complete(PROMPT)
    assert first["tokens"] == reference.answer(PROMPT)
    again = client.complete(PROMPT)
    assert again["timings"]["cache_n"] == len(PROMPT) - 1  # the last one is replayed, for its logits
    assert again["timings"]["snapkv"]["reason"] == "the sequence is within the budget"
    assert client.cells() == [64 + N - 1]
    assert client.complete(PROMPT)["tokens"] == again["tokens"]


@pytest.mark.parametrize("n_common", [0, 1, 64, 200, 291, 292, 299])
def test_a_prompt_that_diverges(n_common: int, start: Callable[..., Any], reference: Reference) -> None:
    """Before the frontier it must be read in full, and after it, too: what was kept was chosen for another question."""
    client = start()
    client.complete(PROMPT)
    other = PROMPT[:n_common] + tokens(7, 301 - n_common)[1:]
    answer = client.complete(other)
    assert answer["timings"]["cache_n"] == 0
    assert answer["tokens"] == reference.answer(other)


@pytest.mark.parametrize("n", [1, 64, 200, 291, 299])
def test_a_shorter_prompt(n: int, start: Callable[..., Any], reference: Reference) -> None:
    client = start()
    client.complete(PROMPT)
    answer = client.complete(PROMPT[:n])
    assert answer["timings"]["cache_n"] == 0
    assert answer["tokens"] == reference.answer(PROMPT[:n])


def test_the_answer_is_edited(start: Callable[..., Any], reference: Reference) -> None:
    client = start()
    answer = client.complete(PROMPT)["tokens"]
    assert answer == reference.answer(PROMPT)
    edited = PROMPT + answer[:4] + MORE
    second = client.complete(edited)
    assert second["timings"]["cache_n"] == len(PROMPT) + 4
    assert second["tokens"] == reference.answer(edited)


def test_without_cache_prompt(start: Callable[..., Any], reference: Reference) -> None:
    client = start()
    expected = reference.answer(PROMPT)
    for _ in range(2):
        answer = client.complete(PROMPT, cache_prompt=False)
        assert answer["timings"]["cache_n"] == 0
        assert answer["tokens"] == expected


def test_the_full_cache_is_asked_for(start: Callable[..., Any], full: Reference, reference: Reference) -> None:
    client = start()
    client.complete(PROMPT)
    answer = client.complete(PROMPT, snapkv=False)
    assert answer["timings"]["cache_n"] == 0
    assert answer["tokens"] == full.answer(PROMPT)
    assert "snapkv" not in answer["timings"]
    # and compacted again: the queries of the prompt's last tokens are not those of the answer
    answer = client.complete(PROMPT)
    assert answer["timings"]["cache_n"] == len(PROMPT) - CONFIG.window
    assert answer["timings"]["snapkv"]["cells"] == 64
    assert answer["tokens"] == reference.answer(PROMPT)


def test_other_settings_than_the_slots(start: Callable[..., Any]) -> None:
    client = start()
    client.complete(PROMPT)
    for snapkv in ({"budget": 128}, {"kernel": 1}, {"pool": "avg"}, {"recent": 0}):
        answer = client.complete(PROMPT, snapkv=snapkv)
        assert answer["timings"]["cache_n"] == 0
        assert answer["timings"]["snapkv"]["cells"] == snapkv.get("budget", 64)


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_several_completions_of_one_prompt(unified: str, start: Callable[..., Any], reference: Reference) -> None:
    client = start("-np", "4", "-c", "4096", unified)
    expected = reference.answer(PROMPT)
    for _ in range(2):  # the second time the parent's last token is replayed
        answers = client.complete(PROMPT, n_cmpl=3)
        assert len(answers) == 3
        assert [answer["timings"]["snapkv"]["cells"] for answer in answers] == [64] * 3
        assert len({tuple(answer["tokens"]) for answer in answers}) == 1
        if answers[0]["timings"]["cache_n"] == 0:
            assert answers[0]["tokens"] == expected
    assert sorted(client.cells()) == [0, 0, 0, 64 + N - 1]


def test_the_context_is_full_when_its_cells_are(start: Callable[..., Any]) -> None:
    client = start("-c", "512")
    answer = client.complete(PROMPT, n=-1)
    # 511 cells: 64 are kept, and the last token is not decoded
    assert answer["truncated"] is True
    assert len(answer["tokens"]) == 512 - 64
    assert client.cells() == [511]
    whole = client.complete(PROMPT, n=-1, snapkv=False)
    assert len(whole["tokens"]) == 512 - 300
    too_long = client.post("/completion", prompt=tokens(1, 512))
    assert too_long.status_code == 400
    assert too_long.json()["error"]["type"] == "exceed_context_size_error"
    client.complete(PROMPT)


def test_the_trained_context_is_the_end(start: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "short.gguf", tiny.Shape(n_ctx=600))
    client = start("-c", "512", model=model)
    answer = client.complete(PROMPT, n=-1)
    assert answer["truncated"] is True
    assert len(answer["tokens"]) == 600 - 300


def test_cancelled(start: Callable[..., Any], reference: Reference) -> None:
    client = start()
    expected = reference.answer(PROMPT)
    for n_pieces in (0, 1, 2, 5):
        body = {
            "prompt": tokens(3 + n_pieces, 400),
            "n_predict": 500,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        with client.http.stream("POST", "/completion", json=body) as response:
            for _ in zip(range(n_pieces), response.iter_lines(), strict=False):
                pass
        # what it left can be gone on from
        longer = body["prompt"] + tokens(9, 40)[1:]
        assert client.complete(longer)["timings"]["snapkv"]["cells"] == 64
        assert client.complete(PROMPT, cache_prompt=False)["tokens"] == expected


@pytest.mark.parametrize(
    "options", [["--cache-ram", "64"], ["--cache-ram", "64", "--kv-unified"], ["--cache-ram", "0"]]
)
def test_slots_that_wait_in_memory(options: list[str], start: Callable[..., Any], reference: Reference) -> None:
    """Conversations take turns in one slot; the others are saved, and compacted ones come back as such."""
    client = start(*options, "--cache-idle-slots", "-np", "2", "-c", "2048")
    prompts = {seed: tokens(seed, 250 + seed) for seed in (11, 12, 13)}
    expected = {seed: Reference(Path(reference.llm.model_path)) for seed in prompts}
    n_cached = []
    for turn, seed in itertools.product(range(3), prompts):
        answer = client.complete(prompts[seed])
        n_cached.append(answer["timings"]["cache_n"])
        if turn == 0 or n_cached[-1] > 0:
            assert answer["tokens"] == expected[seed].answer(prompts[seed]), (turn, seed)
        prompts[seed] = prompts[seed] + answer["tokens"] + MORE
    if options[1] == "64":
        assert all(n > 0 for n in n_cached[3:]), n_cached
    # one that was saved and diverges
    other = prompts[11][:100] + tokens(14, 100)[1:]
    assert client.complete(other)["timings"]["cache_n"] == 0


def test_similar_prompts_choose_slots(start: Callable[..., Any]) -> None:
    client = start("-np", "2", "-c", "2048", "--slot-prompt-similarity", "0.1")
    client.complete(PROMPT)
    for n_common in (290, 250, 100, 40):
        client.complete(PROMPT[:n_common] + tokens(20 + n_common, 60)[1:])
    first = client.complete(PROMPT)
    assert first["timings"]["snapkv"]["cells"] == 64


@pytest.mark.parametrize("options", [["--no-kv-unified"], ["--kv-unified"], ["--kv-unified", "--cache-ram", "0"]])
def test_conversations_with_the_same_beginning(
    options: list[str], start: Callable[..., Any], reference: Reference
) -> None:
    """A slot that another conversation cannot go on from is not taken from its own."""
    client = start("-np", "3", "-c", "3072", *options)
    prompts = {seed: PROMPT[:250] + tokens(seed, 80)[1:] for seed in (41, 42)}
    expected = {seed: Reference(Path(reference.llm.model_path)) for seed in prompts}
    for turn, seed in itertools.product(range(3), prompts):
        answer = client.complete(prompts[seed])
        assert (answer["timings"]["cache_n"] > 0) == (turn > 0), (turn, seed)
        assert answer["tokens"] == expected[seed].answer(prompts[seed]), (turn, seed)
        prompts[seed] = prompts[seed] + answer["tokens"] + MORE


def test_slot_files(start: Callable[..., Any], tmp_path: Path, reference: Reference) -> None:
    client = start("--slot-save-path", f"{tmp_path}/")
    first = client.complete(PROMPT)["tokens"]
    assert first == reference.answer(PROMPT)
    saved = client.post("/slots/0?action=save", filename="compacted")
    assert saved.json()["n_saved"] == len(PROMPT) + N - 1
    following = PROMPT + first + MORE
    expected = reference.answer(following)

    erased = client.post("/slots/0?action=erase")
    assert erased.json()["n_erased"] == len(PROMPT) + N - 1
    assert client.cells() == [0]

    other = start("--slot-save-path", f"{tmp_path}/")
    for one in (client, other):
        restored = one.post("/slots/0?action=restore", filename="compacted")
        assert restored.json()["n_restored"] == len(PROMPT) + N - 1
        assert one.cells() == [64 + N - 1]
        answer = one.complete(following)
        assert answer["timings"]["cache_n"] == len(PROMPT) + N - 1
        assert answer["tokens"] == expected
        # never taken for a whole one
        one.post("/slots/0?action=restore", filename="compacted")
        assert one.complete(PROMPT[:200])["timings"]["cache_n"] == 0
        one.post("/slots/0?action=restore", filename="compacted")
        assert one.complete(PROMPT, snapkv=False)["timings"]["cache_n"] == 0


def test_slot_files_of_another_kind_of_model(start: Callable[..., Any], tmp_path: Path, reference: Reference) -> None:
    """Its cache begins like this model's, and goes on."""
    other = start("--slot-save-path", f"{tmp_path}/", model=tiny.write_lfm2(tmp_path / "lfm2.gguf"))
    other.complete(PROMPT)
    assert other.post("/slots/0?action=save", filename="lfm2").status_code == 200
    for snapkv in (CONFIG, False):
        client = start("--slot-save-path", f"{tmp_path}/", snapkv=snapkv)
        refused = client.post("/slots/0?action=restore", filename="lfm2")
        assert refused.status_code == 400
    assert client.complete(PROMPT)["timings"]["cache_n"] == 0


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_busy_slot_asked_for_by_its_id(name: str, start: Callable[..., Any], tmp_path: Path) -> None:
    """The cache of a request that is being answered stays its own, whatever state in memory suits the next one."""
    client = start("-c", "2048", "-np", "2", "--cache-ram", "64", model=tiny.WRITERS[name](tmp_path / "m.gguf"))
    running, waiting = tokens(41, 300), tokens(42, 300)
    expected = [client.complete(prompt, n=150, id_slot=0)["tokens"] for prompt in (running, waiting)]
    client.complete(tokens(43, 300), id_slot=0)  # both are in memory now
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.complete, running, 150, id_slot=0)
        while not client.get("/slots")[0]["is_processing"]:
            time.sleep(0.005)
        second = pool.submit(client.complete, waiting, 150, id_slot=0)
        answers = [first.result(timeout=120)["tokens"], second.result(timeout=120)["tokens"]]
    assert [len(answer) for answer in answers] == [150, 150]
    if name == "llama":  # a hybrid reads a prompt that comes back from a checkpoint on
        assert answers[0] == expected[0]


def test_slot_files_of_a_server_without(start: Callable[..., Any], tmp_path: Path, full: Reference) -> None:
    off = start("--slot-save-path", f"{tmp_path}/", snapkv=False)
    off.complete(PROMPT)
    off.post("/slots/0?action=save", filename="whole")
    on = start("--slot-save-path", f"{tmp_path}/")
    on.post("/slots/0?action=restore", filename="whole")
    answer = on.complete(PROMPT)
    assert answer["timings"]["cache_n"] == len(PROMPT) - CONFIG.window
    assert answer["timings"]["snapkv"]["cells"] == 64
    # the other way round, upstream's chunk reuse and context shift would take what is left for all of it
    on.post("/slots/0?action=save", filename="compacted")
    refused = off.post("/slots/0?action=restore", filename="compacted")
    assert refused.status_code == 400
    assert "saved after a SnapKV pass, start the server with --snapkv" in refused.json()["error"]["message"]
    assert off.complete(PROMPT)["tokens"] == full.answer(PROMPT)


def test_a_slot_that_went_on_beyond_its_context_is_restored(start: Callable[..., Any], tmp_path: Path) -> None:
    client = start("-c", "512", "--slot-save-path", f"{tmp_path}/")
    client.complete(PROMPT, n=400)
    client.post("/slots/0?action=save", filename="long")
    assert client.post("/slots/0?action=restore", filename="long").status_code == 200
    assert client.cells() == [64 + 399]


def test_drafts_of_another_model(start: Callable[..., Any], reference: Reference, tmp_path: Path) -> None:
    # half of what the same model drafts is accepted, nothing of what another one drafts
    for draft in (Path(reference.llm.model_path), tiny.write_llama(tmp_path / "draft.gguf", seed=7)):
        client = start(
            "-md", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", "4", "--spec-draft-p-min", "0"
        )
        fresh = Reference(reference.llm.model_path)
        prompt = PROMPT
        for _ in range(3):
            answer = client.complete(prompt, n=40)
            assert answer["timings"]["draft_n"] > 0
            assert answer["tokens"] == fresh.answer(prompt, 40)
            assert answer["timings"]["snapkv"]["cells"] == 64
            prompt = prompt + answer["tokens"] + MORE


def test_drafts_from_the_text(start: Callable[..., Any], reference: Reference) -> None:
    client = start("--spec-type", "ngram-simple")
    prompt = (PROMPT[:40] * 8)[:300]
    n_drafted = 0
    for _ in range(3):
        answer = client.complete(prompt, n=60)
        n_drafted += answer["timings"].get("draft_n", 0)
        assert answer["tokens"] == reference.answer(prompt, 60)
        prompt = prompt + answer["tokens"] + MORE
    assert n_drafted > 0


@pytest.mark.parametrize("options", [[], ["--swa-full"], ["--ctx-checkpoints", "0"], ["--checkpoint-min-step", "16"]])
def test_sliding_windows_and_checkpoints(options: list[str], start: Callable[..., Any], tiny_gemma3: Path) -> None:
    client = start(*options, model=tiny_gemma3)
    prompt = PROMPT
    reference = Reference(tiny_gemma3, swa_full=True)
    n_cached = []
    for turn in range(3):
        answer = client.complete(prompt)
        n_cached.append(answer["timings"]["cache_n"])
        assert answer["timings"]["snapkv"]["cells"] == 64
        assert answer["tokens"] == reference.answer(prompt), turn
        prompt = prompt + answer["tokens"] + MORE
    assert n_cached[0] == 0
    assert all(n > 0 for n in n_cached[1:]), n_cached  # the sliding window's cells are still there
    fresh = Reference(tiny_gemma3, snapkv=False, swa_full=True)
    for n_common in (320, 299, 250, 100, 1):
        other = prompt[:n_common] + tokens(30, 80)[1:]
        whole = client.complete(other, snapkv=False)
        assert whole["tokens"] == fresh.answer(other)
        compacted = client.complete(other)
        if compacted["timings"]["cache_n"] == 0:
            assert compacted["tokens"] == Reference(tiny_gemma3, swa_full=True).answer(other)
        client.complete(prompt)


def test_sliding_windows_in_memory(start: Callable[..., Any], tiny_gemma3: Path) -> None:
    """A saved state holds only the sliding window; the checkpoints after the frontier bring a conversation back."""
    client = start("--cache-ram", "64", "-np", "2", "-c", "2048", "--kv-unified", model=tiny_gemma3)
    prompts = {seed: tokens(seed, 250 + seed) for seed in (11, 12, 13)}
    for turn, seed in itertools.product(range(3), prompts):
        answer = client.complete(prompts[seed])
        assert (answer["timings"]["cache_n"] > 0) == (turn > 0), (turn, seed)
        assert answer["timings"]["snapkv"]["cells"] == 64
        prompts[seed] = prompts[seed] + answer["tokens"] + MORE


@pytest.mark.parametrize("name", ["lfm2", "gemma4", "qwen2vl"])
def test_other_kinds_of_memory(name: str, start: Callable[..., Any], tmp_path: Path) -> None:
    """A hybrid, layers that share K and V, M-RoPE: turns, other prompts, slot files."""
    path = tiny.WRITERS[name](tmp_path / "m.gguf")
    client = start("--slot-save-path", str(tmp_path), "--swa-full", model=path)
    reference = Reference(path, swa_full=True)
    prompt = PROMPT
    for turn in range(3):
        answer = client.complete(prompt)
        assert answer["timings"]["snapkv"]["cells"] == 64
        assert (answer["timings"]["cache_n"] > 0) == (turn > 0), turn
        assert answer["tokens"] == reference.answer(prompt), turn
        prompt = prompt + answer["tokens"] + MORE
    assert client.post("/slots/0?action=save", filename="slot.bin").status_code == 200
    n_cells = client.cells()

    for n_common in (len(prompt), 320, 299, 250, 1):
        other = prompt[:n_common] + tokens(30, 80)[1:]
        whole = client.complete(other, snapkv=False)
        assert whole["tokens"] == Reference(path, snapkv=False, swa_full=True).answer(other), n_common
        compacted = client.complete(other)
        if compacted["timings"]["cache_n"] == 0:
            assert compacted["tokens"] == Reference(path, swa_full=True).answer(other), n_common

    assert client.post("/slots/0?action=restore", filename="slot.bin").status_code == 200
    assert client.cells() == n_cells
    answer = client.complete(prompt)
    assert answer["tokens"] == reference.answer(prompt)
