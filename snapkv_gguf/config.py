"""The settings of a pass, checked, and resolved for a prompt of a known length."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Pool = Literal["max", "avg"]

# by their names in the library, in the order of enum llama_snapkv_rule
Rule = Literal["snapkv", "shared", "first-recent", "random", "h2o"]

# of the kept cells, in the order of enum llama_snapkv_positions
Positions = Literal["true", "packed"]

# types of K and V in llama.cpp
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


def ggml_type(name: str) -> int:
    """Number of a cache type in ggml.

    Raises:
        ValueError: No such type.
    """
    from gguf import GGMLQuantizationType

    if name not in CACHE_TYPES:
        raise ValueError(f"cache type {name!r}: must be one of {', '.join(CACHE_TYPES)}")
    return int(GGMLQuantizationType[name.upper()])


# of budget, recent and kernel, the same as in the library
MAX_CELLS = 2**30

# the query ring takes window * n_head * head size * 4 bytes per layer and sequence
MAX_WINDOW = 4096


@dataclass(frozen=True)
class ResolvedSnapKV:
    """The settings for one prompt, in cells: the fields of ``llama_snapkv_params``."""

    budget: int
    window: int
    recent: int
    kernel: int
    pool: Pool
    rule: Rule
    positions: Positions


@dataclass(frozen=True)
class SnapKV:
    """What a pass keeps (Li et al., 2024, arXiv:2404.14469, section 4).

    Attributes:
        budget: Cells a sequence keeps, the recent part included: a number of cells (int, > window, at most
            2**30), or a share of the prompt (float, 0 < budget < 1).
        window: Last prompt tokens whose queries score the others, 1 <= window < budget, at most 4096.
        kernel: Width of the pooling over neighbouring cells, odd.
        pool: ``"max"`` or ``"avg"``. Averages are zero padded and always divided by ``kernel``.
        recent: Last cells that are kept in any case: a number of cells (int, 0 or window <= recent < budget),
            or a share of the budget (float, 0 <= recent < 1). Never fewer than ``window``. While a prompt is read in
            chunks with a probe, at most an eighth of the budget.
        rule: ``"snapkv"``, or one to compare it with: ``"shared"`` (the same scores, averaged over all layers and
            heads, which keep the same cells), ``"first-recent"`` (the first 4 and the most recent cells:
            StreamingLLM, arXiv:2309.17453), ``"random"``, ``"h2o"`` (attention of all tokens instead of the window's,
            arXiv:2306.14048, which costs about another prefill's attention; ``kernel`` and ``pool`` have no effect).
        chunk: Tokens that are read at a time of a prompt that is longer than the context's cells, which are then no
            limit: whenever the next chunk would not fit, the cells are compacted to the budget and reading goes on;
            so are they when an answer has filled them. None: a prompt must fit into the cells.
        probe: What looks at the text while it is read in chunks: a number of tokens at the prompt's end (int, 0 for
            none: the chunk's own last tokens), or a text, such as the question.
        positions: Of the kept cells. ``"true"``: those of their tokens, so that prompt and answer are limited by the
            context that the model was trained for. ``"packed"``: after each pass the kept keys are rotated to
            consecutive positions, so that there is no limit.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of its range.
    """

    # the recommended preset, equal to llama_snapkv_default_params()
    budget: int | float = 1024
    window: int = 16
    kernel: int = 21
    pool: Pool = "max"
    recent: int | float = 0.5
    rule: Rule = "snapkv"
    chunk: int | None = None
    probe: int | str = 32
    positions: Positions = "true"

    def __post_init__(self) -> None:
        budget = _number("budget", self.budget, "a number of cells (int) or a share of the prompt (float)")
        window = _integer("window", self.window, "a number of tokens (int)")
        kernel = _integer("kernel", self.kernel, "an odd number of cells (int)")
        recent = _number("recent", self.recent, "a number of cells (int) or a share of the budget (float)")

        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"window={window}: must be between 1 and {MAX_WINDOW} tokens, try 16 or 32")
        if isinstance(budget, float) and not 0 < budget < 1:
            raise ValueError(
                f"budget={budget}: a float is a share of the prompt, between 0 and 1 (both excluded); "
                "give a number of cells as an int, such as budget=1024"
            )
        if isinstance(budget, int) and not window < budget <= MAX_CELLS:
            raise ValueError(
                f"budget={budget}: must be more than window={window} and at most {MAX_CELLS} cells; "
                "raise the budget or lower the window"
            )
        if not 1 <= kernel <= MAX_CELLS or kernel % 2 == 0:
            raise ValueError(f"kernel={kernel}: must be odd, between 1 (no pooling) and {MAX_CELLS}, try 5 or 21")
        for field, choice, names in (
            ("pool", self.pool, get_args(Pool)),
            ("rule", self.rule, get_args(Rule)),
            ("positions", self.positions, get_args(Positions)),
        ):
            if choice not in names:
                kind = ValueError if isinstance(choice, str) else TypeError
                raise kind(f"{field}={choice!r}: must be {' or '.join(map(repr, names))}")
        if isinstance(recent, float) and not 0 <= recent < 1:
            raise ValueError(
                f"recent={recent}: a float is a share of the budget, 0 <= recent < 1; "
                "give a number of cells as an int, such as recent=512"
            )
        if isinstance(recent, int) and recent != 0 and not window <= recent < MAX_CELLS:
            raise ValueError(
                f"recent={recent}: must be 0 (the window only), or at least window={window} cells "
                f"and less than {MAX_CELLS}"
            )
        if isinstance(recent, int) and isinstance(budget, int) and recent >= budget:
            raise ValueError(
                f"recent={recent}: must be less than budget={budget}, else nothing is left to select; "
                "lower it or give a share of the budget, such as recent=0.5"
            )

        chunk = None if self.chunk is None else _integer("chunk", self.chunk, "a number of tokens (int) or None")
        if chunk is not None and not 1 <= chunk <= MAX_CELLS:
            raise ValueError(f"chunk={chunk}: must be between 1 and {MAX_CELLS} tokens, try 1024")
        probe = self.probe
        if not isinstance(probe, str):
            probe = _integer("probe", probe, "a number of tokens (int) or a text (str)")
            if not 0 <= probe <= MAX_WINDOW:
                raise ValueError(f"probe={probe}: must be between 0 (none) and {MAX_WINDOW} tokens, try 32")
        elif not probe:
            raise ValueError("probe='': must be a text, or a number of tokens, 0 for none")
        else:
            try:
                probe.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"probe={probe!r}: is no text that can be encoded ({error.reason})") from None
        if self.positions == "packed" and isinstance(budget, int) and budget < window + 2:
            raise ValueError(f"budget={budget}: must be at least window={window} and 2 more with packed positions")

        # numpy numbers become Python's, so that equal settings compare, print and pickle alike
        values = {
            "budget": budget,
            "window": window,
            "kernel": kernel,
            "recent": recent,
            "chunk": chunk,
            "probe": probe,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def paper(cls, budget: float = 1024) -> SnapKV:
        """The setting of the paper: window 32, kernel 5, average, nothing kept but the window and the selected."""
        return cls(budget=budget, window=32, kernel=5, pool="avg", recent=0)

    @classmethod
    def coerce(cls, value: SnapKV | Mapping[str, Any] | bool | None) -> SnapKV | None:
        """Settings from the ``snapkv=`` argument of :class:`snapkv_gguf.Llama`; None means off.

        Raises:
            TypeError: ``value`` is none of these, or a mapping with an unknown field.
            ValueError: A field of a mapping is out of its range.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            names = [field.name for field in fields(cls)]
            unknown = sorted(str(key) for key in value if key not in names)
            if unknown:
                raise TypeError(f"snapkv: unknown field {', '.join(unknown)}; the fields are {', '.join(names)}")
            return cls(**value)
        raise TypeError(f"snapkv={value!r}: must be True, False, None, a SnapKV or a dict of its fields")

    def check_cells(self, n_cells: int, n_probe: int) -> str | None:
        """What is wrong with so many cells to read in chunks, with so many tokens of the probe; None if nothing is."""
        budget = self.resolve(n_cells).budget
        prefix = budget + 1 - self.window  # of the smallest cache that is compacted
        if self.kernel > prefix:
            return f"kernel={self.kernel} is wider than the {prefix} cells that the budget leaves before the window"
        if n_cells > budget + n_probe:
            return None
        beside = n_probe + (self.chunk or 1)
        enough = budget + beside if isinstance(self.budget, int) else math.ceil(beside / (1 - self.budget))
        return (
            f"must be more cells than the budget of {budget} and the {n_probe} tokens of the probe together, "
            f"such as {enough}; or lower the budget"
        )

    def resolve(self, n_tokens: int) -> ResolvedSnapKV:
        """The settings in cells for a prompt of ``n_tokens`` tokens.

        A share of the prompt is rounded to the nearest cell, but leaves at least one cell to select; where that
        is more than the prompt has, nothing is to be done and the budget is no less than ``n_tokens``. A share
        of the budget is rounded down.
        """
        reserved = max(self.window, self.recent if isinstance(self.recent, int) else 0)
        reserved += self.positions == "packed"
        budget = self.budget if isinstance(self.budget, int) else max(reserved + 1, round(self.budget * n_tokens))
        share = self.recent if isinstance(self.recent, int) else int(self.recent * budget)
        recent = min(max(self.window, share), budget - 1)
        return ResolvedSnapKV(budget, self.window, recent, self.kernel, self.pool, self.rule, self.positions)


def _integer(name: str, value: Any, what: str) -> int:
    # bool is an int to Python, but window=True is a mistake
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} ({type(value).__name__}): must be {what}")
    return operator.index(value)


def _number(name: str, value: Any, what: str) -> int | float:
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, numbers.Integral)):
        return float(value)
    return _integer(name, value, what)
