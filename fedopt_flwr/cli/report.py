"""`fedopt report`: any runs as one page of HTML, finished or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..files import write_whole
from .console import Debug
from .options import require_place

_KINDS = (".html", ".htm")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, finished or not; of comparisons."),
    ],
    output: Annotated[Path, typer.Option(help="Where the page goes: a name like x.html.")] = Path(
        "report.html"
    ),
    debug: Debug = False,
) -> None:
    """Make one page of HTML that needs no network: curves, clients, settings, a summary in words.

    Runs that differ in their seed alone become one curve with a band; the others are named by what
    differs.
    """
    require_place(output, _KINDS)
    from ..run.reading import run_folders

    folders = run_folders(runs)
    with needing_extra("fedopt report"):
        from ..run.report.page import MARK, Report
    _require_ours(output, MARK)
    page = Report(folders, runs).html()
    try:
        write_whole(output, page)
    except OSError as error:
        raise ConfigError(
            f"--output: cannot write {str(output)!r}: {error.strerror or error}; name another file"
        ) from error
    count = f"{len(folders)} runs" if len(folders) > 1 else "1 run"
    print(f"{count} in {output} ({len(page) / 1e6:.1f} MB); open it in a browser")


@contextlib.contextmanager
def needing_extra(verb: str) -> Iterator[None]:
    """Name the extra in a ConfigError where importing one of its packages fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{verb}: needs {error.name}, which is not installed; run "
            "`pip install 'fedopt-flwr[report]'`"
        ) from error


def _require_ours(output: Path, mark: bytes) -> None:
    """Raise ConfigError for a file that is there and was not written by this command."""
    if not output.is_file():
        return
    with contextlib.suppress(OSError), output.open("rb") as file:
        if file.read(len(mark)) in (mark, b""):
            return
    raise ConfigError(
        f"--output: got {str(output)!r}, which is there and is no page of `fedopt report`; name "
        "another file or remove it"
    )
