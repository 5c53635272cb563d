"""SnapKV inside llama.cpp: keep the answer, stop paying for the whole prompt's KV cache on every token.

>>> from snapkv_gguf import Llama, SnapKV
>>> llm = Llama("model.gguf", n_ctx=8192, snapkv=SnapKV(budget=1024))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _lib
from .config import SnapKV

if TYPE_CHECKING:
    from ._capi import SnapKVError
    from .llama import Llama, SnapKVStats

__version__ = "0.1.0"

__all__ = ["Llama", "SnapKV", "SnapKVError", "SnapKVStats", "__version__"]

# now, not at the first use of Llama: a later import of llama_cpp must find our libraries
_lib.prepare()


def __getattr__(name: str) -> Any:
    # the libraries are loaded at the first use: settings, models and the oracle work without them
    if name in ("Llama", "SnapKVStats"):
        from . import llama

        return getattr(llama, name)
    if name == "SnapKVError":
        from ._capi import SnapKVError

        return SnapKVError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
