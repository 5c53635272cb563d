"""Scores of answers from 0 to 1, by name.

RULER's matches (Hsieh et al., 2024, arXiv:2404.06654, appendix) and LongBench's metrics (Bai et al., 2024,
arXiv:2308.14508, table 1), which give the same numbers as its own evaluation where a comment does not say otherwise.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .schema import Question

_NUMBER = re.compile(r"(?:(?<!\w)-)?\d+(?:\.\d+)?")
_DIGITS = re.compile(r"\d+")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

# what LongBench drops from Chinese, in ranges: not all that one would expect, U+300A (opening title mark) stays
_ZH_RANGES = (
    "\u2013-\u2014\u2018-\u2019\u201b-\u201f\u2026-\u2027\u3001-\u3003\u300b-\u3011\u3014-\u301f\u3030\u303e-\u303f"
    "\ufe4f\uff01-\uff0d\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff64"
)
_ZH_DROPPED = re.compile(rf"[{re.escape(string.punctuation)}{_ZH_RANGES}\s]")


def string_match_all(answer: str, question: Question) -> float:
    """Share of the references that the answer contains, whatever the case (RULER)."""
    text = answer.lower()
    return sum(reference.lower() in text for reference in question.references) / len(question.references)


def string_match_any(answer: str, question: Question) -> float:
    """1 if the answer contains a reference, whatever the case (RULER's part match)."""
    text = answer.lower()
    return float(any(reference.lower() in text for reference in question.references))


def exact_number(answer: str, question: Question) -> float:
    """1 if the first number in the answer, as it is written, is a reference."""
    number = _NUMBER.search(answer)
    return float(number is not None and number.group() in question.references)


def first_line(answer: str, question: Question) -> float:
    """1 if the first line that is not empty is a reference, whatever the case."""
    line = next((line.strip() for line in answer.splitlines() if line.strip()), "")
    return float(line.casefold() in {reference.strip().casefold() for reference in question.references})


def qa_f1(answer: str, question: Question) -> float:
    """F1 of the words, as SQuAD counts them: without case, punctuation and articles. The best reference counts."""
    return _best(answer, question, lambda text, reference: _f1(_words(text), _words(reference)))


def qa_f1_first_line(answer: str, question: Question) -> float:
    """:func:`qa_f1` of the first line, after which a model asked by examples goes on with more of them."""
    return qa_f1(_first_line(answer), question)


def qa_f1_zh(answer: str, question: Question) -> float:
    """F1 of the words that jieba finds, without punctuation. The best reference counts."""
    return _best(answer, question, lambda text, reference: _f1(_words_zh(text), _words_zh(reference)))


def rouge_l(answer: str, question: Question) -> float:
    """F of ROUGE-L with its sentences split at full stops, of distinct words. The best reference counts."""
    return _best(answer, question, _rouge_l)


def rouge_l_first_line(answer: str, question: Question) -> float:
    """:func:`rouge_l` of the first line, after which a model asked by examples goes on with more of them."""
    return rouge_l(_first_line(answer), question)


def rouge_l_zh(answer: str, question: Question) -> float:
    """:func:`rouge_l` of the words that jieba finds."""
    return _best(
        answer, question, lambda text, reference: _rouge_l(" ".join(_segment(text)), " ".join(_segment(reference)))
    )


def classification(answer: str, question: Question) -> float:
    """1 / k if the right label is one of k labels in the first line, else 0.

    Labels that are part of the right one do not count. Both of LongBench's tasks of this kind look at the first line
    only.

    Raises:
        ValueError: The question has no labels.
    """
    if not question.choices:
        raise ValueError(f"the question {question.text[:60]!r} has no choices: give all labels, for this metric")
    line = _first_line(answer)
    named = [label for label in question.choices if label in line]

    def score(reference: str) -> float:
        # LongBench skips the label after each one that it drops: no difference on its data, where no label is part
        # of another
        rivals = [label for label in named if label == reference or label not in reference]
        return 1 / len(rivals) if reference in rivals else 0.0

    return max(map(score, question.references))


def retrieval(answer: str, question: Question) -> float:
    """Share of the numbers in the answer that are the paragraph's, of references such as ``Paragraph 12``."""
    return _best(answer, question, lambda text, reference: _hits(text, _paragraph("Paragraph ", reference)))


def retrieval_zh(answer: str, question: Question) -> float:
    """Share of the numbers in the answer that are the paragraph's, of references such as ``段落12``."""
    return _best(answer, question, lambda text, reference: _hits(text, _paragraph("段落", reference)))


def count(answer: str, question: Question) -> float:
    """Share of the numbers in the answer that are the reference."""
    return _best(answer, question, _hits)


def code_similarity(answer: str, question: Question) -> float:
    """Edit similarity, in whole percent, of the first line that is neither a comment nor a code fence."""
    # LongBench calls fuzzywuzzy, whose ratio depends on what is installed beside it: the one over insertions and
    # deletions with python-Levenshtein, difflib's without (THUDM/LongBench#96). This is the first, the edit
    # similarity that the paper names; rapidfuzz is its library today.
    ratio = _library("rapidfuzz.fuzz").ratio
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if "`" not in line and "#" not in line and "//" not in line), "")
    return _best(line, question, lambda text, reference: round(ratio(text, reference)) / 100)


