#!/usr/bin/env python3
"""Unpack the pinned llama.cpp, verified and patched, into vendor/llama.cpp (standard library only).

CMake calls this at configure time. The source is, in this order:

- SNAPKV_LLAMA_SOURCE (or --source): the sdist file, an unpacked sdist, or a llama.cpp tree; trees cannot be verified
- the sdist in the cache (SNAPKV_GGUF_CACHE, else the user's cache directory)
- the sdist, downloaded with pip

Next to the patched tree, vendor/llama.cpp-pristine gets the folders that are patched as upstream wrote them, for the
tests that compare both. Both trees carry a stamp; as long as it agrees, nothing is done. New trees are made in a
temporary sibling and renamed, so that an interrupted run leaves nothing that the next one takes for good.

Every failure is one line on standard error, and exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # not POSIX: no lock
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
PIN = "vendor/llama.cpp.toml"
STAMP = ".snapkv-stamp"
MARK = "[TAG_SNAPKV"
FORMAT = 2  # part of the stamp: raise it when the same inputs shall give another tree
PRISTINE = ("src/", "include/", "common/", "tools/server/")  # kept as upstream wrote it, too
REQUIRED = ("CMakeLists.txt", "include/llama.h", "src/CMakeLists.txt", "ggml/CMakeLists.txt")


class VendorError(Exception):
    """What was wrong, the value, and what to do, in one line."""


class Pin(NamedTuple):
    name: str
    version: str
    sha256: str
    commit: str


class Patch(NamedTuple):
    name: str
    text: bytes
    marks: dict[str, int]  # path -> marker lines that the patch adds, less those it removes


class Source(NamedTuple):
    kind: str  # "pin": the verified sdist, "tree": a folder
    path: Path | None  # None: to be looked up in the cache or downloaded
    id: str


def log(text: str) -> None:
    print(f"snapkv-gguf: {text}", flush=True)


#
# inputs
#


def read_pin(root: Path) -> Pin:
    """The pin. Flat TOML is parsed here, since tomllib is not in Python 3.10."""
    path = root / PIN
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise VendorError(f"cannot read the pin {path}: {e.strerror}; restore it from the repository") from e
    matches = (re.match(r'(\w+) *= *"([^"]*)" *(?:#.*)?$', line) for line in lines)
    values = {m[1]: m[2] for m in matches if m}
    patterns = {"name": r"[\w.-]+", "version": r"[\w.]+", "sha256": r"[0-9a-f]{64}", "commit": r"[0-9a-f]{40}"}
    for key, pattern in patterns.items():
        if not re.fullmatch(pattern, values.get(key, "")):
            raise VendorError(f"{PIN}: {key} is {values.get(key)!r}, which does not match {pattern}; correct the pin")
    return Pin(values["name"], values["version"], values["sha256"], values["commit"])


def parse_patch(path: Path) -> Patch:
    marks: dict[str, int] = {}
    file, n_old, n_new = "", 0, 0
    text = path.read_bytes()
    for line in text.decode("utf-8", "replace").split("\n"):
        if n_old > 0 or n_new > 0:  # in a hunk
            if line.startswith("+"):
                n_new -= 1
                marks[file] += MARK in line
            elif line.startswith("-"):
                n_old -= 1
                marks[file] -= MARK in line
            elif not line.startswith("\\"):
                n_old, n_new = n_old - 1, n_new - 1
        elif m := re.match(r"\+\+\+ b/([^\t]+)", line):
            file = m[1]
            marks.setdefault(file, 0)
        elif m := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            if not file:
                raise VendorError(
                    f"patches/{path.name} is damaged: a hunk without a file; write it again with git format-patch"
                )
            n_old, n_new = int(m[1] or 1), int(m[2] or 1)
    if not marks:
        raise VendorError(f"patches/{path.name} changes no file; write it again with git format-patch")
    return Patch(path.name, text, marks)


def read_patches(root: Path) -> list[Patch]:
    return [parse_patch(p) for p in sorted((root / "patches").glob("*.patch"))]


def sha256_file(path: Path) -> str:
    h = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def check_sdist(path: Path, pin: Pin, remedy: str) -> None:
    digest = sha256_file(path)
    if digest != pin.sha256:
        raise VendorError(
            f"wrong checksum: {path} ({path.stat().st_size} bytes) has sha256 {digest}, {PIN} wants {pin.sha256} for "
            f"{pin.name} {pin.version}; {remedy}"
        )


def is_llama_tree(path: Path) -> bool:
    return all((path / f).is_file() for f in REQUIRED)


def walk(tree: Path) -> Iterator[str]:
    """Relative paths of the regular files, sorted; neither git's own files nor links."""
    for folder, dirs, files in os.walk(tree):
        dirs[:] = sorted(d for d in dirs if d != ".git")
        for f in sorted(files):
            path = Path(folder, f)
            if f not in (".git", STAMP) and path.is_file() and not path.is_symlink():
                yield path.relative_to(tree).as_posix()


