"""Run upstream's own server tests, those that can run offline, on several llama-servers, and compare what passes.

    python tests/server/upstream.py --binary ours=PATH --binary pristine=PATH --report build/upstream-tests.md

Needs upstream's requirements (requirements.txt in its folder of tests); make test-server-upstream installs them.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from snapkv_gguf import tiny

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "vendor/llama.cpp/tools/server/tests"

# not about the model, and slow or in need of a network, tools or a browser interface
IGNORED = ("test_mcp_servers.py", "test_tools_builtin.py", "test_router.py", "test_vision_api.py", "test_proxy.py")


def run(binary: Path, models: dict[str, Path], timeout: int) -> dict[str, str]:
    """Outcome by name of the test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_offline", "-p", "no:cacheprovider", "unit"]
        command += [f"--ignore=unit/{name}" for name in IGNORED] + [f"--junitxml={report}"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LLAMA_SERVER_BIN_PATH": str(binary),
            "LLAMA_ARG_THREADS": "1",
            **{f"UPSTREAM_MODEL_{name.upper()}": str(path) for name, path in models.items()},
        }
        subprocess.run(command, cwd=SUITE, env=environment, check=False, timeout=timeout, stdout=sys.stderr)
        outcomes = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcomes[f"{case.get('classname')}::{case.get('name')}"] = min(kinds) if kinds else "passed"
        return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--report", type=Path, help="write the list of what was run to this Markdown file")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for the tests of one binary")
    options = parser.parse_args()
    binaries = dict(binary.split("=", 1) for binary in options.binary)
    with tempfile.TemporaryDirectory() as folder:
        shape = tiny.Shape(n_ctx=2048, n_ff=64)
        models = {
            "llama": tiny.write_llama(Path(folder) / "llama.gguf", shape),
            "gemma3": tiny.write_gemma3(Path(folder) / "gemma3.gguf"),
            "bert": tiny.write_bert(Path(folder) / "bert.gguf"),
        }
        results = {name: run(Path(path).resolve(), models, options.timeout) for name, path in binaries.items()}
    names = sorted(set().union(*results.values()))
    differ = [name for name in names if len({outcomes.get(name) for outcomes in results.values()}) > 1]
    for binary, outcomes in results.items():
        print(binary, dict(collections.Counter(outcomes.values())))
    for name in differ:
        print("differs:", name, {binary: outcomes.get(name) for binary, outcomes in results.items()})
    if options.report:
        options.report.write_text(_markdown(results, names))
    return 1 if differ else 0


def _markdown(results: dict[str, dict[str, str]], names: list[str]) -> str:
    lines = [
        "# Upstream's server tests on both servers",
        "",
        "`make test-server-upstream` runs the tests in `vendor/llama.cpp/tools/server/tests` that need no network,",
        "with random tiny models in the place of upstream's: those that look for certain words fail on both.",
        "",
        f"Left out as a whole: {', '.join(f'`{name}`' for name in IGNORED)}.",
        "",
        f"| test | {' | '.join(results)} |",
        f"| --- | {' | '.join('---' for _ in results)} |",
    ]
    for name in names:
        cells = [outcomes.get(name, "-") for outcomes in results.values()]
        escaped = name.replace("|", "\\|")
        lines.append(f"| `{escaped}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
