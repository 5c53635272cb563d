# ruff: noqa: RUF001 (Chinese punctuation)
from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapkv_gguf.eval.metrics import METRICS
from snapkv_gguf.eval.schema import Request, Sample
from snapkv_gguf.eval.tasks.longbench import TASK

DATA = Path(__file__).parent / "data" / "longbench"

# metric and longest answer, as LongBench's eval.py and config/dataset2maxlen.json have them
DATASETS = {
    "narrativeqa": ("qa_f1", 128),
    "qasper": ("qa_f1", 128),
    "multifieldqa_en": ("qa_f1", 64),
    "multifieldqa_zh": ("qa_f1_zh", 64),
    "hotpotqa": ("qa_f1", 32),
    "2wikimqa": ("qa_f1", 32),
    "musique": ("qa_f1", 32),
    "dureader": ("rouge_l_zh", 128),
    "gov_report": ("rouge_l", 512),
    "qmsum": ("rouge_l", 512),
    "multi_news": ("rouge_l", 512),
    "vcsum": ("rouge_l_zh", 512),
    "trec": ("classification", 64),
    "triviaqa": ("qa_f1_first_line", 32),
    "samsum": ("rouge_l_first_line", 128),
    "lsht": ("classification", 64),
    "passage_count": ("count", 32),
    "passage_retrieval_en": ("retrieval", 32),
    "passage_retrieval_zh": ("retrieval_zh", 32),
    "lcc": ("code_similarity", 64),
    "repobench-p": ("code_similarity", 64),
}

# that take no input of the sample's own
NO_INPUT = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


def words(text: str) -> int:
    return len(text.split())


def line(dataset: str = "hotpotqa", **fields: Any) -> dict[str, Any]:
    return {
        "input": "Who was it?",
        "context": "It was Ada.",
        "answers": ["Ada"],
        "length": 3,
        "dataset": dataset,
        "language": "en",
        "all_classes": None,
        "_id": "0",
    } | fields


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def samples(
    directory: Path | None,
    *lengths: int,
    n_samples: int = 10,
    seed: int = 0,
    count: Callable[[str], int] = words,
) -> list[Sample]:
    return list(TASK.build(Request(lengths or (400,), n_samples, seed, count, longbench=directory)))


