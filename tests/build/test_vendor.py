"""cmake/vendor_llama.py and cmake/check_patches.py, on a small fake sdist that the tests make."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
import check_patches  # noqa: E402
import vendor_llama as v  # noqa: E402

LINES = "".join(f"    line({i});\n" for i in range(20))
FILES = {
    "CMakeLists.txt": "project(fake)\n",
    "include/llama.h": "void decode(void);\n",
    "src/CMakeLists.txt": "add_library(llama)\n",
    "src/graph.cpp": f"void build() {{\n{LINES}}}\n",
    "src/cache.cpp": f"bool rm() {{\n{LINES}}}\n",
    "ggml/CMakeLists.txt": "project(ggml)\n",
    "ggml/ggml.c": "int ggml;\n",
    ".git": "gitdir: ../../.git/modules/vendor/llama.cpp\n",
}
TABLE = "| file | function | intent |\n| --- | --- | --- |\n| `src/graph.cpp` | `build` | capture |\n"


def make_sdist(path: Path, files: dict[str, str], top: str = "fake-1.0") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in {f"{top}/vendor/llama.cpp/{f}": t for f, t in files.items()}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(text), 1_000_000_000
            tar.addfile(info, io.BytesIO(text.encode()))
        # as in the real one: files that are not llama.cpp's, and a git directory that makes git fail in this tree
        git = {
            "HEAD": "a" * 40,
            "config": "[core]\n\tworktree = ../../../../vendor/llama.cpp\n",
            "refs/x": "",
            "objects/x": "",
        }
        others = {"README.md": "", **{f".git/modules/vendor/llama.cpp/{f}": t for f, t in git.items()}}
        for name, text in others.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def make_patch(file: str, at: int, mark: str = "// [TAG_SNAPKV]", context: str = "line") -> str:
    return (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: A <a@b>\nDate: Tue, 1 Dec 2026 00:00:00 +0000\n"
        "Subject: [PATCH] hook\n\nBecause.\n"
        f"---\n {file} | 1 +\n 1 file changed, 1 insertion(+)\n\n"
        f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n@@ -{at + 2},2 +{at + 2},3 @@ void x() {{\n"
        f"     {context}({at});\n+    hook(); {mark}\n     {context}({at + 1});\n"
    )


class Project:
    """A project's folder with a pin, patches and a fake sdist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "vendor").mkdir(parents=True)
        (root / "patches").mkdir()
        self.sdist = make_sdist(root / "fake-1.0.tar.gz", FILES)
        self.pin(self.sdist)
        self.patch("0001-hooks", make_patch("src/graph.cpp", 3))
        (root / "patches/README.md").write_text(TABLE)

    def pin(self, sdist: Path) -> None:
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
        text = f'# pin\nname = "fake"\nversion = "1.0"\nsha256 = "{digest}"\ncommit = "{"a" * 40}" # llama.cpp\n'
        (self.root / "vendor/llama.cpp.toml").write_text(text)

    def patch(self, name: str, text: str) -> None:
        (self.root / f"patches/{name}.patch").write_text(text)

    def run(self, source: Path | str | None = None) -> int:
        return v.main(["--root", str(self.root), "--source", str(self.sdist if source is None else source)])

    def read(self, file: str, tree: str = "llama.cpp") -> str:
        return (self.root / "vendor" / tree / file).read_text()

    def times(self) -> dict[str, int]:
        tree = self.root / "vendor/llama.cpp"
        return {f: (tree / f).stat().st_mtime_ns for f in v.walk(tree)}

    def leftovers(self) -> list[str]:
        known = {"llama.cpp.toml", "llama.cpp", "llama.cpp-pristine", ".lock"}
        return [p.name for p in (self.root / "vendor").iterdir() if p.name not in known]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("SNAPKV_LLAMA_SOURCE", raising=False)
    monkeypatch.setenv("SNAPKV_GGUF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_RETRIES", "0")
    # as in real life the vendored tree lies in a git repository, where `git apply` likes to do nothing
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return Project(tmp_path / "project")


def one_line(capfd: pytest.CaptureFixture[str]) -> str:
    err = capfd.readouterr().err
    assert err.startswith("snapkv-gguf: ")
    assert err.count("\n") == 1
    return err


