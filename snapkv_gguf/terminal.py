"""What the command shows besides its results: progress, and errors in one line."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import _lib

out = Console()
err = Console(stderr=True)

_GGML_LOG_LEVEL_ERROR = 4

# what llama.cpp logged as errors, and the callback that collects them: llama.cpp holds no reference to it
_llama_errors: list[str] = []
_llama_log: Any = None
_debug = False

# delivers an interruption again that came at a bad moment
_AGAIN_AFTER = 0.01  # seconds
_again: threading.Timer | None = None

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

    _llama_log = llama_cpp.llama_log_callback(_collect)
    llama_cpp.llama_log_set(_llama_log, None)


def _collect(level: int, text: bytes, _: Any) -> None:
    if level == _GGML_LOG_LEVEL_ERROR:
        _llama_errors.append(text.decode(errors="replace").strip())


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, but not where ctypes would swallow it: in a function that llama.cpp calls to log."""
    global _again
    if _again is not None:
        _again.cancel()
        _again = None
    while frame is not None:
        # ours, and with --debug the one of llama_cpp
        if frame.f_code is _collect.__code__ or frame.f_globals.get("__name__") == "llama_cpp._logger":
            _again = threading.Timer(_AGAIN_AFTER, signal.raise_signal, (number,))
            _again.daemon = True
            _again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C stops what runs in it, wherever it comes."""
    global _again
    # a handler that is not Python's stays, and so does none: a shell starts background jobs without
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
        if _again is not None:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if _again is not None:
            _again.cancel()
            _again = None


def _check_streams() -> None:
    # both are None if the file descriptor was closed when Python started
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    if sys.stdout is None:
        raise OSError("standard output is closed")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turns what goes wrong in a command into one line on standard error and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _interruptible():
                _check_streams()
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


def show(table: Table, markdown: bool = False) -> None:
    """A table on standard output, for a terminal or as Markdown; whole, however narrow the terminal is."""
    if not markdown:
        for column in table.columns:
            column.overflow = "fold"
        out.print(table, highlight=False)
        return
    rows = [[str(column.header) for column in table.columns]]
    rows.append(["---:" if column.justify == "right" else "---" for column in table.columns])
    rows += [[str(cell) for cell in row] for row in zip(*(column.cells for column in table.columns), strict=True)]
    typer.echo("\n".join(f"| {' | '.join(row)} |" for row in rows))


class Bar:
    """A progress bar on standard error, where that is a terminal; gone when it is done.

    Args:
        total: Steps.
        seconds: Whether the steps are the seconds that are expected: then the time left is shown, not their number.
    """

    def __init__(self, label: str, total: float, *, seconds: bool = False) -> None:
        count = TimeRemainingColumn(compact=True) if seconds else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
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

    def set_total(self, total: float) -> None:
        """The number of steps, once it is known."""
        self._progress.update(self._task, total=total)

    def advance(self, steps: float = 1, label: str | None = None) -> None:
        """So many steps more."""
        self._progress.update(self._task, advance=steps, description=label)
