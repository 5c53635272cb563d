"""What the command shows besides its results: progress, and errors in one line."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import _lib

out = Console()
err = Console(stderr=True)

_GGML_LOG_LEVEL_ERROR = 4

# what llama.cpp logged as errors, and the callback that collects them: llama.cpp holds no reference to it
_llama_errors: list[str] = []
_llama_log: Any = None
_debug = False

P = ParamSpec("P")


def set_debug(debug: bool) -> None:
    """Tracebacks and llama.cpp's log, or one line for an error, with the first one that llama.cpp logged."""
    global _debug, _llama_log
    _debug = debug
    _llama_errors.clear()
    if debug:
        return
    _lib.load()
    import llama_cpp

    def collect(level: int, text: bytes, _: Any) -> None:
        if level == _GGML_LOG_LEVEL_ERROR:
            _llama_errors.append(text.decode(errors="replace").strip())

    _llama_log = llama_cpp.llama_log_callback(collect)
    llama_cpp.llama_log_set(_llama_log, None)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turns what goes wrong in a command into one line on standard error and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # else Python complains when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as error:
            if _debug:
                raise
            cause = f" (llama.cpp: {_llama_errors[0]})" if _llama_errors else ""
            print(f"snapkv: {str(error) or type(error).__name__}{cause}".replace("\n", " "), file=sys.stderr)
            raise typer.Exit(1) from None

    return run


def show(table: Table, markdown: bool) -> None:
    """A table on standard output, for a terminal or as Markdown."""
    if not markdown:
        out.print(table)
        return
    rows = [[str(column.header) for column in table.columns]]
    rows.append(["---:" if column.justify == "right" else "---" for column in table.columns])
    rows += [[str(cell) for cell in row] for row in zip(*(column.cells for column in table.columns), strict=True)]
    typer.echo("\n".join(f"| {' | '.join(row)} |" for row in rows))


class Bar:
    """A progress bar on standard error, where that is a terminal; gone when it is done."""

    def __init__(self, label: str, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self._task = self._progress.add_task(label, total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total`` steps."""
        self._progress.update(self._task, completed=done)
        if done == total:
            self._progress.stop()

    def advance(self) -> None:
        """One step more."""
        self._progress.advance(self._task)
