"""The generated tables of docs/architectures.md; run it to write them anew (make docs-architectures)."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import ops
import walk
from models import ROOT, write_models

from snapkv_gguf import _capi
from snapkv_gguf._capi import Status

DOCUMENT = ROOT / "docs/architectures.md"

REASONS = {
    "deepseek4": "its cache holds compressed blocks beside a sliding window",
    "glm5-next": "its indexer reads pools of consecutive positions",
    "minimax-m3": "its indexer reads blocks of positions",
    "qwen4exp": "its indexer reads blocks of positions",
    "lfm2": "in this fixture, where all attention slides; without sliding windows, as published, it works",
}


def page(document: str, found: list[walk.Found], verdicts: dict[tuple[str, str], dict[str, str]]) -> str:
    """The document with its tables replaced."""
    document = _replace(document, "architectures", architectures(found))
    document = _replace(document, "not written", ", ".join(f"`{name}`" for name in not_written(found)) + ".")
    return _replace(document, "operations", operations(verdicts))


def architectures(found: list[walk.Found]) -> str:
    lines = ["| architecture | cache | the pass | |", "| --- | --- | --- | --- |"]
    for arch in sorted({each.arch for each in found}):
        variants = [each for each in found if each.arch == arch]
        assert len({(each.caches, each.status) for each in variants}) == 1, arch
        each = variants[0]
        remarks = ", ".join(dict.fromkeys(remark for variant in variants for remark in variant.remarks))
        if each.faults:
            outcome = "**wrong**"
        elif each.status == "OK":
            outcome = "works"
        else:
            outcome = f"refused, `{each.status}`"
            remarks = REASONS.get(arch) or _capi.status_str(Status[each.status])
        lines.append(f"| `{arch}` | {', '.join(each.caches)} | {outcome} | {remarks} |")
    return "\n".join(lines)


def not_written(found: list[walk.Found]) -> list[str]:
    """Architectures that llama.cpp knows and its tool writes no model of."""
    source = (ROOT / "vendor/llama.cpp/src/llama-arch.cpp").read_text()
    names = set(re.findall(r'\{ LLM_ARCH_\w+, +"([^"()]+)" +\}', source))
    return sorted(names - {each.arch for each in found})


def operations(verdicts: dict[tuple[str, str], dict[str, str]]) -> str:
    lines = [f"| operation | types | {' | '.join(ops.BACKENDS)} |", "| --- | --- |" + " --- |" * len(ops.BACKENDS)]
    by_name: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for (name, pattern), answers in verdicts.items():
        by_name.setdefault(name, []).append((ops.types_of(pattern), answers))
    for name, classes in by_name.items():
        # types with the same answers share a line
        for answers in dict.fromkeys(tuple(each.values()) for _, each in classes):
            types = ", ".join(text for text, each in classes if tuple(each.values()) == answers)
            lines.append(f"| `{name}` | {types} | {' | '.join(answers)} |")
    return "\n".join(lines)


def _replace(document: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}: written by make docs-architectures -->", f"<!-- end of {name} -->"
    head, rest = document.split(begin)
    return f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = list(walk.walk(write_models(Path(folder))))
        verdicts = ops.verdicts(ops.used(Path(folder)))
    DOCUMENT.write_text(page(DOCUMENT.read_text(), found, verdicts))
    print(f"{DOCUMENT}: {sum(each.status == 'OK' for each in found)} of {len(found)} models work")


if __name__ == "__main__":
    main()
