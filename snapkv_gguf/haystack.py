"""Long real text with one fact hidden in it, for the demonstration and the quality measurement.

The text is the language reference that ships with Python (pydoc_data.topics), so it differs a little from one
Python version to the next.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Callable
from dataclasses import dataclass

from .prompt import Vocabulary

QUESTION = "Question: What is the secret access code?"

# how a base model is made to answer
_LEAD = "The secret access code is"

# of the text, in tokens, that the fact keeps from both ends
_MARGIN = 0.1


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
        return vocabulary.plain(f"Document:\n{self.text}\n\n{QUESTION}\nAnswer: {_LEAD}")


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
    paragraphs = _paragraphs()
    rng.shuffle(paragraphs)
    code = f"{rng.randrange(100_000, 1_000_000)}"
    depth = rng.uniform(_MARGIN, 1 - _MARGIN)
    needle = f"Remember: the secret access code is {code}."

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


def running_text(seed: int) -> str:
    """All the text in its own order, beginning with a topic chosen by seed: to be cut where it is long enough."""
    texts: dict[str, str] = pydoc_data.topics.topics
    names = sorted(texts)
    first = random.Random(seed).randrange(len(names))
    return "\n\n".join(texts[name] for name in names[first:] + names[:first])


def _paragraphs() -> list[str]:
    topics: dict[str, str] = pydoc_data.topics.topics
    texts = (" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n"))
    # headings and one-line examples make no text to read
    return [text for text in dict.fromkeys(texts) if len(text) >= 80]
