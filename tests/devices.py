"""Where the layers of the tests' models live: SNAPKV_TEST_DEVICE.

cpu       the default
rpc       on two rpc-server processes on this machine, half of them on each
rpc-half  the last half of them on one rpc-server, the others on the CPU
gpu       on the devices of the build, CUDA or Vulkan
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import subprocess
import time
from pathlib import Path

import gguf
import pytest

from snapkv_gguf import _lib

# env: SNAPKV_TEST_DEVICE
DEVICE = os.environ.get("SNAPKV_TEST_DEVICE", "cpu")
N_SERVERS = {"cpu": 0, "gpu": 0, "rpc": 2, "rpc-half": 1}[DEVICE]

# the abort callback is the CPU's
needs_abort = pytest.mark.skipif(DEVICE != "cpu", reason="computations on a device are not aborted")

# of scores that come in float32, relative to the largest: sums over up to 64 rows of a softmax
# GPUs multiply in less than float32 (TF32, halves), or have an approximate exponential
ROUNDING = 2e-3 if DEVICE == "gpu" else 4e-6

_ALL = 999


def n_gpu_layers(path: str | Path) -> int:
    """How many of the model's last layers go to a device."""
    if DEVICE == "cpu":
        return 0
    if DEVICE == "rpc-half":
        reader = gguf.GGUFReader(path)
        arch = reader.fields["general.architecture"].contents()
        return 1 + int(reader.fields[f"{arch}.block_count"].contents()) // 2  # and the output layer
    return _ALL


def register() -> None:
    """Start the servers, and make their devices known to ggml."""
    if not N_SERVERS:
        return
    folder = _lib.lib_dir()
    rpc = ctypes.CDLL(str(next(folder.glob("libggml-rpc.*"))))
    ggml = ctypes.CDLL(str(next(folder.glob("libggml.*"))))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    for _ in range(N_SERVERS):
        endpoint = _start(folder / "ggml-rpc-server")
        registry = rpc.ggml_backend_rpc_add_server(endpoint.encode())
        assert registry, f"no rpc-server at {endpoint}"
        ggml.ggml_backend_register(registry)


def _start(binary: Path) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [str(binary), "-H", "127.0.0.1", "-p", str(port), "-t", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(server.kill)
    for _ in range(600):
        assert server.poll() is None, f"{binary} ended with {server.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return f"127.0.0.1:{port}"
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"{binary} does not listen")
