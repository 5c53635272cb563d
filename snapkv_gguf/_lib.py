"""Finds our libraries and makes llama_cpp load them instead of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.resources
import os
import sys
from pathlib import Path

# the binding mirrors llama.cpp's structs by layout, so only this version will do; the same as in vendor/llama.cpp.toml
LLAMA_CPP_PYTHON = "0.3.36"

# env: SNAPKV_GGUF_LIB_PATH, a directory with libllama, libmtmd and the ggml libraries, for development
ENV_LIB_PATH = "SNAPKV_GGUF_LIB_PATH"

# not into pip's cache: other projects would get the wheel without libraries of its own
_INSTALL = (
    f'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" pip install --no-cache-dir llama-cpp-python=={LLAMA_CPP_PYTHON}'
)


def lib_dir() -> Path:
    """Directory of the libraries, whether or not they are there."""
    override = os.environ.get(ENV_LIB_PATH)
    if override:
        return Path(override).absolute()
    directory = Path(str(importlib.resources.files("snapkv_gguf"))) / "lib"
    if not directory.is_dir():
        # Python was started in a checkout, whose folder without libraries hides the installed package
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.distribution("snapkv-gguf").locate_file("snapkv_gguf/lib")
            return Path(str(installed)) if Path(str(installed)).is_dir() else directory
    return directory


def library_file(directory: Path, name: str = "llama") -> Path | None:
    """The library ``name`` in ``directory`` under this platform's file name, None if it is not there."""
    patterns = {
        "win32": (f"{name}.dll", f"lib{name}.dll"),
        "darwin": (f"lib{name}.dylib", f"lib{name}.so"),
    }.get(sys.platform, (f"lib{name}.so",))
    return next((directory / file for file in patterns if (directory / file).is_file()), None)


def prepare() -> None:
    """Point llama_cpp's first import at our libraries; called when snapkv_gguf is imported.

    Without libraries (a source checkout that was not built) nothing is set: the parts that need none still work.

    Raises:
        ImportError: llama_cpp was imported before, with other libraries.
    """
    directory = lib_dir()
    if library_file(directory) is None:
        return
    if "llama_cpp.llama_cpp" in sys.modules:
        _check_loaded(directory)
    # both are read once, when llama_cpp.llama_cpp and llama_cpp.mtmd_cpp are imported
    os.environ["LLAMA_CPP_LIB_PATH"] = str(directory)
    os.environ["MTMD_CPP_LIB"] = str(directory)


def load() -> ctypes.CDLL:
    """Our libllama, as loaded by llama_cpp.

    Raises:
        ImportError: No libraries, no or another llama-cpp-python, or libraries that are not ours; the text says
            how to fix it.
    """
    directory = lib_dir()
    file = library_file(directory)
    if file is None:
        raise ImportError(
            f"snapkv_gguf: no libllama in {directory}. Build and install the package (pip install .), or set "
            f"{ENV_LIB_PATH} to the directory of the built libraries."
        )
    try:
        found = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"snapkv_gguf needs llama-cpp-python {LLAMA_CPP_PYTHON}. Install it: {_INSTALL}") from None
    if found != LLAMA_CPP_PYTHON:
        raise ImportError(
            f"snapkv_gguf needs llama-cpp-python {LLAMA_CPP_PYTHON}, found {found}, which mirrors another "
            f"llama.cpp. Install the right one: {_INSTALL}"
        )
    prepare()
    try:
        module = importlib.import_module("llama_cpp.llama_cpp")
    except Exception as error:
        raise ImportError(
            f"snapkv_gguf: llama_cpp could not load {file}: {error}. Rebuild the package (pip install "
            "--force-reinstall --no-deps .)."
        ) from error
    library: ctypes.CDLL = module._lib
    if not hasattr(library, "llama_snapkv_build_info"):
        raise ImportError(
            f"snapkv_gguf: {file} is a llama.cpp without SnapKV. Rebuild the package (pip install "
            f"--force-reinstall --no-deps .), or correct {ENV_LIB_PATH}."
        )
    return library


def _check_loaded(directory: Path) -> None:
    module = sys.modules["llama_cpp.llama_cpp"]
    loaded = Path(module._base_path)
    if not (loaded.exists() and loaded.samefile(directory)):
        raise ImportError(
            f"llama_cpp was imported before snapkv_gguf and has loaded the libraries in {loaded}. Import "
            "snapkv_gguf first: it makes llama_cpp load its own, which do everything the others do."
        )