METRICS: dict[str, Callable[[str, Question], float]] = {
    metric.__name__: metric
    for metric in (
        string_match_all,
        string_match_any,
        exact_number,
        first_line,
        qa_f1,
        qa_f1_first_line,
        qa_f1_zh,
        rouge_l,
        rouge_l_first_line,
        rouge_l_zh,
        classification,
        retrieval,
        retrieval_zh,
        count,
        code_similarity,
    )
}


def _best(answer: str, question: Question, score: Callable[[str, str], float]) -> float:
    return max(score(answer, reference) for reference in question.references)


def _first_line(answer: str) -> str:
    return answer.lstrip("\n").split("\n")[0]


def _words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _words_zh(text: str) -> list[str]:
    words = (_ZH_DROPPED.sub("", word.lower()) for word in _segment(text))
    return [word for word in words if word]


def _segment(text: str) -> list[str]:
    return list(_jieba().cut(text))


@functools.cache
def _jieba() -> Any:
    jieba = _library("jieba")
    jieba.setLogLevel(logging.WARNING)  # says on stderr that it reads its dictionary
    return jieba


def _f1(words: Sequence[str], reference: Sequence[str]) -> float:
    common = (Counter(words) & Counter(reference)).total()
    return 2 * common / (len(words) + len(reference)) if common else 0.0


def _rouge_l(text: str, reference: str) -> float:
    # The library that LongBench calls. rouge-score, Google's, gives other numbers: it lowers the case, drops all but
    # ASCII letters and digits (so all of Chinese), counts repeated words, and does not split at full stops.
    rouge = _library("rouge").Rouge(metrics=["rouge-l"], stats=["f"])
    if not text.replace(".", "").strip() or not reference.replace(".", "").strip():
        return 0.0
    with _recursion(len(text.split()) + len(reference.split())):
        return float(rouge.get_scores(text, reference)[0]["rouge-l"]["f"])


@contextmanager
def _recursion(depth: int) -> Iterator[None]:
    """Room for the library, which recurses once per word of two sentences. LongBench takes its failure for a 0."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + depth)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _hits(text: str, number: str) -> float:
    numbers = _DIGITS.findall(text)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def _paragraph(prefix: str, reference: str) -> str:
    match = re.search(rf"{prefix}(\d+)", reference)
    if match is None:
        raise ValueError(f"reference {reference!r}: must name a paragraph, such as {prefix + '12'!r}")
    return match.group(1)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ModuleNotFoundError(
            f"this metric needs {package}, which is not installed: pip install {package} (or snapkv-gguf[eval])",
            name=error.name,
        ) from error
