"""The installed package: libraries, their names and search paths, the server, the licences."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(str(importlib.resources.files("snapkv_gguf")))
LIB = PACKAGE / "lib"
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
LIBRARIES = ["llama", "mtmd", "llama-common", "llama-server-impl", "ggml", "ggml-base", "ggml-cpu"]

linux_tools = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("readelf"), reason="needs readelf, on Linux"
)


def library(name: str) -> Path:
    return LIB / f"lib{name}{SUFFIX}"


def dynamic(path: Path, tag: str) -> list[str]:
    text = subprocess.run(["readelf", "-dW", str(path)], check=True, capture_output=True, text=True).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", text)


def server(*args: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")}
    run = subprocess.run([str(LIB / "llama-server"), *args], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_installed_package_is_tested() -> None:
    assert ROOT / "snapkv_gguf" != PACKAGE


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_is_one_file(name: str) -> None:
    assert library(name).is_file()
    assert [p.name for p in LIB.glob(f"lib{name}{SUFFIX}*")] == [library(name).name]


def test_no_symlinks() -> None:
    assert [p for p in PACKAGE.rglob("*") if p.is_symlink()] == []


@linux_tools
@pytest.mark.parametrize("name", LIBRARIES)
def test_soname_and_rpath(name: str) -> None:
    assert dynamic(library(name), "SONAME") == [library(name).name]
    paths = dynamic(library(name), "RUNPATH") + dynamic(library(name), "RPATH")
    assert [p.split(":")[0] for p in paths] in (["$ORIGIN"], [])
    ours = [n for n in dynamic(library(name), "NEEDED") if "ggml" in n or "llama" in n or "mtmd" in n]
    assert [n for n in ours if not (LIB / n).is_file()] == []


@linux_tools
@pytest.mark.parametrize("name", LIBRARIES)
def test_no_path_of_the_build(name: str) -> None:
    """RPATHs into the build folder would make the package work on this machine only."""
    for tag in ("RUNPATH", "RPATH"):
        assert str(ROOT) not in "".join(dynamic(library(name), tag))


def test_only_libraries_and_programs_are_installed() -> None:
    programs = {"llama-server", "llama-cli", "ggml-rpc-server"}
    assert {p.name for p in LIB.iterdir() if not p.name.endswith(SUFFIX)} - programs == set()
    assert not (PACKAGE.parent / "include").exists() or not list((PACKAGE.parent / "include").glob("llama*.h"))


def test_symbols() -> None:
    code = (
        "import snapkv_gguf, llama_cpp, llama_cpp.mtmd_cpp as m\n"
        "print(llama_cpp.llama_cpp._base_path)\nprint(m._libmtmd_base_path)\n"
        "print(llama_cpp.llama_cpp._lib.llama_snapkv_build_info)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=LIB)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[:2] == [str(LIB), str(LIB)]


def test_every_function_of_the_header_is_exported() -> None:
    import ctypes

    names = set(re.findall(r"LLAMA_API[^;(]*?(llama_snapkv_\w+)\s*\(", (ROOT / "native/llama-snapkv.h").read_text()))
    lib = ctypes.CDLL(str(library("llama")))
    assert names
    assert [n for n in sorted(names) if not hasattr(lib, n)] == []


def test_server_starts() -> None:
    assert "--ctx-size" in server("--help")


def test_server_names_the_pinned_commit() -> None:
    pin = dict(re.findall(r'^(\w+) = "(.*?)"', (ROOT / "vendor/llama.cpp.toml").read_text(), re.M))
    assert pin["commit"][:9] in server("--version")
    assert (PACKAGE / "llama.cpp.toml").read_text() == (ROOT / "vendor/llama.cpp.toml").read_text()


def test_licences() -> None:
    texts = {p.stem: p.read_text() for p in (PACKAGE / "licenses").glob("*.txt")}
    for name, words in {
        "snapkv-gguf": "snapkv-gguf contributors",
        "llama.cpp": "The ggml authors",
        "cpp-httplib": "yhirose",
        "nlohmann-json": "Niels Lohmann",
        "llamafile": "Mozilla Foundation",
        "miniaudio": "David Reid",
        "stb_image": "Sean Barrett",
        "subprocess.h": "public domain",
        "rotate-bits": "William Casarin",
        "sha1": "Public Domain",
        "sha256": "Public domain",
        "xxhash": "Yann Collet",
    }.items():
        assert words in texts[name], name
    # a part that a later llama.cpp compiles in needs its licence too
    vendored = {p.name for p in (ROOT / "vendor/llama.cpp/vendor").iterdir() if p.is_dir()}
    assert vendored == {"cpp-httplib", "hash", "miniaudio", "nlohmann", "sheredom", "stb"}
    hashes = {p.name for p in (ROOT / "vendor/llama.cpp/vendor/hash").iterdir() if p.is_dir()}
    assert hashes == {"rotate-bits", "sha1", "sha256", "xxhash"}


def test_metadata() -> None:
    meta = importlib.metadata.metadata("snapkv-gguf")
    assert meta["License-Expression"] == "MIT"
    assert meta["License-File"] == "LICENSE"
    wheel = importlib.metadata.distribution("snapkv-gguf").read_text("WHEEL") or ""
    assert re.search(r"^Tag: py3-none-(?!any)", wheel, re.M)
    assert "Root-Is-Purelib: false" in wheel


def test_console_script() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts")
    assert scripts["snapkv"].value == "snapkv_gguf.cli:main"