def test_unpacks_and_patches(project: Project) -> None:
    assert project.run() == 0
    assert "    line(3);\n    hook(); // [TAG_SNAPKV]\n    line(4);\n" in project.read("src/graph.cpp")
    assert project.read("src/graph.cpp", "llama.cpp-pristine") == FILES["src/graph.cpp"]
    assert project.read("ggml/ggml.c") == FILES["ggml/ggml.c"]
    assert set(project.times()) == set(FILES) - {".git"}
    assert not (project.root / "vendor/llama.cpp/.git").exists()
    assert project.leftovers() == []


def test_second_run_does_nothing(project: Project) -> None:
    assert project.run() == 0
    edited = project.root / "vendor/llama.cpp/src/cache.cpp"
    edited.write_text("edited by hand")
    times = project.times()
    assert project.run() == 0
    assert project.times() == times
    assert edited.read_text() == "edited by hand"


def test_changed_patch_keeps_the_times_of_other_files(project: Project) -> None:
    assert project.run() == 0
    for f in project.times():
        os.utime(project.root / "vendor/llama.cpp" / f, (2_000_000_000, 1_500_000_000))
    times = project.times()
    project.patch("0002-more", make_patch("src/cache.cpp", 5))
    assert project.run() == 0
    changed = {f for f, t in project.times().items() if t != times[f]}
    assert changed == {"src/cache.cpp"}  # not src/graph.cpp, which was patched again in the same way

    (project.root / "patches/0002-more.patch").unlink()
    assert project.run() == 0
    assert project.read("src/cache.cpp") == FILES["src/cache.cpp"]
    # newer than what was compiled from it, although the file in the archive is old
    assert project.times()["src/cache.cpp"] > times["src/cache.cpp"]


@pytest.mark.parametrize("inner", ["vendor/llama.cpp", ""])
def test_unpacked_tree_as_source(project: Project, capfd: pytest.CaptureFixture[str], inner: str) -> None:
    folder = project.root / "given"
    v.unpack(project.sdist, folder / inner, v.read_pin(project.root))
    assert project.run(folder) == 0
    assert "not verified" in capfd.readouterr().out
    assert "[TAG_SNAPKV]" in project.read("src/graph.cpp")
    (folder / inner / "ggml/ggml.c").write_text("int changed;\n")
    assert project.run(folder) == 0
    assert project.read("ggml/ggml.c") == "int changed;\n"


