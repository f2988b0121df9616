"""A Ray cluster that runs already: is it there, has it room, can its machines train."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import ConfigError, FedoptError

_ANSWER_SECONDS = 5.0
_SAME_EVERYWHERE = ("fedopt-flwr", "flwr", "torch", "numpy")  # packages


@dataclass(frozen=True)
class Cluster:
    """A cluster at `address`, HOST:PORT of its head; this machine is one of it.

    `folder` is copied to every machine, where it is the working folder; None copies nothing.
    `check` is called on every machine that is to train and raises FedoptError for what is missing
    there; it has `patience_seconds`.
    """

    address: str
    folder: Path | None
    check: Callable[[], None]
    patience_seconds: float


@contextlib.contextmanager
def connected(cluster: Cluster, resources: dict[str, float]) -> Iterator[None]:
    """Connect this process to the cluster meanwhile; ConfigError says why clients cannot train
    there with `resources`, the `num_cpus` and `num_gpus` of one."""
    import ray

    _require_answer(cluster.address)
    environment = {"working_dir": str(cluster.folder)} if cluster.folder else {}
    try:
        ray.init(
            address=cluster.address,
            runtime_env=environment,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise ConfigError(_why_not_joined(cluster, error)) from error
    try:
        _require_all_can_train(cluster, _with_room(cluster.address, resources), resources)
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise ConfigError where no head of a cluster listens: `ray.init` would try for minutes."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2 as messages
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    with init_grpc_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = NodeInfoGcsServiceStub(channel).GetClusterId
        try:
            ask(messages.GetClusterIdRequest(), timeout=_ANSWER_SECONDS)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            raise ConfigError(
                f"--ray-address: no Ray cluster answers at {address!r} ({error.details()}); give "
                "the address that `ray start --head` printed, with its --port (6379), and look "
                "whether that machine is up"
            ) from error


def _why_not_joined(cluster: Cluster, error: Exception) -> str:
    text = " ".join(str(error).split())
    where = f"--ray-address: cannot use the Ray cluster at {cluster.address!r}: "
    if "ersion mismatch" in text:
        return f"{where}{text}; install the same versions on all machines, and restart the cluster"
    _, size, rest = text.partition("Package size")
    if size:
        return (
            f"{where}{str(cluster.folder)!r} is too large to travel, as own code does with its "
            f"folder: {size}{rest.partition('. ')[0]}; keep data elsewhere, or name it in a "
            ".rayignore there"
        )
    return f"{where}{text}; this machine must be one of the cluster (`ray start --address`)"


def _with_room(address: str, resources: dict[str, float]) -> dict[str, str]:
    """Return the names of the machines that have room for a client, by Ray's id; ConfigError for
    none."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
    names = {n["NodeID"]: f"{n['NodeManagerAddress']} ({n['NodeID'][:8]})" for n in nodes}
    having = {n["NodeID"]: {k: n["Resources"].get(k, 0) for k in asked} for n in nodes}
    found = {i: name for i, name in names.items() if all(having[i][k] >= asked[k] for k in asked)}
    if not found:
        seen = "; ".join(f"{n} has {_shown(having[i])}" for i, n in names.items())
        raise ConfigError(
            f"--cpus-per-client, --gpus-per-client: a client takes {_shown(asked)}, for which no "
            f"machine of the Ray cluster at {address!r} has room: {seen}; lower them, or add a "
            "machine"
        )
    return found


def _shown(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in amounts.items())


def _require_all_can_train(
    cluster: Cluster, names: dict[str, str], resources: dict[str, float]
) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    tasks = {}
    for node, name in names.items():
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        function = ray.remote(_seen_there).options(
            **resources, max_retries=0, scheduling_strategy=there
        )
        tasks[function.remote(cluster.check)] = name
    done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=cluster.patience_seconds)
    problems = []
    for task, name in tasks.items():
        found = _problem_of(task) if task in done else _late(cluster)
        problems += [f"--ray-address: machine {name}: {line}" for line in found.splitlines()]
    if problems:
        raise ConfigError(problems)


def _seen_there(check: Callable[[], None]) -> tuple[dict[str, str], str]:
    """Return the versions of a machine, and what it lacks."""
    try:
        check()
    except FedoptError as error:
        return _versions(), str(error)
    return _versions(), ""


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _SAME_EVERYWHERE}


def _problem_of(task: Any) -> str:
    """Return what keeps a machine from training, or ""."""
    import ray

    try:
        there, problem = ray.get(task)
    except ray.exceptions.RayError as error:
        text = str(error).strip().splitlines()
        return (
            f"cannot start a client: {text[-1] if text else type(error).__name__}; it needs this "
            "package as it is here, in the environment of its `ray start`"
        )
    unlike = [f"{k} {there[k]} (here {v})" for k, v in _versions().items() if there[k] != v]
    if unlike:
        return f"has {', '.join(unlike)}; install the same versions on all machines"
    return str(problem)


def _late(cluster: Cluster) -> str:
    return (
        f"no answer in {cluster.patience_seconds:g} s (federation.start_timeout); are its CPUs "
        "taken by other work on the cluster?"
    )
