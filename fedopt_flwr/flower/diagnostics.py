"""What `output.diagnostics` adds to the record of a round.

A round's movement is measured on the server, of what its clients sent. f and ∇f are sums over the
data of all clients: each is asked for its part at the server's model, in every engine alike.
docs/diagnostics.md has each number's formula and what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from flwr.common import FitRes
from torch import Tensor

from ..algorithm import Algorithm, ClientId, Reply, ServerState, weighted_sum
from ..rounds.record import RoundRecord
from ..rounds.soundness import norm
from ..training.flat_model import Layout
from .messages import Scalar
from .replies import accept

CONTROL_NORM = "control_norm"  # ‖c_i‖ in a client's report
_AT_ONCE = 16  # clients asked at the same time: the server holds as many gradients
_HELD_OUT = {"test_loss": "loss", "test_accuracy": "accuracy"}  # in `each_client`, by metric

Ask = Callable[[Sequence[ClientId]], Mapping[ClientId, FitRes | Exception]]


class Diagnostics:
    """Fills a record's `drift`, `control_norm`, `gradient_cosine`, `global_train_loss`,
    `gradient_norm` and `each_client`.

    It keeps ∇f at the server's model from the round that measured it to the next, over a resumed
    run too: `kept` goes into a checkpoint, and comes out of it.
    """

    def __init__(self, weight_decay: float, kept: Mapping[str, Tensor]) -> None:
        self._weight_decay = weight_decay
        self._gradient = kept.get("gradient")

    @property
    def kept(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name."""
        return {} if self._gradient is None else {"gradient": self._gradient}

    def note_movement(
        self, record: RoundRecord, before: ServerState, after: ServerState, replies: Sequence[Reply]
    ) -> None:
        """Note what a round did that moved the server's state.

        Δ_i is the "delta" that client i sent, its model after the local work minus the one that it
        was given; Δ̄ = Σ w_i Δ_i / Σ w_i, with the weights w_i that the rule is given. `drift` is
        the plain mean of ‖Δ_i − Δ̄‖ over these replies, None where the rule sends no "delta".
        """
        gradient, self._gradient = self._gradient, None
        if gradient is not None:
            record.gradient_cosine = _cosine(before["model"] - after["model"], gradient)
        deltas = {r.client_id: r.upload["delta"] for r in replies if "delta" in r.upload}
        if not deltas:
            return
        total = sum(r.weight for r in replies)
        mean = weighted_sum([(r.weight / total, deltas[r.client_id]) for r in replies])
        distances = []
        for client_id, delta in deltas.items():
            distances.append(norm(delta - mean))
            _note(record, client_id, update_norm=norm(delta), drift=distances[-1])
        record.drift = math.fsum(distances) / len(distances)

    def note_state(
        self,
        record: RoundRecord,
        rule: Algorithm,
        state: ServerState,
        versions: Mapping[ClientId, int],
    ) -> None:
        """Begin `each_client`, with all clients of the plan. Note ‖c‖, c being the first of the
        rule's `client_means`, what clients found on their held-out examples, and for how many
        rounds each has been away, 0 if it counted in this one: `versions` are the rounds of each
        client's last counted reply.
        """
        record.each_client = {str(i): {} for i in state.plan.num_examples}
        for name in list(rule.client_means or {})[:1]:
            record.control_norm = norm(state[name])
        for client_id, version in versions.items():
            _note(record, client_id, rounds_away=record.round - version)
        for held in (record.on_clients or {}).get("clients", []):
            values = held["own_values"] or held["values"]
            found = {key: values[name] for key, name in _HELD_OUT.items() if name in values}
            _note(record, held["client"], **found)

    def measure(
        self,
        record: RoundRecord,
        state: ServerState,
        is_free: Callable[[ClientId], bool],
        ask: Ask,
        asked_for: Mapping[str, Scalar],
    ) -> None:
        """Ask all clients of the plan for f_i and ∇f_i at the server's model; note Σ p_i f_i,
        without weight decay as every loss that is recorded, and ‖∇f‖, with it.

        Sums are in the order of client ids. If one is away or does not answer, neither has a value,
        as a sum over the others is of another function; who was not asked yet is not asked. Bytes
        are counted. Vectors are not: V(t) is that of the rule.
        """
        value, gradient = 0.0, torch.zeros_like(state["model"])
        shares = state.plan.importance
        away = [i for i in shares if not is_free(i)]
        if away:
            others = f", as are {len(away) - 1} others" if len(away) > 1 else ""
            why = f"away, or at work for an earlier round{others}; f and its gradient have no value"
            record.errors.append({"client": away[0], "phase": "diagnose", "error": why})
            return
        vectors = record.uplink_vectors, record.downlink_vectors
        for group in _groups(list(shares)):
            # no name here holds the answers, so that they are gone before the next ones come
            losses = _added(gradient, ask(group), {i: shares[i] for i in group}, record, asked_for)
            for i, loss in losses.items():
                value += shares[i] * loss
            if len(losses) < len(group):
                break
        else:
            gradient.add_(state["model"], alpha=self._weight_decay)
            record.global_train_loss, record.gradient_norm = value, norm(gradient)
            self._gradient = gradient
        record.uplink_vectors, record.downlink_vectors = vectors


def _groups(ids: Sequence[ClientId]) -> Iterator[Sequence[ClientId]]:
    return (ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE))


def _added(
    gradient: Tensor,
    answers: Mapping[ClientId, FitRes | Exception],
    shares: Mapping[ClientId, float],
    record: RoundRecord,
    asked_for: Mapping[str, Scalar],
) -> dict[ClientId, float]:
    """Add p_i ∇f_i to the gradient and note ‖c_i‖, for each client whose answer is of use; return
    their f_i. `shares` are p_i of those asked."""
    layout = {"gradient": Layout(gradient.numel(), "float32")}
    uploads = accept(list(shares), answers, dict.fromkeys(shares, layout), record, asked_for)
    for i, upload in uploads.items():
        gradient.add_(upload.arrays["gradient"], alpha=shares[i])
        answer = answers[i]
        told = answer.metrics.get(CONTROL_NORM) if isinstance(answer, FitRes) else None
        if isinstance(told, float) and 0 <= told < math.inf:
            _note(record, i, control_norm=told)
    return {i: upload.loss for i, upload in uploads.items()}


def _note(record: RoundRecord, client_id: ClientId, **values: float) -> None:
    if record.each_client is not None and str(client_id) in record.each_client:
        record.each_client[str(client_id)].update(values)


def _cosine(direction: Tensor, gradient: Tensor) -> float | None:
    """Return the cosine of the angle between two vectors; None where one of them is 0."""
    one, other = direction.double(), gradient.double()
    lengths = float(torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other))
    if not 0 < lengths < math.inf:
        return None
    return max(-1.0, min(1.0, float(one @ other) / lengths))
