"""The `fedopt` command. Heavy packages are imported by the command that needs them."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from ..errors import FedoptError, FedoptWarning
from .commands import app
from .show import errors_console, mute


def main() -> None:
    """Run the command: code 2 for bad input, 1 for a failed run, a traceback for neither."""
    warnings.showwarning = _show_warning
    warnings.simplefilter("ignore", DeprecationWarning)  # of other packages' imports
    try:
        app()
    except BrokenPipeError:
        mute()
        sys.exit(1)
    except (FedoptError, OSError) as error:
        for line in str(error).splitlines():
            errors_console().print(f"[bold red]error:[/] {_escaped(line)}", soft_wrap=True)
        sys.exit(getattr(error, "exit_code", 1))


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FedoptWarning):
        errors_console().print(f"[yellow]warning:[/] {_escaped(str(message))}", soft_wrap=True)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
