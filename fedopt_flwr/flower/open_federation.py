"""Open federations: clients come late, leave and come back, and every mean stays a mean.

Where N is fixed, the server's c = Σ p_i c_i follows from sums alone. Once clients come and leave,
or weigh more or less than before, it must know each c_i: the `Ledger` keeps them. Before a round
for which the clients or their p_i have changed, c is formed anew as Σ p_i c_i over those that are
known then; a round itself moves c and each c_i by the same change.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Set
from pathlib import Path

from torch import Tensor

from ..algorithm import Algorithm, ClientId, Plan, ServerState
from ..config.sections import FederationSection
from ..errors import ConfigError, FedoptWarning, MessageError, RunError
from ..rounds.participation import CLUSTERS
from ..rounds.record import RoundRecord, Upload
from .members import Members
from .messages import NEVER
from .state import BEGINS_ANEW, DiskStates, MemoryStates

FOLDER = "client-terms"  # in a run's folder


class Ledger:
    """The server's copies of the client states that `rule.client_means` names, each under the round
    in which it last changed, as the clients keep their own.

    So a round that is taken back and a run that is resumed find the copies that count.
    """

    def __init__(self, rule: Algorithm, states: MemoryStates | DiskStates) -> None:
        self._rule = rule
        self._means = dict(rule.client_means or {})  # client states by server vectors
        self._states = states

    def begin(self, client_id: ClientId, number: int, upload: Upload) -> None:
        """Keep what a client's start pass sent: its states themselves."""
        own = {name: upload.arrays[name].clone() for name in self._means.values()}
        self._save(client_id, number, own)

    def add(
        self,
        changes: Mapping[str, Tensor],
        state: ServerState,
        client_id: ClientId,
        version: int,
        number: int,
        kept: Collection[int],
    ) -> None:
        """Keep, under the round `number`, the copies of `version` moved by `changes`, and of the
        older ones those of the versions `kept`."""
        before = self._copies(client_id, version, state)
        own = {n: a + changes[n] if n in changes else a.clone() for n, a in before.items()}
        self._states.prune(client_id, kept)
        self._save(client_id, number, own)

    def keep_only(self, counted: Set[tuple[ClientId, int]]) -> None:
        """Drop all copies but these, by client and version."""
        self._states.keep_only(counted)

    def _save(self, client_id: ClientId, number: int, own: dict[str, Tensor]) -> None:
        try:
            self._states.save(client_id, number, own)
        except OSError as error:
            raise RunError(
                f"output.directory: the copy of client {client_id}'s state cannot be written into "
                f"{FOLDER!r}: {error}; free some space and continue with --resume"
            ) from error

    def means(self, state: ServerState, versions: Mapping[ClientId, int]) -> dict[str, Tensor]:
        """Return Σ p_i c_i, over the clients of the plan, for each of the server's means."""
        means: dict[str, Tensor] = {}
        for i, share in state.plan.importance.items():  # one client's copies at a time
            own = self._copies(i, versions.get(i, NEVER), state)
            for vector, name in self._means.items():
                if vector in means:
                    means[vector].add_(own[name], alpha=share)
                else:
                    means[vector] = own[name] * share
        return means

    def _copies(self, client_id: ClientId, version: int, state: ServerState) -> dict[str, Tensor]:
        if version == NEVER:
            initial = self._rule.init_client(state["model"].numel())
            return {name: initial[name] for name in self._means.values()}
        try:
            return self._states.load(client_id, version)
        except MessageError as error:
            raise RunError(
                f"the server's own copy of a client's state cannot be used: {error}; put the "
                f"folder {FOLDER!r} of the run back as it was, or start a new run"
            ) from error


