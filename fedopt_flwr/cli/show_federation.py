"""What a person sees of a federation of processes: who is connected and what each one does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .show import RunDisplay

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Group
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table

    from ..algorithm import Algorithm, Plan
    from ..engines.stream import Roster
    from ..run.experiment import Experiment
    from ..run.result import Result

_ROWS = 30  # clients in the live table
_NAMED = 10  # missing clients that are named


class FederationDisplay(RunDisplay):
    """A live table of clients under the progress bar on a terminal, lines of text elsewhere."""

    roster: Roster

    def __init__(self, *, directory: Path | None) -> None:
        super().__init__(directory=directory)
        self._live: Live | None = None
        self._num_clients = 0
        self._training = False

    def watch(self, roster: Roster, num_clients: int) -> None:
        """Show these clients from now on."""
        self.roster = roster
        self._num_clients = num_clients
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._view, console=self._console, refresh_per_second=4
            )
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line; before the run starts also who is still missing."""
        waiting = "" if self._training else f" ({self._presence()})"
        self._print(f"{text}{waiting}")

    def _presence(self) -> str:
        here = [i for i, client in self.roster.clients().items() if client.num_examples is not None]
        text = f"{len(here)} of {self._num_clients} clients connected"
        missing = [i for i in range(self._num_clients) if i not in here]
        if 0 < len(missing) <= _NAMED and all(isinstance(i, int) for i in here):
            text += f", missing {', '.join(map(str, missing))}"
        return text

    def on_start(self, rule: Algorithm, plan: Plan, experiment: Experiment) -> None:
        self._training = True
        super().on_start(rule, plan, experiment)

    def _show_progress(self, progress: Progress) -> None:
        """It is part of the live view."""

    def _view(self) -> Group:
        from rich.console import Group

        return Group(*([self._progress] if self._progress else []), self._table())

    def _table(self) -> Table:
        from rich.table import Table

        clients = self.roster.clients()
        table = Table("client", "state", "round", "examples", "seconds", "", box=None)
        for client_id, client in list(clients.items())[:_ROWS]:
            table.add_row(
                str(client_id),
                client.state,
                _text(client.round),
                _text(client.num_examples),
                "" if client.seconds is None else f"{client.seconds:.2f}",
                client.note[:60],
            )
        if len(clients) > _ROWS:
            table.add_row("…", f"and {len(clients) - _ROWS} more")
        if not self._training:
            table.caption = self._presence()
        return table

    def print_result(self, result: Result, directory: Path | None) -> None:
        """Print the result as a table, and where the files are."""
        from .comparison import Targets, print_results, result_row

        row = result_row(result.summary["algorithm"], [result], Targets())
        print_results([row], Targets())
        self._print_place(result, directory)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
