from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pristine() -> Path:
    """Folder of libllama without our code, against the same ggml; the Makefile builds it."""
    # env: SNAPKV_PRISTINE_LIB
    folder = Path(os.environ.get("SNAPKV_PRISTINE_LIB", ""))
    if not any(folder.glob("libllama.*")):
        pytest.fail(f"SNAPKV_PRISTINE_LIB={folder} holds no libllama: run the tests with make test")
    return folder
