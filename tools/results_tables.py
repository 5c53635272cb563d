"""Writes the tables of README.md and docs/ from the runs in docs/results/.

A table stands between ``<!-- results: KIND FOLDER OPTION=VALUE ... -->`` and ``<!-- end of results -->``. Kinds are
those of KINDS. Options are ``budgets``, ``methods``, ``tasks`` and ``lengths``, with values separated by commas; they
leave out all others.

    python tools/results_tables.py            # rewrite
    python tools/results_tables.py --check    # exit code 1 if a table is not what the runs say
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from snapkv_gguf.eval import groups, tables
from snapkv_gguf.eval.report import Run, load
from snapkv_gguf.eval.tables import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"

KINDS: dict[str, Callable[[Run], Table | None]] = {
    "by-method": tables.by_method,
    "by-budget": tables.by_budget,
    "scores": lambda run: tables.overview([run]),
    "by-depth": tables.by_depth,
    "text": lambda run: tables.running_text([run]),
    "questions": lambda run: tables.questions([run]),
    "ablation": lambda run: tables.ablation([run]),
    "speed": lambda run: tables.speed([run]),
    "cost": lambda run: tables.cost([run]),
}

_BLOCK = re.compile(r"(<!-- results: ([\w-]+) (\S+)((?: \w+=\S+)*) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def documents() -> list[Path]:
    """Files that can hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(RESULTS.glob("*.md"))]


def chosen(run: Run, options: str) -> Run:
    """The run with only the records that the options name.

    Raises:
        ValueError: An unknown option, or one that leaves nothing.
    """
    records = run.records
    for name, _, values in (option.partition("=") for option in options.split()):
        read = {
            "budgets": lambda record: groups.budget_text(record.budget).replace(" ", ""),
            "methods": lambda record: record.method,
            "tasks": lambda record: record.task,
            "lengths": lambda record: str(record.fields["length"]),
        }.get(name)
        if read is None:
            raise ValueError(f"option {name}: must be budgets, methods, tasks or lengths")
        wanted = {*values.split(","), *(["all"] if name == "budgets" else [])}
        records = tuple(record for record in records if read(record) in wanted)
    if not records:
        raise ValueError(f"{run.name}: no records with{options}")
    return replace(run, records=records)


def filled(text: str) -> str:
    """A document with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        begin, kind, folder, options, end = match.groups()
        if kind not in KINDS:
            raise ValueError(f"kind {kind}: must be one of {', '.join(KINDS)}")
        found = KINDS[kind](chosen(load(RESULTS / folder), options))
        if found is None or not found.rows:
            raise ValueError(f"{folder}: has nothing for a table of kind {kind}{options}")
        return begin + found.markdown() + end

    return _BLOCK.sub(table, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, exit code 1 if a table is stale")
    check = parser.parse_args().check
    stale = 0
    for file in documents():
        text = file.read_text(encoding="utf-8")
        new = filled(text)
        if new == text:
            continue
        stale += 1
        print(f"{file.relative_to(ROOT)}: {'stale, run tools/results_tables.py' if check else 'rewritten'}")
        if not check:
            file.write_text(new, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
