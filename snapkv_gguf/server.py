"""llama-server with SnapKV, from Python: start it, ask it, stop it.

>>> from openai import OpenAI
>>> from snapkv_gguf import SnapKV
>>> from snapkv_gguf.server import Server
>>> with Server("model.gguf", "-c", "32768", "-np", "4", snapkv=SnapKV(budget=1024)) as server:
...     client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from . import _lib, models
from .config import SnapKV

_POLL = 0.05  # seconds
_STOP = 10.0  # seconds until a server that does not end is killed
# never through a proxy
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

_LOG_LINES = 8  # at most, of a server that did not start, in the error


class ServerError(RuntimeError):
    """The server did not start or ended by itself (the text holds the end of its log), or refused a request."""


def binary() -> Path:
    """The bundled llama-server.

    Raises:
        FileNotFoundError: The package was built without it, or not at all.
    """
    directory = _lib.lib_dir()
    for name in ("llama-server", "llama-server.exe"):
        if (directory / name).is_file():
            return directory / name
    raise FileNotFoundError(f"no llama-server in {directory}; build and install the package (pip install .)")


def flags(snapkv: SnapKV | Mapping[str, Any] | bool | None) -> list[str]:
    """The settings as llama-server's options.

    Raises:
        TypeError, ValueError: As :meth:`SnapKV.coerce`, and for what the server does not have: other rules, packed
            positions, a probe that is a text.
    """
    config = SnapKV.coerce(snapkv)
    if config is None:
        return ["--no-snapkv"]
    for name, values in (("rule", ["snapkv"]), ("positions", ["true"])):
        if getattr(config, name) not in values:
            raise ValueError(f"{name}={getattr(config, name)!r}: llama-server has only {values[0]!r}")
    names = ["budget", "window", "kernel", "pool", "recent"]
    if config.chunk is not None:
        if isinstance(config.probe, str):
            raise ValueError(
                f"probe={config.probe!r}: for llama-server it is a number of tokens, the prompt's last ones"
            )
        names += ["chunk", "probe"]
    return ["--snapkv", *(part for name in names for part in (f"--snapkv-{name}", str(getattr(config, name))))]


def resolved(arguments: Sequence[str]) -> list[str]:
    """The options with the file in the place of a named model (:data:`snapkv_gguf.models.MODELS`).

    Raises:
        models.ModelError: A named model could not be fetched.
    """
    found = list(arguments)
    for i in range(1, len(found)):
        if found[i - 1] in ("-m", "--model") and found[i] in models.MODELS and not Path(found[i]).exists():
            found[i] = str(models.get_model(found[i]))
    return found


def address(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Where a server with these options and environment variables listens, as a URL or the path of its socket."""

    def value(option: str, variable: str, default: str) -> str:
        given = [after for before, after in itertools.pairwise(arguments) if before == option]
        return given[-1] if given else environment.get(variable, default)

    host = value("--host", "LLAMA_ARG_HOST", "127.0.0.1")
    if host.endswith(".sock"):
        return host
    port = value("--port", "LLAMA_ARG_PORT", "8080")
    scheme = "https" if value("--ssl-cert-file", "LLAMA_ARG_SSL_CERT_FILE", "") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class Server:
    """A llama-server on a free port of this machine, for as long as the ``with`` block or until :meth:`stop`.

    Attributes:
        url: Where it listens, without a slash at the end.
        log_file: What it writes.
    """

    def __init__(
        self,
        model: str | Path,
        *arguments: str,
        snapkv: SnapKV | Mapping[str, Any] | bool | None = True,
        log_file: Path | None = None,
        timeout: float = 600.0,
        executable: Path | None = None,
    ) -> None:
        """Start the server and wait until the model is loaded.

        Args:
            model: A GGUF file, or a name of :data:`snapkv_gguf.models.MODELS`.
            *arguments: Other options of llama-server.
            snapkv: As of :class:`snapkv_gguf.Llama`.
            log_file: Written to it, else to a temporary file that goes with the server.
            timeout: Seconds until it must be ready.
            executable: Another llama-server than the bundled one; it must not be given options that it does not know.

        Raises:
            ServerError: It ended, or was not ready in time.
            FileNotFoundError: No bundled server.
        """
        path = str(models.resolve_model(str(model)))
        port = _free_port()
        own = flags(snapkv) if executable is None else []
        address = ("--host", "127.0.0.1", "--port", str(port))
        argv = [str(executable or binary()), "-m", path, *address, *own, *arguments]
        self.url = f"http://127.0.0.1:{port}"
        self._directory = None if log_file else tempfile.TemporaryDirectory(prefix="snapkv-server-")
        self.log_file = log_file or Path(self._directory.name if self._directory else "") / "log"
        with self.log_file.open("wb") as log:
            self._process = _spawn(argv, log)
        self._finalizer = weakref.finalize(self, _end, self._process)
        try:
            self._wait_until_ready(timeout)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, None as long as it runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> int:
        """End it, and wait until it has; returns its exit code. It may have ended before."""
        self._finalizer.detach()
        _end(self._process)
        return self._process.returncode

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON, and return the answer's.

        Raises:
            ServerError: An error, with its text.
        """
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        try:
            with _OPEN(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: {error.code}: {error.read().decode(errors='replace')}") from error

    def _wait_until_ready(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        ready = False
        while not ready:
            ready = _is_ready(self.url)
            # also when it is ready: another server may have got the port
            if self._process.poll() is not None:
                raise ServerError(f"llama-server ended with exit code {self._process.returncode}: {self._tail()}")
            if time.monotonic() > end:
                raise ServerError(f"llama-server was not ready after {timeout:.0f} s: {self._tail()}")
            if not ready:
                time.sleep(_POLL)

    def _tail(self) -> str:
        lines = self.log.strip().splitlines()
        errors = [line for line in lines if re.search(r"\berror\b| E ", line)]  # usage and backtraces may follow them
        return "\n".join((errors or lines)[-_LOG_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(argv: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def _is_ready(url: str) -> bool:
    try:
        with _OPEN(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # not yet listening, loading, ...
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def serve(arguments: Sequence[str]) -> None:
    """Become the bundled server: it gets all signals, and its exit code is ours."""
    argv = [str(binary()), *resolved(arguments)]
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execv(argv[0], argv)
    raise SystemExit(subprocess.run(argv, check=False).returncode)
