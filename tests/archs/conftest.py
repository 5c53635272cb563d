from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def arch_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A small random model of every architecture, by upstream's own writer."""
    return write_models(tmp_path_factory.mktemp("archs"))


def write_models(folder: Path) -> list[Path]:
    root = Path(__file__).resolve().parents[2]
    writer = root / "build/wheel/bin/test-llama-archs"
    assert writer.is_file(), f"{writer} is missing: run the tests with make test"
    subprocess.run([str(writer), "-o", str(folder), "-s", "1"], check=True, capture_output=True)
    return sorted(folder.glob("*.gguf"))
