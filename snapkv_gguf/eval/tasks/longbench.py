# ruff: noqa: RUF001 (Chinese punctuation)
"""LongBench and LongBench-E (Bai et al., 2024, arXiv:2308.14508), from their published JSONL files.

Metrics, longest answers, order of the parts and the cut in the middle are LongBench's; the instructions say the same
in other words, so scores are for comparing methods with each other, not with LongBench's published table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schema import Question, Request, Sample, Task

# of a prompt whose context is cut, the most that may be instructions and question
_MAX_OVERHEAD = 0.5

# calls of count() for one end of a context, and the share of its tokens that may be missing after fewer
_MAX_STEPS = 20
_SLACK = 0.01


@dataclass(frozen=True)
class _Dataset:
    """How LongBench asks one of its datasets.

    Attributes:
        metric: Name in ``metrics.METRICS``.
        max_tokens: Longest answer.
        opening: What stands before the context.
        question: What stands after it; ``{input}`` is the sample's own.
        lead: How the answer begins, None where the input ends with that, as after examples.
    """

    metric: str
    max_tokens: int
    opening: str
    question: str
    lead: str | None


_STORY = _Dataset(
    "qa_f1",
    128,
    "Below is a story: a novel or the script of a film. A question about it follows. Answer it in as few words as you "
    "can, with one phrase where that will do, and explain nothing.",
    "Answer this question about the story in as few words as you can, with one phrase where that will do, and explain "
    "nothing.\n\nQuestion: {input}",
    "Answer:",
)
_ARTICLE = _Dataset(
    "qa_f1",
    128,
    "Below is a scientific article. A question about it follows. Answer it in as few words as you can.",
    "Answer this question about the article in as few words as you can, with one phrase or sentence where that will "
    'do, and explain nothing. Where the article does not tell, write "unanswerable". Where the question is answered '
    'by yes or no, write "yes", "no" or "unanswerable".\n\nQuestion: {input}',
    "Answer:",
)
_TEXT = _Dataset(
    "qa_f1",
    64,
    "Below is a text. Answer briefly the question that follows.",
    "Answer this question from the text. Write the answer and nothing else.\n\nQuestion: {input}",
    "Answer:",
)
_TEXT_ZH = _Dataset(
    "qa_f1_zh",
    64,
    "下面是一篇文章，读完后请用中文简要回答问题。",
    "请根据上文回答这个问题，只写答案，不写别的内容。\n\n问题：{input}",
    "回答：",
)
_PASSAGES = _Dataset(
    "qa_f1",
    32,
    "Below are several passages. A question follows that they answer. Write the answer and nothing else.",
    "Answer this question from the passages. Write the answer and nothing else.\n\nQuestion: {input}",
    "Answer:",
)
_PASSAGES_ZH = _Dataset(
    "rouge_l_zh",
    128,
    "下面是一些文章，请根据它们回答之后的问题。",
    "请根据以上文章回答这个问题。\n\n问题：{input}",
    "回答：",
)
_REPORT = _Dataset(
    "rouge_l",
    512,
    "Below is a report of a government agency. Summarize it on one page.",
    "Write a summary of the report that fills one page.",
    "Summary:",
)
_MEETING = _Dataset(
    "rouge_l",
    512,
    "Below is the transcript of a meeting. A question or request about it follows. Answer in one sentence or a few.",
    "Answer this from the transcript, in one sentence or a few.\n\nQuery: {input}",
    "Answer:",
)
_NEWS = _Dataset(
    "rouge_l",
    512,
    "Below are several news articles. Summarize them together on one page.",
    "Write a summary of all the news that fills one page.",
    "Summary:",
)
_MEETING_ZH = _Dataset(
    "rouge_l_zh",
    512,
    "下面是一次会议的记录，读完后请写一段话概括会议内容。",
    "请用一段话概括这次会议的内容。",
    "总结：",
)
_TYPES = _Dataset("classification", 64, "Name the type of a question, as in the examples that follow.", "{input}", None)
_TRIVIA = _Dataset(
    "qa_f1_first_line",
    32,
    "Answer a question from a passage with the answer and nothing else, as in the examples that follow.",
    "{input}",
    None,
)
_DIALOGUES = _Dataset(
    "rouge_l_first_line",
    128,
    "Summarize a dialogue in a few short sentences, as in the examples that follow.",
    "{input}",
    None,
)
_NEWS_TYPES_ZH = _Dataset("classification", 64, "请参照下面的例子，判断一则新闻属于哪个类别。", "{input}", None)
_COUNT = _Dataset(
    "count",
    32,
    "Below are paragraphs from Wikipedia, some of them more than once. Read them with care and find out how many "
    "different ones there are.",
    "How many different paragraphs are there, each counted once however often it stands there? Write the number and "
    "nothing else, such as 1, 2 or 3.",
    "The final answer is:",
)
_PARAGRAPHS = _Dataset(
    "retrieval",
    32,
    "Below are 30 paragraphs from Wikipedia and then a summary of one of them. Find out of which.",
    'This is the summary:\n\n{input}\n\nWrite the number of the paragraph that it sums up, in the form "Paragraph 1", '
    '"Paragraph 2" and so on.',
    "The answer is:",
)
_PARAGRAPHS_ZH = _Dataset(
    "retrieval_zh",
    32,
    "下面有若干段文字，之后给出其中一段的摘要，请找出是哪一段的摘要。",
    "摘要如下：\n\n{input}\n\n请写出它所对应的段落编号，格式为“段落1”、“段落2”等。",
    "答案是：",
)
_CODE = _Dataset(
    "code_similarity", 64, "Complete the code below.", "Write the next line of the code.", "Next line of code:"
)
_REPOSITORY = _Dataset("code_similarity", 64, "Complete the code below.", "{input}", "Next line of code:")

_DATASETS: Mapping[str, _Dataset] = {
    "narrativeqa": _STORY,
    "qasper": _ARTICLE,
    "multifieldqa_en": _TEXT,
    "multifieldqa_zh": _TEXT_ZH,
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": _PASSAGES_ZH,
    "gov_report": _REPORT,
    "qmsum": _MEETING,
    "multi_news": _NEWS,
    "vcsum": _MEETING_ZH,
    "trec": _TYPES,
    "triviaqa": _TRIVIA,
    "samsum": _DIALOGUES,
    "lsht": _NEWS_TYPES_ZH,
    "passage_count": _COUNT,
    "passage_retrieval_en": _PARAGRAPHS,
    "passage_retrieval_zh": _PARAGRAPHS_ZH,
    "lcc": _CODE,
    "repobench-p": _REPOSITORY,
}

# LongBench asks these without a chat template: what is asked is how a text goes on
_CONTINUED = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})


@dataclass(frozen=True)
class _Entry:
    """Where a sample stands: its line is read again when its turn comes, all of them are too much to keep."""

    id: str
    path: Path
    number: int  # of the line, from 1
    offset: int  # in bytes


@dataclass(frozen=True)
class _Line:
    """What we use of a line of LongBench."""

    id: str
    dataset: str
    input: str
    context: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


def build(request: Request) -> Iterator[Sample]:
    """The first ``n_samples`` of each dataset in an order by seed, for each length.

    Contexts that are too long lose their middle. Samples that would lose so much of it that question and instructions
    make more than half of the prompt are passed over.

    Raises:
        ValueError: No directory, no JSONL files in it, a line that is not LongBench's, an unknown dataset, or a
            length too short for all samples of a dataset.
    """
    return _samples(request, _index(_directory(request)))


TASK = Task(
    name="longbench",
    summary="21 datasets in English, Chinese and code, from files",
    source="LongBench, arXiv:2308.14508",
    build=build,
    retrieval=False,
    axis="dataset",
)


def _samples(request: Request, index: Mapping[str, list[_Entry]]) -> Iterator[Sample]:
    for length in request.lengths:
        for dataset, entries in index.items():
            found = 0
            for entry in sorted(entries, key=lambda entry: request.rng("longbench", dataset, entry.id).random()):
                sample = _sample(dataset, _read(entry), length, request.count)
                if sample is None:
                    continue
                yield sample
                found += 1
                if found == request.n_samples:
                    break
            if not found:
                raise ValueError(
                    f"length={length}: too short for {dataset}, whose questions and instructions take more than "
                    "half of it; choose a longer one or take the dataset's file out of the directory"
                )


def _sample(name: str, line: _Line, length: int, count: Callable[[str], int]) -> Sample | None:
    dataset = _DATASETS[line.dataset]
    question = _question(dataset, line)
    after = f"\n\n{question.text}\n{question.lead}"
    context = _cut(f"{dataset.opening}\n\n", line.context, after, length, count)
    if context is None:
        return None
    return Sample(
        id=f"longbench/{name}/{length}/{line.id}",
        task="longbench",
        metric=dataset.metric,
        context=context,
        questions=(question,),
        fields={"length": length, "dataset": name},
    )


def _question(dataset: _Dataset, line: _Line) -> Question:
    text = dataset.question.format(input=line.input).rstrip()  # code keeps its indentation
    lead = dataset.lead
    if lead is None:  # "Type:", "Answer:", "Summary:" or the like after the last of the examples
        rest, _, last = text.rpartition("\n")
        text, lead = (rest, last) if rest and last.endswith((":", "：")) else (text, "")
    return Question(
        text=text,
        references=line.answers,
        lead=lead,
        lead_in_chat=line.dataset in _CONTINUED,
        max_tokens=dataset.max_tokens,
        choices=line.classes,
    )


def _cut(before: str, text: str, after: str, length: int, count: Callable[[str], int]) -> str | None:
    """``before`` with all of the text, or its first and last tokens, so many that the prompt has no more than length.

    None if the text is cut and the rest of the prompt leaves too little room.
    """
    whole = count(before + text + after)
    if whole <= length:
        return before + text
    room = length - count(before + after)
    if room < (1 - _MAX_OVERHEAD) * length:
        return None
    total = whole - length + room  # about the tokens of the text
    head = _longest(lambda n: text[:n], len(text), total, room // 2, count)
    tail = _longest(lambda n: text[len(text) - n :], len(text), total, room // 2, count)
    per_token = (head + tail) / max(1, room)
    while True:
        context = before + text[:head] + text[len(text) - tail :]
        excess = count(context + after) - length
        if excess <= 0:
            return context
        # what the joints cost
        head = max(0, head - 1 - int(excess * per_token / 2))
        tail = max(0, tail - 1 - int(excess * per_token / 2))


def _longest(part: Callable[[int], str], n_chars: int, total: int, room: int, count: Callable[[str], int]) -> int:
    """Characters of the longest part that has no more than ``room`` of ``total`` tokens, or up to 1 % fewer of them.

    A search between one that fits and one that does not, in turn where the next should be by proportion and, for texts
    whose halves differ much, half way: few calls of count.
    """
    low, low_tokens = 0, 0
    high, high_tokens = n_chars, total
    for step in range(_MAX_STEPS):
        if high - low <= 1 or low_tokens >= (1 - _SLACK) * room:
            break
        share = 0.5 if step % 2 else (room - low_tokens) / max(1, high_tokens - low_tokens)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        tokens = count(part(middle))
        if tokens <= room:
            low, low_tokens = middle, tokens
        else:
            high, high_tokens = middle, tokens
    return low


def _directory(request: Request) -> Path:
    if request.longbench is None:
        raise ValueError(
            "the task longbench needs LongBench's files: give the directory of its *.jsonl with --longbench DIR"
        )
    if not request.longbench.is_dir():
        raise ValueError(f"--longbench {request.longbench}: no such directory; give the one with LongBench's *.jsonl")
    return request.longbench


def _index(directory: Path) -> dict[str, list[_Entry]]:
    """Where the samples of each dataset are; every line is checked. LongBench-E's datasets end with ``_e``."""
    paths = sorted(directory.glob("*.jsonl"))
    if not paths:
        raise ValueError(f"--longbench {directory}: no *.jsonl in it; give the directory with LongBench's files")
    index: dict[str, list[_Entry]] = {}
    seen: dict[tuple[str, str], str] = {}
    for path in paths:
        for entry, line in _entries(path):
            name = f"{line.dataset}_e" if path.stem.endswith("_e") else line.dataset
            place = f"{path}:{entry.number}"
            if (other := seen.setdefault((name, line.id), place)) != place:
                raise ValueError(f"{place}: _id {line.id!r} of {name} is in {other} as well; remove one of them")
            index.setdefault(name, []).append(entry)
    if not index:
        raise ValueError(f"--longbench {directory}: its *.jsonl are empty; give the directory with LongBench's files")
    return dict(sorted(index.items()))