def whole(sample: Sample) -> str:
    (question,) = sample.questions
    return f"{sample.context}\n\n{question.text}\n{question.lead}"


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset(name: str, tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", line(name, input="What {is} it?", context="<context {0}>", all_classes=["Ada", "Ben"]))
    (sample,) = samples(tmp_path)
    (question,) = sample.questions
    assert (sample.metric, question.max_tokens) == DATASETS[name]
    assert (sample.task, sample.fields) == ("longbench", {"length": 400, "dataset": name})
    assert sample.id == f"longbench/{name}/400/0"
    assert question.references == ("Ada",)
    assert question.choices == ("Ada", "Ben")
    # an instruction, the context and nothing after it; then the question
    assert re.fullmatch(r".{10,}\n\n<context \{0\}>", sample.context)
    assert ("What {is} it?" in question.text) == (name not in NO_INPUT)
    assert question.text


def test_known_are_all_of_longbench(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", line("squad"))
    with pytest.raises(ValueError, match="unknown dataset 'squad'") as error:
        samples(tmp_path)
    assert str(error.value).rpartition("known are ")[2].split(", ") == list(DATASETS)


@pytest.mark.parametrize(
    ("name", "given", "text", "lead"),
    [
        ("trec", "Question: What is it ?\nType:", "Question: What is it ?", "Type:"),
        ("triviaqa", "Passage:\nP\nQuestion:\nQ\nAnswer:\n", "Passage:\nP\nQuestion:\nQ", "Answer:"),
        ("samsum", "Dialogue: A: hi\nB: ho\nSummary: ", "Dialogue: A: hi\nB: ho", "Summary:"),
        ("lsht", "新闻内容：\n好消息\n类别：", "新闻内容：\n好消息", "类别："),
        ("lsht", "只有一行：", "只有一行：", ""),
        ("repobench-p", "    def f():\n", "    def f():", "Next line of code:"),
    ],
)
def test_examples_are_continued(name: str, given: str, text: str, lead: str, tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", line(name, input=given, all_classes=["Ada"]))
    (question,) = samples(tmp_path)[0].questions
    assert (question.text, question.lead, question.lead_in_chat) == (text, lead, True)


def test_answers_get_their_scores() -> None:
    made = samples(DATA)
    assert {sample.fields["dataset"] for sample in made} >= {"hotpotqa", "hotpotqa_e", "vcsum", "lcc"}
    # all nine metrics of LongBench
    assert {sample.metric.removesuffix("_first_line") for sample in made} == {
        metric.removesuffix("_first_line") for metric, _ in DATASETS.values()
    }
    for sample in made:
        (question,) = sample.questions
        score = METRICS[sample.metric]
        for reference in question.references:
            assert score(reference, question) == pytest.approx(1, abs=1e-6), sample.id
        assert score("~", question) < 0.1, sample.id
        if sample.metric.endswith("_first_line") or sample.metric == "classification":
            assert score(f"\n{question.references[0]}\nQuestion: more", question) == pytest.approx(1, abs=1e-6)


def test_lines_as_published() -> None:
    (sample,) = (s for s in samples(DATA) if s.id == "longbench/passage_retrieval_en/400/passage_retrieval_en-0")
    assert sample.context.endswith("Paragraph 3: Glass is made of sand that is heated until it melts.")
    assert "The text tells of a way on which salt was carried inland." in sample.questions[0].text
    # two numbers, one of them right
    assert METRICS[sample.metric]("Paragraph 2 or 3", sample.questions[0]) == 1 / 2


def test_choice_depends_on_the_seed_alone(tmp_path: Path) -> None:
    lines = [line(_id=f"{n}", context=f"It was {n}.") for n in range(40)]
    write(tmp_path / "hotpotqa.jsonl", *lines)
    chosen = [sample.id for sample in samples(tmp_path, n_samples=5)]
    assert len(set(chosen)) == 5
    assert [sample.id for sample in samples(tmp_path, n_samples=5)] == chosen
    assert [sample.id for sample in samples(tmp_path, n_samples=8)][:5] == chosen
    assert {sample.id for sample in samples(tmp_path, n_samples=5, seed=1)} != set(chosen)
    assert len(samples(tmp_path, n_samples=100)) == 40
    # other lengths, files and orders of lines do not matter
    both = [sample.id for sample in samples(tmp_path, 200, 400, n_samples=5)]
    assert both == [id.replace("/400/", "/200/") for id in chosen] + chosen
    write(tmp_path / "a.jsonl", *lines[:20][::-1], line("musique"))
    write(tmp_path / "hotpotqa.jsonl", *lines[20:])
    assert [sample.id for sample in samples(tmp_path, n_samples=5) if "hotpotqa" in sample.id] == chosen


def test_longbench_e_is_apart(tmp_path: Path) -> None:
    # the field of LongBench-E is the plain name or has the ending, the file has it
    write(tmp_path / "hotpotqa.jsonl", line(_id="a"))
    write(tmp_path / "hotpotqa_e.jsonl", line(_id="a"), line("hotpotqa_e", _id="b"))
    made = samples(tmp_path)
    assert sorted(sample.id for sample in made) == [
        "longbench/hotpotqa/400/a",
        "longbench/hotpotqa_e/400/a",
        "longbench/hotpotqa_e/400/b",
    ]
    assert {sample.metric for sample in made} == {"qa_f1"}


def test_blank_lines_and_wide_characters(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", line(_id="一", context="第一篇"), line(_id="二", context="第二篇"))
    text = (tmp_path / "x.jsonl").read_text("utf-8")
    (tmp_path / "x.jsonl").write_bytes(("\n" + text.replace("\n", "\r\n\r\n")).encode())
    contexts = {sample.id: sample.context for sample in samples(tmp_path)}
    assert contexts["longbench/hotpotqa/400/一"].endswith("第一篇")
    assert contexts["longbench/hotpotqa/400/二"].endswith("第二篇")


class Counter:
    """Counts the parts that a pattern finds, and how often it is asked."""

    def __init__(self, pattern: str) -> None:
        self.token = re.compile(pattern, re.DOTALL)
        self.calls = 0

    def __call__(self, text: str) -> int:
        self.calls += 1
        return len(self.token.findall(text))


@pytest.mark.parametrize("pattern", [r"[一-龥]|[^\s一-龥]+", r"\s*\S{1,4}|\s", r".", r"\w{1,3}|\W{1,2}"])
@pytest.mark.parametrize("length", [800, 1500, 3999])
@pytest.mark.parametrize(
    "context",
    [
        " ".join(f"w{n}" for n in range(20_000)),
        # from 2 to 60 characters a word: the halves differ in characters
        " ".join(f"{n}" + "x" * (n // 100) for n in range(6000)),
        # up to 4, then 400
        " ".join(f"{n}" * (100 if n > 1500 else 1) for n in range(4500)),
        "".join(chr(0x4E00 + n % 20_000) for n in range(50_000)),
    ],
    ids=["even", "uneven", "skewed", "chinese"],
)
def test_cut_in_the_middle(context: str, length: int, pattern: str, tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", line("musique", context=context, input="Who?"))
    count = Counter(pattern)
    (sample,) = samples(tmp_path, length, count=count)
    assert count.calls <= 24
    # as long as can be, and never longer
    assert 0.97 * length <= count(whole(sample)) <= length
    opening, _, kept = sample.context.partition("\n\n")
    assert opening.startswith("Below are several passages.")
    # a beginning and an end of the text, one after the other, of as many tokens each
    head = next(n for n, (a, b) in enumerate(zip(context, kept, strict=False)) if a != b)
    assert context.endswith(kept[head:]) or context.endswith(kept[head - 1 :])
    assert count(kept[:head]) == pytest.approx(count(kept[head:]), rel=0.03, abs=3)


def test_short_contexts_are_whole(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", line(context="one two three"))
    (sample,) = samples(tmp_path)
    exact = words(whole(sample))
    # room for all of it to the token
    (again,) = samples(tmp_path, exact)
    assert again.context == sample.context
    # one less, and of what is left the question and the instructions would be more than half
    with pytest.raises(ValueError, match=f"length={exact - 1}: too short for hotpotqa, .* more than half of it"):
        samples(tmp_path, exact - 1)


def test_one_token_too_many(tmp_path: Path) -> None:
    context = " ".join(f"w{n}" for n in range(400))
    write(tmp_path / "x.jsonl", line(context=context))
    exact = words(whole(samples(tmp_path, 1000)[0]))
    (sample,) = samples(tmp_path, exact - 1)
    kept = sample.context.partition("\n\n")[2]
    assert words(whole(sample)) < exact
    # no part stands there twice
    assert 0.97 * len(context) < len(kept) < len(context)


def test_parts_that_cost_more_together(tmp_path: Path) -> None:
    # two parts of the text that seem to cost nothing, together longer than it
    def count(text: str) -> int:
        return len(text) if len(text) > 400 else 0

    context = "".join(chr(0x4E00 + n) for n in range(600))
    write(tmp_path / "x.jsonl", line(context=context))
    exact = count(whole(samples(tmp_path, 10_000, count=count)[0]))
    (sample,) = samples(tmp_path, exact - 20, count=count)
    kept = sample.context.partition("\n\n")[2]
    assert exact - 40 <= count(whole(sample)) <= exact - 20
    assert len(set(kept)) == len(kept)


def test_long_questions_are_passed_over(tmp_path: Path) -> None:
    write(
        tmp_path / "x.jsonl",
        *(line(_id=f"long {n}", input="why " * 300, context="it was " * 500) for n in range(5)),
        line(_id="short", context="it was " * 500),
    )
    (sample,) = samples(tmp_path, 400)
    assert sample.id.endswith("short")
    assert len(samples(tmp_path, 800)) == 6


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "_id is missing, must be a string"),
        ("[1]", "a JSON list; LongBench has one object in each line"),
        ('{"input": ', "not JSON in UTF-8"),
        (json.dumps(line(context=7)), "context is 7, must be a string"),
        (json.dumps(line(input=None)), "input is None, must be a string"),
        (json.dumps(line(answers=[])), r"answers is \[\], must be a list of strings, at least one"),
        (json.dumps(line(answers="Ada")), "answers is 'Ada', must be a list"),
        (json.dumps(line(answers=[1])), r"answers is \[1\]"),
        (json.dumps(line("trec")), "all_classes is None, must be a list of strings"),
        (json.dumps(line("imdb")), "unknown dataset 'imdb'; known are narrativeqa, .*repobench-p"),
        (json.dumps(line(_id="first")), "_id 'first' of hotpotqa is in .*x.jsonl:1 as well"),
    ],
)
def test_lines_that_are_not_longbenchs(text: str, told: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", line(_id="first"))
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: ") + told):
        samples(tmp_path)


def test_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(json.dumps(line(input="café"), ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ValueError, match=r"x\.jsonl:1: not JSON in UTF-8"):
        samples(tmp_path)


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give the directory of its \*\.jsonl with --longbench DIR"):
        samples(None)
    with pytest.raises(ValueError, match=r"--longbench .*absent: no such directory"):
        samples(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"no \*\.jsonl in it"):
        samples(tmp_path)
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"its \*\.jsonl are empty"):
        samples(tmp_path)


def test_files_are_checked_before_the_first_sample(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", line(), line("squad"))
    with pytest.raises(ValueError, match="unknown dataset"):
        TASK.build(Request((400,), 1, 0, words, longbench=tmp_path))
