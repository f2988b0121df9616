"""What a person sees of a federation of processes: who is connected and what each one does."""

from __future__ import annotations

from typing import Self

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ..config.run_config import RunConfig
from ..engines.stream import Roster
from .show import RunDisplay

_ROWS = 30  # clients in the live table
_NAMED = 10  # missing clients that are named


class FederationDisplay(RunDisplay):
    """A live table of clients under the progress bar on a terminal, lines of text elsewhere."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.output.directory)
        self.roster = Roster(self.say)
        self._federation = config.federation
        self._ids_are_numbers = config.federation.client_ids == "numbers"

    def __enter__(self) -> Self:
        super().__enter__()
        if self._console.is_terminal:
            live = Live(get_renderable=self._view, console=self._console, refresh_per_second=4)
            self._meanwhile.enter_context(live)
        return self

    def say(self, text: str) -> None:
        """Print a line; before the run starts also who is still missing."""
        self._print(text if self._num_rounds else f"{text} ({self._presence()})")

    def _presence(self) -> str:
        here = {i for i, client in self.roster.clients().items() if client.is_here}
        needed = self._federation.clients_to_start
        if self._federation.is_open:
            return f"connected: {len(here)}, a run starts with {needed}"
        text = f"{len(here)} of {needed} clients connected"
        few = 0 < needed - len(here) <= _NAMED
        if few and self._ids_are_numbers:
            missing = [str(i) for i in range(needed) if i not in here]
            text += f", missing {', '.join(missing)}"
        return text

    def _show_progress(self, progress: Progress) -> None:
        """It is part of the live view."""

    def _view(self) -> Group:
        return Group(*([self._progress] if self._progress else []), self._table())

    def _table(self) -> Table:
        clients = self.roster.clients()
        table = Table("client", "state", "round", "examples", "seconds", "", box=None)
        for client_id, client in list(clients.items())[:_ROWS]:
            seconds = None if client.seconds is None else f"{client.seconds:.2f}"
            facts = (client.round, client.num_examples, seconds)
            cells = ["" if fact is None else str(fact) for fact in facts]
            note = escape(client.note[:60])  # a client's own words are no markup
            table.add_row(escape(str(client_id)), client.state, *cells, note)
        if len(clients) > _ROWS:
            table.add_row("…", f"and {len(clients) - _ROWS} more")
        if not self._num_rounds:
            table.caption = self._presence()
        return table
