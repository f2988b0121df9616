"""What every verb does with its console: text that it cannot show, warnings, tracebacks."""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import FedoptWarning

LOG = logging.getLogger("fedopt_flwr")
RUN_LOG = "run.log"
_GREEK = ("GREEK SMALL LETTER ", "GREEK CAPITAL LETTER ")
_PLAIN = str.maketrans(
    {"−": "-", "–": "-", "⁄": "/", "·": "*", "←": "<-", "√": "sqrt ", "∇": "grad ", "‖": "||"}
)
_SPELLED = "fedopt-spelled"


def errors_console() -> Console:
    """Return a console on standard error."""
    return Console(stderr=True, highlight=False)


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
    if name.startswith(_GREEK):
        letter = name.split()[-1]
        return letter.lower() if name.startswith(_GREEK[0]) else letter.capitalize()
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


def keep_tracebacks_off_the_console() -> None:
    """Let nothing of the log be shown unless `--debug` or a run's directory asks for it."""
    if not LOG.handlers:  # else Python shows warnings of the log on standard error
        LOG.addHandler(logging.NullHandler())
    LOG.propagate = False


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


class RunLog(logging.FileHandler):
    """What is logged while a run is at work, in a file of its folder; no file without a record."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / RUN_LOG, encoding="utf-8", delay=True)
        self.errors = "backslashreplace"
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a full disk, a moved folder: the run itself says it
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing, for the same reason."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def logging_to(log: RunLog) -> Iterator[None]:
    """Write to `log` all that the package logs meanwhile, tracebacks of failures among it."""
    level = LOG.level
    LOG.addHandler(log)
    LOG.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        LOG.setLevel(level)
        LOG.removeHandler(log)
        log.close()
