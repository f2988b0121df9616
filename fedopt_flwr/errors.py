"""Every error that a user of this package can cause or has to act on.

FedoptError                what all of them are; `exit_code` is what the CLI ends with
├── ConfigError            a key, its value or their combination (2)
├── DataError              a data set that is missing, broken or cannot be divided (2)
├── ModelError             a module that cannot be trained as one vector (2)
├── MessageError           what came over the wire is not what was agreed (1)
└── RunError               the run started and could not continue (1)
"""

from __future__ import annotations

from collections.abc import Sequence


class FedoptError(Exception):
    """Root of the tree; its text names the field, the value seen, what is allowed, what to do."""

    exit_code = 1


class ConfigError(FedoptError):
    """One or more problems of a configuration, reported together."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(FedoptError):
    """A data set that is missing, broken or cannot be divided as asked."""

    exit_code = 2


class ModelError(FedoptError):
    """A module that cannot be trained as one float32 vector."""

    exit_code = 2


class MessageError(FedoptError):
    """A message that does not hold the named arrays that were agreed."""


class RunError(FedoptError):
    """A run that started and could not continue."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came; it ends what Ctrl-C ends."""


class EndOfRun(Exception):
    """Who hears of a round ends the run with it, as if it were the last one."""


class FedoptWarning(UserWarning):
    """Something that works but is probably not what was meant."""