def find_source(given: str, pin: Pin, root: Path) -> Source:
    if not given:
        return Source("pin", None, pin.sha256)
    path = Path(given).expanduser().resolve()
    if path.is_file():
        check_sdist(path, pin, "give the sdist of the pinned version, or unset SNAPKV_LLAMA_SOURCE to download it")
        return Source("pin", path, pin.sha256)
    for tree in (path / "vendor/llama.cpp", path):
        if is_llama_tree(tree):
            if tree.is_relative_to(root / "vendor"):
                raise VendorError(
                    f"SNAPKV_LLAMA_SOURCE={given} is where the patched tree goes; give another folder or unset it"
                )
            stats = ((f, (tree / f).stat()) for f in walk(tree))
            files = "".join(f"{f} {s.st_size} {s.st_mtime_ns}\n" for f, s in stats)
            return Source("tree", tree, hashlib.sha256(files.encode()).hexdigest())
    what = "is neither an sdist file nor a tree of llama.cpp" if path.exists() else "does not exist"
    raise VendorError(
        f"SNAPKV_LLAMA_SOURCE={given} {what}; give {pin.name}'s sdist {pin.version}, the folder unpacked from it, "
        "a llama.cpp tree, or unset it to download"
    )


#
# the sdist
#


def cache_dir() -> Path:
    if given := os.environ.get("SNAPKV_GGUF_CACHE"):  # env: SNAPKV_GGUF_CACHE
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/snapkv-gguf"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snapkv-gguf"


def get_sdist(pin: Pin, tmp: Path) -> Path:
    """The verified sdist from the cache, else downloaded (into the cache, or into tmp if that cannot be written)."""
    cached = cache_dir() / f"{pin.name.replace('-', '_')}-{pin.version}.tar.gz"
    if cached.is_file():
        if sha256_file(cached) == pin.sha256:
            return cached
        log(f"{cached} has not the pinned checksum, downloading it again")
    sdist = download(pin, tmp)
    check_sdist(
        sdist, pin, f"if the pin was changed on purpose, correct sha256 in {PIN}; else do not trust this package index"
    )
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{cached.name}.{os.getpid()}.part")
        try:
            shutil.copyfile(sdist, partial)
            os.replace(partial, cached)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as e:
        log(f"not kept in the cache: {e}")
        return sdist
    return cached


def download(pin: Pin, tmp: Path) -> Path:
    what = f"{pin.name}=={pin.version}"
    log(f"downloading {what} with pip")
    cmd = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    cmd += ["--no-binary", pin.name, "--dest", str(tmp), what]
    env = {k: v for k, v in os.environ.items() if k not in ("PIP_BUILD_TRACKER", "PIP_REQ_TRACKER")}  # an outer pip's
    env.setdefault("PIP_RETRIES", "2")
    run = subprocess.run(cmd, env=env, capture_output=True, text=True, errors="replace")
    found = sorted(tmp.glob("*.tar.gz"))
    if run.returncode == 0 and found:
        return found[0]
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        raise VendorError(
            f"{sys.executable} has no pip to download {what}; install pip, or set SNAPKV_LLAMA_SOURCE to its sdist"
        )
    lines.append(f"exit status {run.returncode}")
    cause = next((line for line in lines if line.startswith("ERROR:")), lines[0])
    raise VendorError(
        f"cannot download {what} with pip ({cause}); check the network and pip's index, or set SNAPKV_LLAMA_SOURCE to "
        "the sdist file or to a folder unpacked from it"
    )


def unpack(sdist: Path, dest: Path, pin: Pin) -> None:
    """Only regular files of <top>/vendor/llama.cpp are written, with paths that stay below dest."""
    try:
        with tarfile.open(sdist, "r:gz") as tar:
            for member in tar:
                parts = member.name.split("/")
                # the sdist also holds its git directories
                if parts[1:] == [".git", "modules", "vendor", "llama.cpp", "HEAD"]:
                    check_commit(tar, member, sdist, pin)
                if parts[1:3] != ["vendor", "llama.cpp"] or not member.isfile() or parts[-1] == ".git":
                    continue
                if ".." in parts:
                    raise VendorError(f"{sdist} holds an unsafe path {member.name!r}; do not use this file")
                path = dest.joinpath(*parts[3:])
                path.parent.mkdir(parents=True, exist_ok=True)
                data = tar.extractfile(member)
                assert data is not None
                with data, path.open("wb") as out:
                    shutil.copyfileobj(data, out)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError, zlib.error) as e:
        raise VendorError(f"{sdist} is truncated or not a gzipped tar file ({e}); delete it and run again") from e


