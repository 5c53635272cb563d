"""Long real text, with or without one fact hidden in it, for the demonstration and the measurements.

The text is the language reference that ships with Python (pydoc_data.topics), so it differs a little from one
Python version to the next.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads the libraries, which the text does not need
    from .prompt import Vocabulary

QUESTION = "Question: What is the secret access code?"

# how a base model is made to answer
LEAD = "Answer: The secret access code is"

# of the text, in tokens, that the fact keeps from both ends
_MARGIN = 0.1

# of a paragraph
_MIN_CHARACTERS = 80


@dataclass(frozen=True)
class Haystack:
    """A text and what it hides.

    Attributes:
        text: Paragraphs, with one sentence that holds the code.
        code: Six digits.
        depth: Where the sentence is, as a share of the text.
        seed: Of the order of the paragraphs, the code and the depth.
    """

    text: str
    code: str
    depth: float
    seed: int

    def prompt(self, vocabulary: Vocabulary) -> list[int]:
        """The text and the question as tokens: in the chat template, or as a document for a base model to complete."""
        if vocabulary.has_chat_template:
            return vocabulary.chat(f"{self.text}\n\n{QUESTION}")
        return vocabulary.plain(f"Document:\n{self.text}\n\n{QUESTION}\n{LEAD}")


def build(n_tokens: int, seed: int, count: Callable[[str], int]) -> Haystack:
    """Whole paragraphs, as many as go into ``n_tokens``, or the beginning of one if there is no room for all of it.

    Args:
        n_tokens: Length of the text in tokens.
        seed: The same seed gives the same text.
        count: Tokens of a text.

    Raises:
        ValueError: No room for the sentence that is hidden.
    """
    rng = random.Random(seed)
    paragraphs = real_paragraphs()
    rng.shuffle(paragraphs)
    code = f"{rng.randrange(100_000, 1_000_000)}"
    depth = rng.uniform(_MARGIN, 1 - _MARGIN)
    needle = hidden_sentence(code)

    chosen: list[str] = []
    ends: list[int] = []  # tokens up to the end of each paragraph
    total = count(needle)
    if total > n_tokens:
        raise ValueError(f"n_tokens={n_tokens}: must be at least {total}, for the sentence that is hidden")
    while total < n_tokens:
        paragraph = paragraphs[len(chosen) % len(paragraphs)]
        total += count(f"{paragraph}\n\n")
        chosen.append(paragraph)
        ends.append(total)
    if total > n_tokens:
        total -= count(f"{chosen.pop()}\n\n")
        ends.pop()
    if not chosen:
        words = paragraphs[0].split()
        while words and total + count(f"{' '.join(words)}\n\n") > n_tokens:
            words.pop()
        if words:
            chosen.append(" ".join(words))
            ends.append(n_tokens)
    before = sum(end <= depth * n_tokens for end in ends)
    text = "\n\n".join([*chosen[:before], needle, *chosen[before:]])
    return Haystack(text=text, code=code, depth=depth, seed=seed)


def hidden_sentence(code: str) -> str:
    """What is hidden, and what :data:`QUESTION` asks for."""
    return f"Remember: the secret access code is {code}."


def topics() -> list[str]:
    """The texts that ship with Python, in the order of their names."""
    texts: dict[str, str] = pydoc_data.topics.topics
    return [texts[name] for name in sorted(texts)]


def read_document(path: Path) -> str:
    """A text file of the user's.

    Raises:
        ValueError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"document {path}: is not UTF-8 text ({error}); convert it first") from error
    except OSError as error:
        raise ValueError(f"document {path}: cannot be read ({error.strerror}); give a text file") from error


def real_paragraphs(document: Path | None = None) -> list[str]:
    """Paragraphs of the document, or of the text that ships with Python, each of one line and given once.

    Raises:
        ValueError: The document cannot be read or has no paragraph.
    """
    texts = topics() if document is None else [read_document(document)]
    parts = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    # headings and one-line examples make no text to read
    found = [part for part in dict.fromkeys(parts) if len(part) >= _MIN_CHARACTERS]
    if not found:
        raise ValueError(
            f"document {document}: no paragraph of at least {_MIN_CHARACTERS} characters; give a longer one"
        )
    return found
