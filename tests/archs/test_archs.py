"""Every architecture of llama.cpp is compacted exactly, or refused with its reason: docs/architectures.md."""

from __future__ import annotations

from pathlib import Path

import ops
import page
import pytest
import walk
from engine import CACHE_TYPES
from identity import digests_with

from snapkv_gguf import _lib

# what the pass can do nothing for, as designed; all others are to work
REFUSED = {
    "UNSUPPORTED_RECURRENT": {"mamba", "mamba2"},
    "UNSUPPORTED_ENCODER": {"dream", "llada", "llada-moe", "rnd1"},
    "UNSUPPORTED_ALIBI": {"bloom", "jais", "mpt", "refact"},
    "UNSUPPORTED_MEMORY": {"deepseek4", "glm5-next", "minimax-m3", "qwen4exp"},
    "UNSUPPORTED_SWA": {"lfm2"},  # upstream's own choice for the fixture: all of its attention slides
}


@pytest.fixture(scope="module")
def found(arch_models: list[Path]) -> list[walk.Found]:
    assert len(arch_models) > 100
    return list(walk.walk(arch_models))


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, str]]:
    return ops.verdicts(ops.used(tmp_path_factory.mktemp("ops")))


def test_every_architecture(found: list[walk.Found]) -> None:
    faults = {each.name: each.faults for each in found if each.faults}
    assert not faults
    refused = {}
    for each in found:
        if each.status != "OK":
            refused.setdefault(each.status, set()).add(each.arch)
    assert refused == REFUSED


# what falls back to the CPU on a backend, though it works
FALLBACKS = {("CUDA", "GET_ROWS", "iq4_nl")}


def test_every_operation_runs_on_the_device(operations: dict[tuple[str, str], dict[str, str]]) -> None:
    """By upstream's support tables: no step of the pass falls back to the CPU of a machine that we do not have."""
    assert len(operations) > 15
    falls_back = {
        (backend, op, ops.types_of(pattern))
        for (op, pattern), answers in operations.items()
        for backend, answer in answers.items()
        if answer != "yes"
    }
    assert falls_back == FALLBACKS


def test_the_tables(found: list[walk.Found], operations: dict[tuple[str, str], dict[str, str]]) -> None:
    document = page.DOCUMENT.read_text()
    assert document == page.page(document, found, operations), "run make docs-architectures"


def test_off_is_identical(arch_models: list[Path], pristine: Path) -> None:
    """Logits of a prompt and of generated tokens, bit by bit, of every architecture."""
    ours, theirs = (
        digests_with(library, arch_models, 100, 4, True, CACHE_TYPES["f16"]) for library in (_lib.lib_dir(), pristine)
    )
    assert len(ours) == len(arch_models)
    assert ours == theirs