def check_commit(tar: tarfile.TarFile, member: tarfile.TarInfo, sdist: Path, pin: Pin) -> None:
    head = tar.extractfile(member)
    commit = head.read().decode("ascii", "replace").strip() if head else ""
    if re.fullmatch(r"[0-9a-f]{40}", commit) and commit != pin.commit:
        raise VendorError(f"{sdist} holds llama.cpp {commit}, {PIN} says {pin.commit}; correct the pin's commit")


def copy_files(src: Path, dest: Path, files: Iterator[str] | list[str]) -> None:
    for f in files:
        (dest / f).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(src / f, dest / f)


#
# patches
#


def apply_patch(patch: Path, tree: Path, extra: tuple[str, ...] = ()) -> str:
    """Apply strictly, return the tool's output. The tool sees no repository around the tree and no fuzz."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"LC_ALL": "C", "GIT_CEILING_DIRECTORIES": os.path.realpath(tree.parent)}
    if git := shutil.which("git"):
        cmd = [git, "-c", "apply.ignoreWhitespace=no", "-c", "core.autocrlf=false"]
        cmd += ["apply", "-p1", "--whitespace=nowarn", *extra, str(patch)]
    elif tool := shutil.which("patch"):
        cmd = [tool, "-p1", "-F0", "-f", "-N", "-i", str(patch)]
    else:
        raise VendorError("neither git nor patch is installed, one is needed to apply patches/; install git")
    run = subprocess.run(cmd, cwd=tree, env=env, capture_output=True, text=True, errors="replace")
    out = run.stdout + run.stderr
    if run.returncode:
        where = ""
        if m := re.search(r"patch failed: (\S+?):(\d+)", out):
            where = f"{m[1]}, hunk at line {m[2]}"
        elif m := re.search(r"patching file '?([^'\n]+?)'?\n(?:.*\n)*?.*Hunk #(\d+) FAILED at (\d+)", out):
            where = f"{m[1]}, hunk {m[2]} at line {m[3]}"
        else:
            where = next((line.strip() for line in out.splitlines() if line.strip()), f"exit status {run.returncode}")
        raise VendorError(
            f"patches/{patch.name} does not apply: {where}; rebase it onto this llama.cpp (see CONTRIBUTING.md)"
        )
    return out


def count_marks(path: Path) -> int:
    try:
        return sum(MARK.encode() in line for line in path.read_bytes().splitlines())
    except FileNotFoundError:
        return 0


def apply_patches(tree: Path, patches: list[Patch], folder: Path, origin: str) -> None:
    paths = sorted({f for p in patches for f in p.marks})
    for f in paths:
        if count_marks(tree / f):
            raise VendorError(f"{origin} is patched already ({f} has {MARK}...] lines); give upstream's own source")
    before = {f for f in walk(tree) if f.endswith(".orig")}
    for p in patches:
        apply_patch(folder / p.name, tree)
    for f in paths:  # GNU patch leaves them where a hunk moved
        if f"{f}.orig" not in before:
            (tree / f"{f}.orig").unlink(missing_ok=True)
    for f in paths:
        want, got = sum(p.marks.get(f, 0) for p in patches), count_marks(tree / f)
        if want != got:
            raise VendorError(
                f"{f} has {got} {MARK}...] lines after patching, the patches add {want}: "
                "they were not applied as written; check that git and patch work, and run again"
            )


#
# trees
#


def read_stamp(tree: Path) -> dict[str, object]:
    try:
        stamp = json.loads((tree / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(tree: Path, key: str, **more: object) -> None:
    (tree / STAMP).write_text(json.dumps({"key": key, **more}, indent=1) + "\n", encoding="utf-8")


def keep_times(new: Path, old: Path) -> list[str]:
    """Give the files that are the same in both the old time, so that they are not compiled again; return the others."""
    changed = []
    now = time.time()
    for f in walk(new):
        a, b = old / f, new / f
        if a.is_file() and filecmp.cmp(a, b, shallow=False):
            os.utime(b, ns=(a.stat().st_atime_ns, a.stat().st_mtime_ns))
        else:
            os.utime(b, (now, now))
            changed.append(f)
    return changed


def refuse_to_lose_edits(old: Path, changed: list[str], clean: Path, source_id: str) -> None:
    """A file of the old tree that is neither upstream's, nor patched by us, nor what comes now was edited."""
    stamp = read_stamp(old)
    patched = stamp.get("patched")
    if not isinstance(patched, dict) or stamp.get("source") != source_id:
        return
    for f in changed:
        if not (old / f).is_file():
            continue
        digest = sha256_file(old / f)
        if digest != patched.get(f) and not ((clean / f).is_file() and digest == sha256_file(clean / f)):
            raise VendorError(
                f"vendor/llama.cpp/{f} was edited and a new tree would replace it; "
                "save the edit as a patch (see CONTRIBUTING.md), or delete vendor/llama.cpp"
            )