class OpenFederation:
    """Who of those that ever came takes part, from round to round."""

    def __init__(self, federation: FederationSection, seen: Mapping[ClientId, int]) -> None:
        self._forget_after = federation.forget_after
        self.seen = dict(seen)  # the last round before which each known client was there
        self._anew: set[ClientId] = set()  # have lost their state and want to begin anew
        self._notices: dict[ClientId, dict[str, int]] = {}  # for those that must yet hear of it

    def present(self, known: Collection[ClientId]) -> list[ClientId]:
        """Return those of a run's clients that were there before its last round."""
        last = max(self.seen.values(), default=0)
        return [i for i in known if self.seen.get(i, last) == last]

    def hear(self, record: RoundRecord) -> None:
        """Note who lost its state in a round and wants to begin anew; one that counted in it has
        saved a state under its number, and is asked again."""
        errors = [error for error in record.errors if error["phase"] == "train"]
        anew = {error["client"] for error in errors if BEGINS_ANEW in str(error["error"])}
        self._anew |= anew - {*record.clients}

    def changes(self, number: int, members: Members, plan: Plan) -> dict[str, list[ClientId]]:
        """Return who joins before a round, is forgotten, has more or fewer examples than before, or
        begins anew; only what there is."""
        known, here = plan.num_examples, members.here
        for i in known:
            self.seen.setdefault(i, number - 1)
        self.seen |= dict.fromkeys(here, number)
        limit = self._forget_after
        found = {
            "joined": [i for i in here if i not in known],
            "forgotten": [i for i in known if limit and number - self.seen[i] > limit],
            "resized": [i for i in here if members.num_examples[i] != known.get(i)],
            "restarted": [i for i in here if i in self._anew and i in known],
        }
        found["resized"] = [i for i in found["resized"] if i in known]
        self._anew.clear()
        for i in found["forgotten"]:
            del self.seen[i]
        for i in found["resized"]:
            self._notices[i] = {"examples_before": known[i], "examples_since": number}
            warnings.warn(
                f"client {i}: holds {members.num_examples[i]} examples and held {known[i]}; its "
                f"new weight counts from round {number} on",
                FedoptWarning,
                stacklevel=2,
            )
        return {what: ids for what, ids in found.items() if ids}

    def notice(self, client_id: ClientId) -> dict[str, int]:
        """Return, once, what a client must be told of its number of examples."""
        return self._notices.pop(client_id, {})

    def renewed(self, state: ServerState, plan: Plan) -> ServerState:
        """Return the state under another plan; without clusters, where those are of other clients
        or other weights."""
        vectors = dict(state.vectors)
        if plan.num_examples != state.plan.num_examples:
            vectors.pop(CLUSTERS, None)
        return ServerState(plan, vectors)


def warn_of_theory(rule: Algorithm) -> None:
    """Warn that what is proved of a rule with means over clients is proved for a fixed N."""
    if rule.client_means:
        warnings.warn(
            f"{rule.name}: its theory has the same N clients from the first round to the last; in "
            "an open federation its means are over the clients known, formed anew when they change",
            FedoptWarning,
            stacklevel=2,
        )


def make_ledger(rule: Algorithm, run_folder: Path | None) -> Ledger | None:
    """Return where an open federation keeps what it must know of each client, or None if that is
    nothing; without a folder it is memory. ConfigError for a rule that does not say."""
    means = rule.client_means
    if means is None and rule.client_state:
        raise ConfigError(
            f"federation.num_clients: got 'open'; the clients of {rule.name!r} keep "
            f"{list(rule.client_state)}, and the rule does not say which of the server's vectors "
            "are means of them; set its client_means (to {} for none), or give a number"
        )
    if not means:
        return None
    for what, names, known in (
        ("names server vectors", means.keys(), rule.server_state),
        ("names client states", means.values(), rule.client_state),
        ("needs uploads of the start pass", means.values(), rule.start_names or means.values()),
    ):
        if unknown := sorted({*names} - {*known}):
            raise ConfigError(
                f"{rule.name}: its client_means {what} {unknown}; the rule has {sorted(known)}; "
                "make the two agree"
            )
    return Ledger(rule, MemoryStates() if run_folder is None else DiskStates(run_folder / FOLDER))
