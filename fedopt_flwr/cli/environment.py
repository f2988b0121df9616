"""Verbs whose every option can also be given by a variable of the environment, as in containers."""

from __future__ import annotations

import os
import warnings
from typing import Any

import click
from click.core import ParameterSource
from typer.core import TyperCommand

from ..errors import FedoptWarning
from ..problems import unknown_name

_PREFIX = "FEDOPT_"
_DATA = "FEDOPT_DATA"
_FROM_LAUNCH = {"FEDOPT_JOIN_TOKEN", "FEDOPT_LEASH"}


class EnvironmentCommand(TyperCommand):
    """Reads an option that is not on the command line from FEDOPT_ and its name.

    One that can be repeated takes a line of the variable each time; what the command line adds to
    it comes after and so wins.
    """

    def __init__(self, name: str | None, **more: Any) -> None:
        super().__init__(name, **more)
        for parameter in self.params:
            option = parameter.opts[0].lstrip("-")
            parameter.envvar = _PREFIX + option.replace("-", "_").upper()
            if isinstance(parameter, click.Option):
                parameter.show_envvar = True
                if parameter.multiple:
                    parameter.type, parameter.callback = _Lines(), _environment_first

    def invoke(self, ctx: click.Context) -> Any:
        """Warn of variables that no verb reads, which would have no effect, and run the verb."""
        verbs = ctx.find_root().command
        commands = verbs.commands.values() if isinstance(verbs, click.Group) else []
        known = {str(p.envvar) for command in commands for p in command.params if p.envvar}
        known.add(_DATA)
        for name in os.environ:
            if name.startswith(_PREFIX) and name not in known | _FROM_LAUNCH:
                text = unknown_name("environment", name, known)
                warnings.warn(text, FedoptWarning, stacklevel=2)
        return super().invoke(ctx)


class _Lines(click.ParamType[str]):
    """Text, of which a variable of the environment holds a line each time."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        return [line.strip() for line in rv.splitlines() if line.strip()]


def _environment_first(
    context: click.Context, parameter: click.Parameter, value: list[str] | None
) -> list[str] | None:
    if context.get_parameter_source(str(parameter.name)) is not ParameterSource.COMMANDLINE:
        return value
    return [*(parameter.value_from_envvar(context) or []), *(value or [])]
