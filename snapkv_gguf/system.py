"""What a result was measured with: versions, libraries, devices, machine."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from . import __version__, _capi, _lib

_DEVICE_TYPES = ("CPU", "GPU", "integrated GPU", "accelerator", "meta")


def describe(paths: bool = True) -> dict[str, Any]:
    """Versions, library path, build, backends, devices and machine, as JSON takes them.

    Args:
        paths: Whether to name folders of this machine; results that are published need none.
    """
    facts = {
        "snapkv_gguf": __version__,
        "llama_cpp_python": _lib.LLAMA_CPP_PYTHON,
        "llama_cpp_commit": llama_cpp_commit(),
        "python": platform.python_version(),
        "libraries": str(_lib.lib_dir()),
        "build": _capi.build_info(),
        "backends": backends(),
        "devices": devices(),
        "machine": {"os": platform.system(), "cpu": _cpu(), "cpus": os.cpu_count()},
    }
    if not paths:
        del facts["libraries"]
    return facts


def llama_cpp_commit() -> str:
    """The commit of llama.cpp that this version is pinned to, empty if its pin is not there."""
    package = Path(__file__).parent
    # installed, beside the libraries if they are another package's than this module; in a checkout
    for pin in (
        _lib.lib_dir().parent / "llama.cpp.toml",
        package / "llama.cpp.toml",
        package.parent / "vendor" / "llama.cpp.toml",
    ):
        if pin.is_file():
            commit = re.search(r'^commit = "(\w+)"', pin.read_text(encoding="utf-8"), re.MULTILINE)
            return commit[1] if commit else ""
    return ""


def _ggml() -> ctypes.CDLL:
    file = _lib.library_file(_lib.lib_dir(), "ggml")
    if file is None:
        raise ImportError(f"no libggml beside libllama in {_lib.lib_dir()}; rebuild the package")
    lib = ctypes.CDLL(str(file))
    for name in ("ggml_backend_reg_count", "ggml_backend_dev_count"):
        getattr(lib, name).restype = ctypes.c_size_t
    for name in ("ggml_backend_reg_get", "ggml_backend_dev_get"):
        getattr(lib, name).restype = ctypes.c_void_p
        getattr(lib, name).argtypes = [ctypes.c_size_t]
    for name in ("ggml_backend_reg_name", "ggml_backend_dev_name", "ggml_backend_dev_description"):
        getattr(lib, name).restype = ctypes.c_char_p
        getattr(lib, name).argtypes = [ctypes.c_void_p]
    lib.ggml_backend_dev_type.restype = ctypes.c_int
    lib.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_dev_memory.restype = None
    lib.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p] + [ctypes.POINTER(ctypes.c_size_t)] * 2
    return lib


def backends() -> list[str]:
    """Names of the ggml backends that are compiled in."""
    lib = _ggml()
    return [
        lib.ggml_backend_reg_name(lib.ggml_backend_reg_get(i)).decode() for i in range(lib.ggml_backend_reg_count())
    ]


def devices() -> list[dict[str, Any]]:
    """Devices that llama.cpp can use: name, description, type, memory in MiB."""
    lib = _ggml()
    found = []
    for i in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(i)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = lib.ggml_backend_dev_type(device)
        found.append(
            {
                "name": lib.ggml_backend_dev_name(device).decode(),
                "description": lib.ggml_backend_dev_description(device).decode(),
                "type": _DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else str(kind),
                "memory_mib": total.value >> 20,
            }
        )
    return found


def _cpu() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