def _entries(path: Path) -> Iterator[tuple[_Entry, _Line]]:
    offset = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                line = _parse(text, f"{path}:{number}")
                yield _Entry(line.id, path, number, offset), line
            offset += len(text)


def _read(entry: _Entry) -> _Line:
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        return _parse(file.readline(), f"{entry.path}:{entry.number}")


def _parse(text: bytes, place: str) -> _Line:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON in UTF-8 ({error}); LongBench has one object in each line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: a JSON {type(fields).__name__}; LongBench has one object in each line")
    for key in ("_id", "dataset", "input", "context"):
        _expect(isinstance(fields.get(key), str), place, fields, key, "a string")
    name = fields["dataset"].removesuffix("_e")
    if name not in _DATASETS:
        raise ValueError(f"{place}: unknown dataset {fields['dataset']!r}; known are {', '.join(_DATASETS)}")
    _expect(_is_texts(fields.get("answers")), place, fields, "answers", "a list of strings, at least one")
    classes = fields.get("all_classes") or ()
    if _DATASETS[name].metric == "classification":
        _expect(_is_texts(classes), place, fields, "all_classes", "a list of strings, at least one")
    return _Line(fields["_id"], name, fields["input"], fields["context"], tuple(fields["answers"]), tuple(classes))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _expect(right: bool, place: str, fields: Mapping[str, Any], key: str, what: str) -> None:
    if not right:
        found = f"{fields[key]!r:.60}" if key in fields else "missing"
        raise ValueError(f"{place}: {key} is {found}, must be {what}; LongBench's fields are needed as published")
