"""The contract between a federated rule and everything that runs it.

A rule is a frozen set of hyperparameters with pure methods; its state is passed in and returned.
Tensors are flat float32 vectors of shape [size] (see `training.flat_model.FlatModel`); a leading
client axis is allowed, so rules reduce over the last dimension only. `delta` is new minus old
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from torch import Tensor

ClientId: TypeAlias = int | str
Arrays: TypeAlias = "dict[str, Tensor]"
ClientState: TypeAlias = "dict[str, Tensor]"

_TINY = 1.1754943508222875e-38  # smallest normal float32: 0/_TINY is 0, so u = 0 moves nothing
_LEAST_EXPONENT = -126  # of that number


class Objective(Protocol):
    """One client's F_i for one round; loss, weight decay and the choice of batches belong to it."""

    @property
    def num_examples(self) -> int: ...  # n_i

    @property
    def num_steps(self) -> int: ...  # K_i, the number of batches in this round

    def working_copy(self, x: Tensor) -> Tensor:
        """Return a copy of `x` that `gradient` reads without another copy; change it in place."""

    def batches(self) -> Iterator[Any]:
        """Yield this round's K_i minibatches, the same ones on every call."""

    def gradient(self, y: Tensor, batch: Any) -> Tensor:
        """Return ∇F(y; batch); the caller may write to it, and the next call overwrites it."""

    @property
    def last_loss(self) -> Tensor:
        """The loss of the minibatch whose gradient was taken last, at the point where it was
        taken, a tensor of one number; without weight decay."""

    def full_gradient(self, y: Tensor, num_examples: int = 0) -> Tensor:
        """Return the gradient at `y` over all n_i examples (or that many, drawn at random), new."""


@dataclass(frozen=True)
class Plan:
    """What is fixed before round 1; all that a rule may derive its step sizes from."""

    num_clients: int  # N
    clients_per_round: int  # S
    num_rounds: int  # T
    num_examples: Mapping[ClientId, int]  # n_i
    local_steps: Mapping[ClientId, int]  # K_i
    importance: Mapping[ClientId, float]  # p_i, sums to 1
    constant_rates: bool = True  # no schedule changes η or η_g
    steps_may_change: bool = False  # clients with other K_i may join

    @property
    def mean_local_steps(self) -> float:
        """K: the mean of K_i over all N clients."""
        return sum(self.local_steps.values()) / len(self.local_steps)


@dataclass(frozen=True)
class ServerState:
    """The plan and the server's vectors by name; "model" (x) is always among them."""

    plan: Plan
    vectors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def replace(self, **vectors: Tensor) -> ServerState:
        """Return this state with some vectors exchanged or added."""
        return replace(self, vectors={**self.vectors, **vectors})


@dataclass(frozen=True)
class Reply:
    """What one client sent in one round, with the weights the server gives it.

    The uploaded tensors are only lent to `server_start` and `server_update`: later rounds write to
    the same memory, so a state that is to hold one must copy it.
    """

    client_id: ClientId
    upload: Mapping[str, Tensor]
    weight: float  # w_i
    importance: float  # p_i
    num_steps: int  # K_i
    rank: int = 0  # place among those asked this round, in random order, from 0
    loss: float = 0.0  # mean over the client's minibatches