def replace(new: Path, final: Path) -> None:
    gone = final.with_name(f".{final.name}.old")
    if final.exists():
        os.rename(final, gone)
    os.rename(new, final)
    shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as f:
        if fcntl:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                log(f"another configure holds {path}, waiting for it")
                fcntl.flock(f, fcntl.LOCK_EX)
        yield


def vendor(root: Path, given: str) -> bool:
    """Bring vendor/llama.cpp up to date, return whether anything had to be done."""
    pin, patches = read_pin(root), read_patches(root)
    final, pristine = root / "vendor/llama.cpp", root / "vendor/llama.cpp-pristine"

    with locked(root / "vendor/.lock"):
        source = find_source(given, pin, root)
        digests = [(p.name, hashlib.sha256(p.text).hexdigest()) for p in patches]
        inputs = [FORMAT, source.kind, source.id, pin.commit, digests]
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        if all(read_stamp(t).get("key") == key for t in (final, pristine)):
            return False

        for left in (root / "vendor").glob(".llama.cpp*"):  # of an interrupted run
            old = root / "vendor" / left.name[1 : -len(".old")]
            if left.name.endswith(".old") and not old.exists():
                os.rename(left, old)
            else:
                shutil.rmtree(left, ignore_errors=True)

        tmp = Path(tempfile.mkdtemp(prefix=".llama.cpp-", dir=root / "vendor"))
        try:
            tree, clean = tmp / "tree", tmp / "pristine"
            tree.mkdir()
            if source.kind == "tree":
                assert source.path is not None
                origin = str(source.path)
                log(f"copying {origin} (a folder: not verified against the pinned checksum)")
                copy_files(source.path, tree, walk(source.path))
            else:
                sdist = source.path or get_sdist(pin, tmp)
                origin = str(sdist)
                log(f"unpacking {origin} (sha256 verified)")
                unpack(sdist, tree, pin)
            if not is_llama_tree(tree):
                missing = next(f for f in REQUIRED if not (tree / f).is_file())
                raise VendorError(
                    f"{origin} is no tree of llama.cpp: {missing} is missing; give {pin.name}'s sdist {pin.version}"
                )

            patched = sorted({f for p in patches for f in p.marks})
            keep = [f for f in walk(tree) if f.startswith(PRISTINE) or f in patched]
            copy_files(tree, clean, keep)
            apply_patches(tree, patches, root / "patches", origin)

            changed = keep_times(tree, final)
            refuse_to_lose_edits(final, changed, clean, source.id)
            keep_times(clean, pristine)
            hashes = {f: sha256_file(tree / f) for f in patched if (tree / f).is_file()}
            write_stamp(clean, key)
            write_stamp(tree, key, source=source.id, patched=hashes)
            replace(clean, pristine)
            replace(tree, final)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    hooks = sum(sum(p.marks.values()) for p in patches)
    log(f"vendor/llama.cpp is llama.cpp {pin.commit[:9]} with {len(patches)} patches, {hooks} hooks")
    return True


def bindings(root: Path, given: str) -> str:
    """What to give to pip install for the bindings: the verified sdist, or the unpacked sdist, or the requirement."""
    pin = read_pin(root)
    source = find_source(given, pin, root)
    if source.kind == "tree":
        assert source.path is not None
        sdist_tree = source.path.parent.parent
        return str(sdist_tree) if (sdist_tree / "llama_cpp/llama_cpp.py").is_file() else f"{pin.name}=={pin.version}"
    if source.path:
        return str(source.path)
    with tempfile.TemporaryDirectory() as tmp, contextlib.redirect_stdout(sys.stderr):
        path = get_sdist(pin, Path(tmp))
    return str(path) if path.exists() else f"{pin.name}=={pin.version}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the project's folder")
    parser.add_argument("--source", default="", help="as SNAPKV_LLAMA_SOURCE, which is the default")
    parser.add_argument(
        "--bindings", action="store_true", help="only print what pip should install llama-cpp-python from"
    )
    args = parser.parse_args(argv)
    given = args.source or os.environ.get("SNAPKV_LLAMA_SOURCE", "")  # env: SNAPKV_LLAMA_SOURCE
    try:
        if args.bindings:
            print(bindings(args.root.resolve(), given))
        else:
            vendor(args.root.resolve(), given)
    except VendorError as e:
        print(f"snapkv-gguf: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        print(
            f"snapkv-gguf: {where}{e.strerror}; check permissions and free space of {args.root}/vendor", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("snapkv-gguf: interrupted, vendor/llama.cpp was not changed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
