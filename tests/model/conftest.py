from __future__ import annotations

from pathlib import Path

import pytest

from snapkv_gguf.models import get_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return get_model("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return get_model("gemma3")
