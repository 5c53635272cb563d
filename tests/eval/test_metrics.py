# ruff: noqa: RUF001 (Chinese punctuation)
from __future__ import annotations

import subprocess
import sys

import pytest

from snapkv_gguf.eval import metrics
from snapkv_gguf.eval.metrics import METRICS
from snapkv_gguf.eval.schema import Question

LABELS = ("Date", "City", "Number", "Number of something")


@pytest.mark.parametrize(
    ("metric", "answer", "references", "score"),
    [
        # 2 of 3 are in it
        ("string_match_all", "It is ALPHA, then beta.", ("alpha", "Beta", "gamma"), 2 / 3),
        ("string_match_all", "alphabet", ("alpha", "beta"), 1 / 2),
        ("string_match_any", "It is ALPHA.", ("gamma", "alpha"), 1),
        ("string_match_any", "It is delta.", ("gamma", "alpha"), 0),
        ("exact_number", "The code is 042.", ("042",), 1),
        ("exact_number", "The code is 42.", ("042",), 0),
        ("exact_number", "3.50, not 4", ("3.50",), 1),
        ("exact_number", "3.50, not 4", ("4",), 0),
        ("exact_number", "It is -7.", ("-7",), 1),
        ("exact_number", "room-7", ("7",), 1),
        ("exact_number", "8", ("7", "8"), 1),
        ("exact_number", "none", ("7",), 0),
        ("first_line", "\n  YES \nno", ("yes",), 1),
        ("first_line", "well\nyes", ("yes",), 0),
        ("first_line", "Straße", ("STRASSE",), 1),
        # {big, red, dog} and {red, dog, in, town}: precision 2/3, recall 2/4, F = 2 * 2 / (3 + 4)
        ("qa_f1", "A big, red dog!", ("The red dog in town",), 4 / 7),
        # {red, red} and {red}: the second is one too many, precision 1/2, recall 1
        ("qa_f1", "red red", ("red",), 2 / 3),
        # the better of 2/5 and 1
        ("qa_f1", "bees", ("a hive of honey bees", "Bees."), 1),
        ("qa_f1", "the", ("the",), 0),  # nothing is left
        # "anthem" and "theatre" hold articles, but are none; punctuation joins: "it's" is "its"
        ("qa_f1", "anthem theatre it's", ("anthem theatre its",), 1),
        # {vell, passage, more} and {vell}: precision 1/3, recall 1; the first line alone is right
        ("qa_f1", "\nVell\nPassage: more", ("Vell",), 1 / 2),
        ("qa_f1_first_line", "\nVell\nPassage: more", ("Vell",), 1),
        # jieba: 九点 关门 and 晚上 九点, one common word of 2 and 2; punctuation does not count
        ("qa_f1_zh", "九点，关门。", ("晚上九点",), 1 / 2),
        ("qa_f1_zh", "上午", ("晚上九点",), 0),
        # "the cat" of 3 and of 4 words
        ("rouge_l", "the cat sat", ("the cat lay down",), 4 / 7),
        # the longest common order of b a c and a b c has 2 words
        ("rouge_l", "b a c", ("a b c",), 2 / 3),
        # what rouge-score counts otherwise: case, repeated words (1/2), sentences (1/2)
        ("rouge_l", "The cat", ("the cat",), 1 / 2),
        ("rouge_l", "go go go", ("go",), 1),
        ("rouge_l", "a b. c d", ("c d. a b",), 1),
        ("rouge_l", "a b", ("x y", "a b c d"), 2 / 3),
        ("rouge_l", "...", ("a b",), 0),
        # 2 of 4 and of 2 words; the first line alone is right
        ("rouge_l", "\na b\nc d", ("a b",), 2 / 3),
        ("rouge_l_first_line", "\na b\nc d", ("a b",), 1),
        # jieba: 会议 讨论 校车 and 会议 决定, one common word of 3 and 2
        ("rouge_l_zh", "会议讨论校车", ("会议决定",), 2 / 5),
        ("count", "There are 3, not 4: 3", ("3",), 2 / 3),
        ("count", "13", ("3",), 0),
        ("count", "three", ("3",), 0),
        ("retrieval", "Paragraph 2 or 12", ("Paragraph 12",), 1 / 2),
        ("retrieval", "12", ("Paragraph 12",), 1),
        ("retrieval", "Paragraph 1", ("Paragraph 12",), 0),
        ("retrieval_zh", "段落2，不是段落3，也不是段落4", ("段落3",), 1 / 3),
        # 15 of 16 characters are the same: 30 / 32 = 93.75 %
        ("code_similarity", "```python\n    return a + b\n```", ("    return a + c",), 0.94),
        ("code_similarity", "# sum\n// sum\nreturn a\nreturn b", ("return a",), 1),
        # aaab is common: 8 / 12; difflib finds 4 / 12
        ("code_similarity", "ababab", ("aaaaab",), 0.67),
        ("code_similarity", "# nothing but a comment", ("return a",), 0),
    ],
)
def test_by_hand(metric: str, answer: str, references: tuple[str, ...], score: float) -> None:
    assert METRICS[metric](answer, Question("", references)) == pytest.approx(score, abs=1e-7)


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("City", "City", 1),
        ("Date or City", "City", 1 / 2),
        ("Date", "City", 0),
        ("none", "City", 0),
        # "Number" is in it as well, but part of the right label
        ("Number of something", "Number of something", 1),
        # the other way round the longer label is a rival
        ("Number of something", "Number", 1 / 2),
        ("\nCity\nQuestion: what else?\nType: Date", "City", 1),
        ("city", "City", 0),
    ],
)
def test_classification(answer: str, reference: str, score: float) -> None:
    assert METRICS["classification"](answer, Question("", (reference,), choices=LABELS)) == score


def test_classification_needs_labels() -> None:
    with pytest.raises(ValueError, match=r"'Which type\?' has no choices"):
        METRICS["classification"]("City", Question("Which type?", ("City",)))


@pytest.mark.parametrize(("metric", "form"), [("retrieval", "Paragraph 12"), ("retrieval_zh", "段落12")])
def test_retrieval_needs_a_paragraph(metric: str, form: str) -> None:
    with pytest.raises(ValueError, match=f"reference '12': must name a paragraph, such as '{form}'"):
        METRICS[metric]("12", Question("", ("12",)))


def test_no_answer_scores_nothing() -> None:
    references = {"retrieval": "Paragraph 1", "retrieval_zh": "段落1"}
    for name, metric in METRICS.items():
        assert metric("", Question("", (references.get(name, "1"),), choices=("1", "2"))) == 0, name


def test_long_sentences() -> None:
    # the library recurses once per word, more than Python allows: 2 of 1200 and of 2 words
    words = [f"w{n}" for n in range(1200)]
    limit = sys.getrecursionlimit()
    score = METRICS["rouge_l"](" ".join(words), Question("", ("w0 w1199",)))
    assert score == pytest.approx(2 * 2 / 1202, abs=1e-7)
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize(
    ("metric", "package"), [("qa_f1_zh", "jieba"), ("rouge_l", "rouge"), ("code_similarity", "rapidfuzz")]
)
def test_missing_library(metric: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    metrics._jieba.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}, .* pip install {package}"):
        METRICS[metric]("a", Question("", ("a",)))


def test_jieba_says_nothing() -> None:
    # in a new process, as it speaks when it reads its dictionary for the first time
    code = (
        "from snapkv_gguf.eval.metrics import METRICS\n"
        "from snapkv_gguf.eval.schema import Question\n"
        "METRICS['qa_f1_zh']('a', Question('', ('a',)))"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")
