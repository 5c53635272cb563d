"""Small random models of every architecture, by upstream's own tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITER = ROOT / "build/wheel/bin/test-llama-archs"


def write_models(folder: Path) -> list[Path]:
    """Writes them into the folder, 0.9 GB."""
    assert WRITER.is_file(), f"{WRITER} is missing: run the tests with make test"
    subprocess.run([str(WRITER), "-o", str(folder), "-s", "1"], check=True, capture_output=True)
    return sorted(folder.glob("*.gguf"))
