"""What every verb does with its console: text that it cannot show, warnings, tracebacks."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import io
import logging
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import FedoptWarning

LOG = logging.getLogger("fedopt_flwr")
RUN_LOG = "run.log"
_PLAIN = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "⁄": "/",
        "·": "*",
        "•": "*",
        "←": "<-",
        "√": "sqrt ",
        "∇": "grad ",
        "‖": "||",
    }
)
_SPELLED = "fedopt-spelled"


class SteadyOutput(io.TextIOBase):
    """Standard output or error whose failures, such as a full disk, cost lines but not the run.

    Once it can be written again, a line says so. A reader that is gone still raises.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO = getattr(stream, "rich_proxied_file", stream)
        self._failure: OSError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            if self._failure is not None:
                self._stream.flush()  # raises for as long as nothing can be written
                self._stream.write(f"(lines are missing here: {self._failure})\n")
                self._failure = None
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._failure is None:
                atexit.register(self._drop)
            self._failure = error
        return len(text)

    def _drop(self) -> None:
        """Let Python find nothing that it cannot write when it ends: its exit code would change."""
        atexit.unregister(self._drop)
        try:
            self._stream.flush()
        except OSError:
            mute(self._stream)


def errors_console() -> Console:
    """Return a console on standard error."""
    return steady_console(sys.stderr)


def steady_console(stream: TextIO) -> Console:
    """Return a console whose failures to write do not end a run."""
    return Console(file=cast(TextIO, SteadyOutput(stream)), highlight=False)


def mute(stream: TextIO | None = None) -> None:
    """Let standard output go nowhere, when its reader is gone, as after `| head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def spell_what_cannot_be_shown() -> None:
    """Let standard output and error write "eta" or "?" where their encoding has no "η"."""
    codecs.register_error(_SPELLED, _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_SPELLED)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_spell, error.object[error.start : error.end])), error.end


def _spell(character: str) -> str:
    name = unicodedata.name(character, "")
    if greek := re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", name):
        return greek[2].lower() if greek[1] == "SMALL" else greek[2].capitalize()
    plain = unicodedata.normalize("NFKD", character).translate(_PLAIN)
    if plain.isascii() or unicodedata.combining(character):
        return plain.encode("ascii", "ignore").decode()
    return "?"


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print this package's warnings as one line each, the same text once, and no other package's.

    Python itself would print the file and source line, and the same text again whenever some
    library touches its filters; and in a second run of the process it would print nothing.
    """
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = " ".join(str(message).splitlines())
        if issubclass(category, FedoptWarning) and text not in seen:
            seen.add(text)
            errors_console().print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)

    with warnings.catch_warnings():
        if not sys.warnoptions:  # what the user asked Python for counts
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", FedoptWarning)
        warnings.showwarning = show
        yield


def _show_tracebacks(debug: bool) -> bool:
    if debug:
        LOG.addHandler(logging.StreamHandler())
        LOG.setLevel(logging.DEBUG)
    return debug


Debug = Annotated[
    bool,
    typer.Option(
        "--debug", callback=_show_tracebacks, help="Show whole tracebacks on standard error."
    ),
]


class RunLog(logging.Handler):
    """What is logged while a run is at work, in a file of its folder; no file without a record."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._path = directory.absolute() / RUN_LOG
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self.format(record)}\n".encode(errors="backslashreplace")
        # a full disk, a moved folder: the run itself says it
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(text)


@contextlib.contextmanager
def logging_to(directory: Path) -> Iterator[RunLog]:
    """Write there all that the package logs meanwhile, tracebacks of failures among it."""
    log = RunLog(directory)
    level = LOG.level
    LOG.addHandler(log)
    LOG.setLevel(logging.DEBUG)
    try:
        yield log
    finally:
        LOG.setLevel(level)
        LOG.removeHandler(log)
