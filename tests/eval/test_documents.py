"""The tables in the documents are those of the recorded runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_tables", ROOT / "tools" / "results_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_table_is_stale(results_tables: ModuleType) -> None:
    n_tables = 0
    for file in results_tables.documents():
        text = file.read_text(encoding="utf-8")
        assert results_tables.filled(text) == text, f"{file}: run make docs-results"
        n_tables += text.count("<!-- results: ")
    assert n_tables >= 5


def test_a_stale_table_is_seen(results_tables: ModuleType) -> None:
    text = next(
        text for file in results_tables.documents() if "<!-- results: " in (text := file.read_text(encoding="utf-8"))
    )
    begin = text.index("-->\n", text.index("<!-- results: ")) + 4
    assert results_tables.filled(text[:begin] + "| old |\n" + text[text.index("<!-- end", begin) :]) == text


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("plot x", "kind plot: must be one of by-method, by-budget"),
        ("scores nowhere", "no such folder"),
        ("cost SmolLM2-135M-Instruct.Q4_1-4096-9efa3f76", "has nothing for"),
    ],
)
def test_wrong_blocks(results_tables: ModuleType, block: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        results_tables.filled(f"<!-- results: {block} -->\n<!-- end of results -->")
