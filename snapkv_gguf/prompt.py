"""A model's tokenizer and chat template, without its weights."""

# mypy: allow-untyped-calls

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from . import _lib

_lib.load()  # makes llama_cpp load our libraries

import llama_cpp  # noqa: E402
from llama_cpp import _internals  # noqa: E402
from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # noqa: E402

# stands for an answer, to find what a chat template puts after it
_ANSWER = "(the answer)"


def context_size(n_tokens: int) -> int:
    """The cells of a context for ``n_tokens`` tokens: llama.cpp's are multiples of 256."""
    return (n_tokens + 255) // 256 * 256


class Vocabulary:
    """Turns text into the tokens of a prompt, to know its length before a context is made for it.

    Raises:
        ValueError: The file is missing or not a GGUF model.
    """

    def __init__(self, model_path: str | os.PathLike[str]) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = _internals.LlamaModel(path_model=os.fspath(model_path), params=params, verbose=False)
        self.metadata: dict[str, str] = self._model.metadata()

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model.close()

    @property
    def n_ctx_train(self) -> int:
        """Context the model was trained for, in tokens, 0 if it does not say."""
        return int(self.metadata.get(f"{self.metadata.get('general.architecture')}.context_length", 0))

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` can be used."""
        return "tokenizer.chat_template" in self.metadata

    def count(self, text: str) -> int:
        """Tokens of a text, special ones aside."""
        return len(self._model.tokenize(text.encode(), False, False))

    def plain(self, text: str) -> list[int]:
        """The text as it is, after the model's begin-of-text token if it wants one."""
        tokens: list[int] = self._model.tokenize(text.encode(), self._model.add_bos_token(), False)
        return tokens

    def chat(self, content: str, lead: str = "") -> list[int]:
        """One user message in the model's chat template, up to where the answer begins, and how it begins."""
        return self._tokens(self._render([{"role": "user", "content": content}]) + lead)

    def next_turn(self, content: str, lead: str = "") -> list[int]:
        """What follows an answer when the user goes on: the end of the answer's message, the next one, as in chat()."""
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": content},
        ]
        _, found, rest = self._render(messages).rpartition(_ANSWER)
        if not found:
            raise ValueError("the model's chat template does not repeat an answer as it is: no second turn can be made")
        return self._tokens(rest + lead)

    def piece(self, token: int) -> str:
        """The text of a token, special ones as they are written."""
        return bytes(self._model.detokenize([token], True)).decode(errors="replace")

    def _render(self, messages: Any) -> str:
        formatter = Jinja2ChatFormatter(
            template=self.metadata["tokenizer.chat_template"],
            eos_token=self._special(self._model.token_eos()),
            bos_token=self._special(self._model.token_bos()),
        )
        # an answer, not thoughts that it would be cut off in
        return str(formatter(messages=messages, enable_thinking=False).prompt)

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._model.tokenize(text.encode(), False, True)
        return tokens

    def _special(self, token: int) -> str:
        return str(self._model.token_get_text(token)) if token >= 0 else ""
