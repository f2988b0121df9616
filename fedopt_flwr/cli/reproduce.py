"""`fedopt reproduce`: the papers' claims on what two cores can run."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import ConfigError
from ..problems import unknown_name
from .console import Debug


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="R1 to R10; all if left out.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    debug: Debug = False,
) -> None:
    """Try the papers' claims (R1 to R10) and write docs/reproduction.md, in a clone.

    What examples/papers/results.json holds is not run again; all together take hours.
    """
    from .claims import STUDIES

    known = [*STUDIES, "R10"]
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise ConfigError([unknown_name("fedopt reproduce", name, known) for name in unknown])
    from .reproduction import reproduce_studies

    reproduce_studies(names or known, jobs)