class Algorithm(BaseModel):
    """Base of all rules. Class attributes say what travels; methods stand in the order of a round.

    `broadcast_names` and `upload_names` are the arrays of a training round; `start_names` those of
    the start pass (round 0, all clients), empty for rules without one. They are properties where
    they depend on hyperparameters, else class attributes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    name: ClassVar[str]
    server_state: ClassVar[tuple[str, ...]] = ("model",)  # names of the server's vectors
    client_state: ClassVar[tuple[str, ...]] = ()  # names of what a client keeps between rounds
    # by server vector the client state whose mean Σ p_i it is, as c of the c_i. None: not said, and
    # the rule has no part in open federations if its clients keep state
    client_means: ClassVar[Mapping[str, str] | None] = None
    weighting: ClassVar[str] = "uniform"  # p_i where federation.weighting does not say
    unbiased_weights: ClassVar[bool] = False  # w_i = N p_i/S under uniform sampling, else p_i/Σp
    # clients take the gradient of one minibatch at two points, under the same dropout
    compares_points: ClassVar[bool] = False
    experimental: ClassVar[bool] = False  # said wherever the rule is shown
    # for `fedopt verify`: (own hyperparameters, other rule, its hyperparameters) that agree; like
    # every class attribute it is inherited, and None takes it back
    reduces_to: ClassVar[tuple[dict[str, Any], str, dict[str, Any]] | None] = None

    @property
    def broadcast_names(self) -> tuple[str, ...]:
        return ("model",)

    @property
    def upload_names(self) -> tuple[str, ...]:
        return ("delta",)

    @property
    def start_names(self) -> tuple[str, ...]:
        return ()

    @property
    def start_batches(self) -> int | None:
        """Minibatches of the start pass; None: K_i, as in every round."""
        return None

    def resolve(self, plan: Plan) -> Self:
        """Return a copy whose open hyperparameters (None) are computed from the plan."""
        return self

    def at_round(self, state: ServerState, number: int) -> Self:
        """Return the rule of one round, for rules whose step sizes follow from their state."""
        return self

    def report(self, state: ServerState, number: int) -> dict[str, float]:
        """Return numbers of a round, known before it, that its record should hold."""
        return {}

    def for_client(self, rank: int) -> Self:
        """Return the rule that the client at that place in the round's random order runs."""
        return self

    def init_server(self, x: Tensor, plan: Plan) -> ServerState:
        """Return the server's state before round 1 at the initial model `x`.

        Models (vectors whose name ends so) start at `x`, all other vectors at zero.
        """
        vectors = {n: x if n.endswith("model") else x.new_zeros(x.shape) for n in self.server_state}
        return ServerState(plan, vectors)

    def init_client(self, size: int) -> ClientState:
        """Return a client's state before it first takes part: zeros, by name."""
        import torch

        return {name: torch.zeros(size) for name in self.client_state}

    def client_start(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        """Run the start pass on one client: no movement, only what round 1 needs to know."""
        raise TypeError(f"{self.name}: has no start pass")

    def server_start(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Take in the start pass; a client without a reply counts with its initial state."""
        raise TypeError(f"{self.name}: has no start pass")

    def broadcast(self, state: ServerState) -> Arrays:
        """Return what travels down, by name."""
        return {name: state[name] for name in self.broadcast_names}

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        """Train on one client; return what travels up and the client's next state."""
        raise TypeError(f"{type(self).__name__}: client_update is missing; a rule must define it")

    def client_changes(self, state: ServerState, reply: Reply) -> Arrays:
        """Return by name what a client's round added to its states of `client_means`: with the
        `state` before the round the same numbers as on the client; nothing where one is left out.
        """
        names = {n: f"{n}_change" for n in (self.client_means or {}).values()}
        return {n: reply.upload[sent] for n, sent in names.items() if sent in reply.upload}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Take in the replies of a round, which are sorted by client id and never empty."""
        raise TypeError(f"{type(self).__name__}: server_update is missing; a rule must define it")

    def taken_back(self, state: ServerState) -> ServerState:
        """Return the state to continue with after a round whose result was not finite or too large
        and was undone; `state` is that of before it."""
        return state


def divided(vector: Tensor, number: float) -> Tensor:
    """Return vector / number, rounded alike on every device: a client's c_i and the server's c
    follow from it. By a Python number CUDA does not divide but multiplies with 1/number."""
    return vector / vector.new_full((), number)


def weighted_sum(terms: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return Σ weight · vector, added in the given order into one new vector."""
    first_weight, first = terms[0]
    total = first * first_weight
    for weight, vector in terms[1:]:
        total.add_(vector, alpha=weight)
    return total


def mean_gradient(x: Tensor, objective: Objective) -> Tensor:
    """Return the mean at `x` of the round's minibatch gradients, a new vector."""
    y = objective.working_copy(x)
    total = y.new_zeros(y.shape)
    for batch in objective.batches():
        total.add_(objective.gradient(y, batch))
    return total.div_(objective.num_steps)


def add_unit_(y: Tensor, u: Tensor, alpha: float) -> None:
    """y ← y + alpha · u/‖u‖ in place, over the last dimension; u is overwritten, u = 0 adds 0.

    float32 squares vanish below 1e-20 and overflow above 1e19: u is first scaled by a power of 2,
    which is exact.
    """
    import torch

    largest = torch.maximum(u.amax(-1, keepdim=True), -u.amin(-1, keepdim=True))
    exponent = torch.frexp(largest).exponent.clamp_(min=_LEAST_EXPONENT)
    u.mul_(torch.ldexp(torch.ones_like(largest), -exponent))
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    y.addcdiv_(u, norm.clamp_(min=_TINY), value=alpha)
