"""The pin is written once; what repeats it must agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pin_agrees() -> None:
    pin = dict(re.findall(r'^(\w+) = "(.*?)"', (ROOT / "vendor/llama.cpp.toml").read_text(), re.M))
    assert f'"{pin["name"]}=={pin["version"]}"' in (ROOT / "pyproject.toml").read_text()

    from snapkv_gguf import _lib

    assert pin["version"] == _lib.LLAMA_CPP_PYTHON


def test_version_agrees() -> None:
    import snapkv_gguf

    assert f'\nversion = "{snapkv_gguf.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
