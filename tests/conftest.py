from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapkv_gguf import _lib, tiny


@pytest.fixture(scope="session")
def pristine() -> Path:
    """Folder of libllama without our code, against the same ggml; the Makefile builds it."""
    # env: SNAPKV_PRISTINE_LIB
    folder = Path(os.environ.get("SNAPKV_PRISTINE_LIB", ""))
    if not any(folder.glob("libllama.*")):
        pytest.fail(f"SNAPKV_PRISTINE_LIB={folder} holds no libllama: run the tests with make test")
    return folder


@pytest.fixture(scope="session")
def library() -> None:
    """Skips without libraries, for work on the rest; with SNAPKV_REQUIRE_LIB=1, as in CI, that is an error."""
    if _lib.library_file(_lib.lib_dir()) is None:
        message = f"no libraries in {_lib.lib_dir()}"
        if os.environ.get("SNAPKV_REQUIRE_LIB") == "1":
            pytest.fail(message)
        pytest.skip(message)
    _lib.load()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "llama.gguf")
