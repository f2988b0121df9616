"""The `fedopt` command. Heavy packages are imported by the command that needs them."""

from __future__ import annotations

import sys

from rich.markup import escape

from ..errors import FedoptError
from .commands import app
from .console import (
    LOG,
    errors_console,
    keep_tracebacks_off_the_console,
    spell_what_cannot_be_shown,
    warnings_as_lines,
)
from .show import mute


def main() -> None:
    """Run the command: code 2 for bad input, 1 for a failed run, a traceback only for --debug."""
    spell_what_cannot_be_shown()
    keep_tracebacks_off_the_console()
    try:
        with warnings_as_lines():
            app()
    except BrokenPipeError:
        mute()
        sys.exit(1)
    except (FedoptError, OSError) as error:
        LOG.debug("the command failed", exc_info=error)
        for line in str(error).splitlines():
            errors_console().print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
        sys.exit(getattr(error, "exit_code", 1))
