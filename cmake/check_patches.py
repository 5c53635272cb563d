#!/usr/bin/env python3
"""Check patches/: format, that they apply exactly, and that the table in patches/README.md names every hook.

A row of the table is | `file` | `function`, ... | intent |: the functions that enclose the markers in the patched file,
without their class; for a marker in a class its name. A list of parameters may tell overloads apart. Markers outside of
both (includes, declarations) need no row. Needs vendor/llama.cpp-pristine, which a configure or vendor_llama.py makes.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import vendor_llama as v

ZERO = "From " + "0" * 40 + " Mon Sep 17 00:00:00 2001\n"
FORMAT = "git format-patch --zero-commit --no-signature --no-numbered"


def check_format(patch: v.Patch) -> list[str]:
    text = patch.text.decode("utf-8", "replace")
    head, _, rest = text.partition("\n---\n")
    message = head.partition("\n\n")[2]
    wrong = []
    if not text.startswith(ZERO):
        wrong.append("the first line holds a commit")
    if not re.search(r"^Subject: \[PATCH\] \S", head, re.M):
        wrong.append("the subject does not begin with '[PATCH] '")
    if re.search(r"^-- $", rest, re.M):
        wrong.append("it ends with git's version")
    wrong = [f"{patch.name}: {w}; write it with {FORMAT}" for w in wrong]
    if not message.strip():
        wrong.append(f"{patch.name}: the message gives no reason, only a subject; say why the hooks are there")
    wrong += [f"{patch.name}: {f} is changed without a {v.MARK}...] line" for f, n in patch.marks.items() if n <= 0]
    return wrong


def hooks(path: Path) -> set[str]:
    """Names of the functions (or classes) of a C++ file that hold a marker."""
    scope = re.compile(
        r"(?:class|struct|enum(?: class)?) (\w+)[^;]*$|(?=[A-Za-z_])[\w:<>,*&\s]*?([\w:~]+)\s*\((?:.*[^;])?$"
    )
    found, name = set(), ""
    for line in path.read_text(encoding="utf-8").split("\n"):
        if m := scope.match(line.rstrip()):
            name = m[1] or m[2].rpartition("::")[2]
        if v.MARK in line and name:
            found.add(name)
        if line.startswith("}"):
            name = ""
    return found


def table(readme: Path) -> set[tuple[str, str]]:
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    rows = re.finditer(r"^\| *`([^`]+)` *\|([^|]*)\|", text, re.M)
    return {(m[1], name) for m in rows for name in re.findall(r"`([^`(]+)[^`]*`", m[2])}


def check(root: Path) -> list[str]:
    patches = v.read_patches(root)
    pristine = root / "vendor/llama.cpp-pristine"
    if not pristine.is_dir():
        raise v.VendorError(f"{pristine} does not exist; run cmake/vendor_llama.py first")
    wrong = [w for p in patches for w in check_format(p)]

    files = sorted({f for p in patches for f in p.marks})
    with tempfile.TemporaryDirectory() as tmp:
        tree = Path(tmp, "tree")
        shutil.copytree(pristine, tree)
        for p in patches:
            out = v.apply_patch(root / "patches" / p.name, tree, ("--verbose",))
            moved = re.findall(r"Hunk #\d+ succeeded at \d+ .*", out)
            wrong += [f"{p.name}: {m.strip()}: the patch was made on another source; write it again" for m in moved]
        for f in files:
            want, got = sum(p.marks.get(f, 0) for p in patches), v.count_marks(tree / f)
            if want != got:
                wrong.append(f"{f}: the patches add {want} markers, the patched file holds {got}")
            if v.count_marks(root / "vendor/llama.cpp" / f) != got:
                wrong.append(f"vendor/llama.cpp/{f} differs from the patches; run cmake/vendor_llama.py")
        in_tree = {(f, name) for f in files if (tree / f).is_file() for name in hooks(tree / f)}

    in_table = table(root / "patches/README.md")
    wrong += [f"patches/README.md: no row | `{f}` | `{name}` | ... |" for f, name in sorted(in_tree - in_table)]
    wrong += [f"patches/README.md: `{f}`, `{name}` holds no hook" for f, name in sorted(in_table - in_tree)]
    return wrong


def main(argv: list[str]) -> int:
    root = Path(argv[1]).resolve() if len(argv) > 1 else v.ROOT
    try:
        wrong = check(root)
    except (v.VendorError, OSError) as e:
        wrong = [str(e)]
    for w in wrong:
        print(f"check-patches: {w}", file=sys.stderr)
    if not wrong:
        print(f"check-patches: {len(v.read_patches(root))} patches are good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
