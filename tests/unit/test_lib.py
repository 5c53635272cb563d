from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import snapkv_gguf
from snapkv_gguf import _lib


def python(code: str, path: Path | None = None, **environment: str) -> tuple[str, str]:
    """Output and last line of the errors of a fresh interpreter with this package."""
    package = Path(snapkv_gguf.__file__).parents[1]
    folders = [str(folder) for folder in (path, package) if folder]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **environment}
    for name in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"):
        if name not in environment:
            env.pop(name, None)
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    return run.stdout.strip(), run.stderr.strip().rsplit("\n", 1)[-1]


def test_without_libraries_settings_work_and_llama_says_what_is_missing(tmp_path: Path) -> None:
    env = {_lib.ENV_LIB_PATH: str(tmp_path)}
    assert python("from snapkv_gguf import SnapKV; print(SnapKV().window)", **env) == ("16", "")
    _, error = python("from snapkv_gguf import Llama", **env)
    assert error.startswith("ImportError: snapkv_gguf: no libllama in")
    assert str(tmp_path) in error
    assert "pip install ." in error


@pytest.mark.usefixtures("library")
def test_llama_cpp_finds_our_libraries() -> None:
    code = (
        "import snapkv_gguf, llama_cpp.llama_cpp as c, llama_cpp.mtmd_cpp as m; print(c._lib._name, m._libmtmd._name)"
    )
    out, _ = python(code)
    assert all(str(_lib.lib_dir()) in name for name in out.split())


@pytest.mark.usefixtures("library")
def test_llama_cpp_imported_first(tmp_path: Path) -> None:
    for file in _lib.lib_dir().iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    _, error = python("import llama_cpp, snapkv_gguf", LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert error.startswith("ImportError: llama_cpp was imported before snapkv_gguf")
    assert str(tmp_path) in error
    assert "Import snapkv_gguf first" in error
    # with the same libraries the order does not matter
    code = "import llama_cpp; from snapkv_gguf import Llama; print('fine')"
    assert python(code, LLAMA_CPP_LIB_PATH=str(_lib.lib_dir()))[0] == "fine"


@pytest.mark.usefixtures("library")
def test_another_version_of_the_binding(tmp_path: Path) -> None:
    metadata = tmp_path / "llama_cpp_python-0.3.35.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.35\n")
    _, error = python("from snapkv_gguf import Llama", tmp_path)
    assert "needs llama-cpp-python 0.3.36, found 0.3.35" in error
    assert "pip install --no-cache-dir llama-cpp-python==0.3.36" in error


@pytest.mark.usefixtures("library")
def test_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"pip install --no-cache-dir llama-cpp-python==0\.3\.36"):
        _lib.load()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("broken", [False, True])
def test_libraries_that_are_not_ours(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import_any = importlib.import_module

    def import_module(name: str) -> Any:
        if name != "llama_cpp.llama_cpp":
            return import_any(name)
        if broken:
            raise AttributeError("undefined symbol: llama_decode")
        return SimpleNamespace(_lib=object())

    monkeypatch.setattr(importlib, "import_module", import_module)
    told = "undefined symbol: llama_decode" if broken else "is a llama.cpp without SnapKV"
    with pytest.raises(ImportError, match=told) as caught:
        _lib.load()
    assert "Rebuild the package" in str(caught.value)


@pytest.mark.parametrize(
    ("platform", "names"),
    [
        ("linux", ["libllama.so"]),
        ("darwin", ["libllama.dylib", "libllama.so"]),
        ("win32", ["llama.dll", "libllama.dll"]),
    ],
)
def test_file_names(platform: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert _lib.library_file(tmp_path) is None
    for name in reversed(names):
        (tmp_path / name).touch()
        assert _lib.library_file(tmp_path) == tmp_path / name