def test_environment_names_the_source(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPKV_LLAMA_SOURCE", str(project.sdist))
    assert project.run("") == 0


def test_cached_sdist_is_used(project: Project, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    project.sdist.rename(tmp_path / "cache/fake-1.0.tar.gz")
    assert project.run("") == 0


def test_download_is_verified_and_cached(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    served = make_sdist(tmp_path / "served.tar.gz", {**FILES, "ggml/ggml.c": "int evil;\n"})
    monkeypatch.setattr(v, "download", lambda pin, tmp: served)
    assert project.run("") == 1
    assert "wrong checksum" in one_line(capfd)
    assert not (tmp_path / "cache").exists()

    monkeypatch.setattr(v, "download", lambda pin, tmp: project.sdist)
    assert project.run("") == 0
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["fake-1.0.tar.gz"]


def fails_with(
    project: Project, capfd: pytest.CaptureFixture[str], *words: str, source: Path | str | None = None
) -> None:
    """One line with these words, exit status 1, and whatever was there before is still there."""
    before = project.times()
    capfd.readouterr()
    assert project.run(source) == 1
    line = one_line(capfd)
    for word in words:
        assert word in line
    assert project.leftovers() == []
    assert project.times() == before


def test_wrong_checksum(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    digest = hashlib.sha256(project.sdist.read_bytes()).hexdigest()
    make_sdist(project.sdist, {**FILES, "ggml/ggml.c": "int other;\n"})
    fails_with(project, capfd, "wrong checksum", str(project.sdist), digest, "unset SNAPKV_LLAMA_SOURCE")


def test_changed_pin(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert project.run() == 0
    pin = project.root / "vendor/llama.cpp.toml"
    pin.write_text(pin.read_text().replace('sha256 = "', 'sha256 = "0'))
    fails_with(project, capfd, "vendor/llama.cpp.toml: sha256 is", "correct the pin")


def test_changed_commit(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    pin = project.root / "vendor/llama.cpp.toml"
    pin.write_text(pin.read_text().replace("a" * 40, "b" * 40))
    fails_with(project, capfd, f"holds llama.cpp {'a' * 40}", "correct the pin")


def test_no_network(project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    fails_with(project, capfd, "cannot download fake==1.0", "check the network", "SNAPKV_LLAMA_SOURCE", source="")


def test_no_pip(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    fails_with(project, capfd, "has no pip", "SNAPKV_LLAMA_SOURCE", source="")


def test_patch_does_not_apply(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert project.run() == 0
    project.patch("0001-hooks", make_patch("src/graph.cpp", 3, context="other"))
    fails_with(
        project, capfd, "patches/0001-hooks.patch does not apply: src/graph.cpp, hunk at line 5", "CONTRIBUTING.md"
    )


@pytest.mark.skipif(subprocess.run(["sh", "-c", "command -v patch"]).returncode != 0, reason="no patch program")
@pytest.mark.parametrize("good", [True, False])
def test_patch_program_instead_of_git(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], good: bool
) -> None:
    which = v.shutil.which
    monkeypatch.setattr(v.shutil, "which", lambda name: None if name == "git" else which(name))
    project.patch("0001-hooks", make_patch("src/graph.cpp", 3, context="line" if good else "other"))
    if good:
        assert project.run() == 0
        assert project.read("src/graph.cpp").count("[TAG_SNAPKV]") == 1
    else:
        fails_with(project, capfd, "src/graph.cpp, hunk 1 at line 5")


def test_no_tool_to_patch(project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(v.shutil, "which", lambda name: None)
    fails_with(project, capfd, "neither git nor patch", "install git")


def test_patch_tool_that_does_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(v, "apply_patch", lambda *args: "")
    fails_with(project, capfd, "src/graph.cpp has 0 [TAG_SNAPKV...] lines", "add 1")


def test_patched_source(project: Project, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert project.run() == 0
    (project.root / "vendor/llama.cpp").rename(tmp_path / "given")
    fails_with(project, capfd, "patched already", "src/graph.cpp", source=tmp_path / "given")


def test_edited_tree_is_not_lost(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert project.run() == 0
    edited = project.root / "vendor/llama.cpp/src/graph.cpp"
    edited.write_text(edited.read_text() + "// mine\n")
    project.patch("0002-more", make_patch("src/cache.cpp", 5))
    fails_with(project, capfd, "vendor/llama.cpp/src/graph.cpp was edited", "save the edit as a patch")
    assert edited.read_text().endswith("// mine\n")


def test_not_a_llama_tree(project: Project, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fails_with(project, capfd, "is neither an sdist file nor a tree", source=tmp_path / "empty")
    fails_with(project, capfd, "does not exist", source=tmp_path / "missing")
    make_sdist(project.sdist, {f: t for f, t in FILES.items() if f != "include/llama.h"})
    project.pin(project.sdist)
    fails_with(project, capfd, "include/llama.h is missing")


def test_truncated_archive(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    data = project.sdist.read_bytes()
    project.sdist.write_bytes(data[: len(data) // 2])
    project.pin(project.sdist)
    fails_with(project, capfd, "truncated", "delete it and run again")


def test_unsafe_archive(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    make_sdist(project.sdist, {**FILES, "../../evil": "x"})
    project.pin(project.sdist)
    fails_with(project, capfd, "unsafe path")
    assert not list(project.root.rglob("evil"))


def test_no_write_permission(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def mkdtemp(**_: object) -> str:
        raise PermissionError(13, "Permission denied", "vendor/.llama.cpp-x")

    monkeypatch.setattr(v.tempfile, "mkdtemp", mkdtemp)
    fails_with(project, capfd, "Permission denied", "check permissions")


@pytest.mark.parametrize("step", ["unpack", "apply_patch", "write_stamp", "replace"])
def test_interrupted_run_is_not_taken_for_good(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    """Killed without a chance to clean up: whatever is left, the next run makes the right tree."""
    assert project.run() == 0
    project.patch("0002-more", make_patch("src/cache.cpp", 5))
    script = (
        f"import os, sys; sys.path.insert(0, {str(ROOT / 'cmake')!r}); import vendor_llama as v\n"
        f"original = v.{step}\n"
        f"def killed(*args, **kwargs): original(*args, **kwargs); os._exit(9)\n"
        f"v.{step} = killed\n"
        f"v.main(['--root', {str(project.root)!r}, '--source', {str(project.sdist)!r}])\n"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 9
    assert project.run() == 0
    assert project.read("src/cache.cpp").count("[TAG_SNAPKV]") == 1
    assert project.read("src/cache.cpp", "llama.cpp-pristine") == FILES["src/cache.cpp"]
    assert project.leftovers() == []


def test_two_runs_at_once(project: Project) -> None:
    cmd = [
        sys.executable,
        str(ROOT / "cmake/vendor_llama.py"),
        "--root",
        str(project.root),
        "--source",
        str(project.sdist),
    ]
    runs = [subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], outputs
    assert sum("unpacking" in out for out, _ in outputs) == 1
    assert project.read("src/graph.cpp").count("[TAG_SNAPKV]") == 1


def test_executable_bit(project: Project) -> None:
    assert project.run() == 0
    mode = (project.root / "vendor/llama.cpp/ggml/ggml.c").stat().st_mode
    assert stat.S_IMODE(mode) == 0o644


#
# check_patches
#


def test_good_patches(project: Project) -> None:
    assert project.run() == 0
    assert check_patches.check(project.root) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"From {'0' * 40}", f"From {'1' * 40}", "holds a commit"),
        ("[PATCH] hook", "[PATCH 1/2] hook", "does not begin with '[PATCH] '"),
        ("\nBecause.\n", "", "gives no reason"),
        ("     line(4);\n", "     line(4);\n-- \n2.39.5\n", "ends with git's version"),
        ("// [TAG_SNAPKV]", "// nothing", "src/graph.cpp is changed without"),
        ("@@ -5,2 +5,3 @@", "@@ -3,2 +3,3 @@", "succeeded at 5"),
    ],
)
def test_bad_patches(project: Project, old: str, new: str, message: str) -> None:
    patch = make_patch("src/graph.cpp", 3)
    assert old in patch
    project.patch("0001-hooks", patch.replace(old, new))
    assert project.run() == 0
    assert any(message in w for w in check_patches.check(project.root)), check_patches.check(project.root)


def test_hook_table(project: Project) -> None:
    project.patch("0002-more", make_patch("src/cache.cpp", 5))
    (project.root / "patches/README.md").write_text(TABLE + "| `src/gone.cpp` | `f` | nothing |\n")
    assert project.run() == 0
    assert check_patches.check(project.root) == [
        "patches/README.md: no row | `src/cache.cpp` | `rm` | ... |",
        "patches/README.md: `src/gone.cpp`, `f` holds no hook",
    ]


def test_hook_names(tmp_path: Path) -> None:
    source = tmp_path / "x.cpp"
    source.write_text(
        '#include "x.h" // [TAG_SNAPKV_A]\n\nclass cache : public base {\n    int x; // [TAG_SNAPKV_B]\n};\n\n'
        "static bool helper(int a);\n// [TAG_SNAPKV_C]\n"
        "view::view(\n        int a) {\n    hook(); // [TAG_SNAPKV_D]\n}\n"
        "const std::vector<int> & cache::get() const {\n    // [TAG_SNAPKV_E]\n}\n"
    )
    assert check_patches.hooks(source) == {"cache", "view", "get"}


def test_rows_of_the_hook_table(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "| file | where | what |\n| --- | --- | --- |\n"
        "| `a.cpp` | `f(int)` | calls `g()` |\n"
        "| `a.cpp` | `f(x)`, `h` | |\n"
    )
    assert check_patches.table(tmp_path / "README.md") == {("a.cpp", "f"), ("a.cpp", "h")}
