"""The file of a run's records, one line each, which survives that the process is killed while it writes."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, TextIO

from .schema import Record

FILE = "records.jsonl"


def append(file: TextIO, record: Record) -> None:
    """Add one, on the disk when this returns."""
    file.write(json.dumps(asdict(record)) + "\n")
    file.flush()
    os.fsync(file.fileno())


def cut_broken_line(path: Path) -> None:
    """Take off what was not written to its end."""
    if path.is_file():
        with path.open("r+b") as out:
            out.truncate(out.read().rfind(b"\n") + 1)


def read(path: Path) -> tuple[Record, ...]:
    """All of them, of one sample by one method and budget the last one; none if there is no such file.

    Raises:
        ValueError: A line is not a record.
    """
    if not path.is_file():
        return ()
    lines = path.read_bytes().split(b"\n")
    records: dict[tuple[str, str, int | float], Record] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _record(json.loads(line))
        except (ValueError, TypeError) as error:
            # without a newline after it, it was never written to its end
            if number == len(lines) and isinstance(error, ValueError):
                break
            raise ValueError(f"{path}, line {number}: {error}; remove the line and run snapkv eval again") from error
        records[record.sample, record.method, record.budget] = record
    return tuple(records.values())


def _record(values: Any) -> Record:
    """A record from its JSON; fields of later versions are left out.

    Raises:
        TypeError: Not a record.
        ValueError: Not JSON, or a field is missing.
    """
    if not isinstance(values, dict):
        raise TypeError(f"must be an object, is {type(values).__name__}")
    known = fields(Record)
    required = (f.name for f in known if f.default is MISSING and f.default_factory is MISSING)
    missing = [name for name in required if name not in values]
    if missing:
        raise TypeError(f"no field {', '.join(missing)}")
    for name in ("fields", "scores"):
        if not isinstance(values[name], dict):
            raise TypeError(f"field {name} must be an object, is {values[name]!r}")
    record = Record(**{f.name: values[f.name] for f in known if f.name in values})
    return replace(record, answers=tuple(record.answers), references=tuple(record.references))
