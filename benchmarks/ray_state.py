"""What client state costs that goes through the head of a Ray cluster, and in a shared folder.

    python benchmarks/ray_state.py HOST:PORT [FOLDER]

A model of about a million parameters, eight clients with control variates, all of them in every
round and one local step each, so that a round is mostly traffic. FOLDER must be one that all
machines share.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import Context

from fedopt_flwr import RunConfig
from fedopt_flwr.engines import ray_actors
from fedopt_flwr.engines.ray import run_on_ray
from fedopt_flwr.engines.ray_cluster import Cluster
from fedopt_flwr.run.flower_apps import client_of_node, serve_on_grid
from fedopt_flwr.run.hosts import HostedClient, states_in
from fedopt_flwr.run.run import Silent

CLIENTS, ROUNDS = 8, 12


class CountingPool(ray_actors.LastingPool):
    """Counts the bytes of the states that leave the head and come back to it."""

    there, back = 0, 0

    def submit(self, actor_fn: Any, job: Any) -> Any:
        CountingPool.there += state_bytes(job[3])
        return super().submit(actor_fn, job)

    def fetch_result_and_return_actor_to_pool(self, future: Any) -> Any:
        message, context = super().fetch_result_and_return_actor_to_pool(future)
        CountingPool.back += state_bytes(context)
        return message, context


def state_bytes(context: Context) -> int:
    records = context.state.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def client_on_disk(config: RunConfig, context: Context, *, folder: Path) -> HostedClient:
    client = client_of_node(config, context)
    client._states_of = states_in(folder)
    return client


def config_of(rule: str, folder: Path) -> RunConfig:
    return RunConfig(
        algorithm={"name": rule},
        federation={
            "num_clients": CLIENTS,
            "clients_per_round": CLIENTS,
            "num_rounds": ROUNDS,
        },
        training={"local_steps": 1},
        model={"options": {"hidden": [1000, 920]}},
        output={"directory": folder, "evaluate_every": ROUNDS},
    )


def measured(
    name: str,
    address: str,
    rule: str,
    out: Path,
    client_for: Callable[[RunConfig], Callable[[Context], HostedClient]],
) -> None:
    config = config_of(rule, out / name)
    CountingPool.there = CountingPool.back = 0
    run_on_ray(
        lambda grid, context: serve_on_grid(config, Silent(), grid) and None,
        client_for(config),
        num_clients=CLIENTS,
        cpus_per_client=1,
        gpus_per_client=0,
        cluster=Cluster(address, None, partial(config_of, rule, out), 600),
    )
    lines = (out / name / "rounds.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][2:]
    arrays = sum(r["uplink_bytes"] + r["downlink_bytes"] for r in records) / len(records)
    state = (CountingPool.there + CountingPool.back) / ROUNDS
    seconds = median(r["seconds"] for r in records)
    print(
        f"{name:24} {seconds:6.2f} s a round, messages {arrays / 1e6:6.1f} MB, "
        f"states through the head {state / 1e6:6.1f} MB",
        flush=True,
    )


if __name__ == "__main__":
    address = sys.argv[1]
    ray_actors.LastingPool = CountingPool  # type: ignore[misc]
    shared = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())
    out = Path(tempfile.mkdtemp())
    for again in (1, 2):
        for rule in ("scaffold_m", "fedavg"):
            name = f"{rule} in context {again}"
            measured(name, address, rule, out, lambda c: partial(client_of_node, c))
        on_disk = partial(client_on_disk, folder=shared / str(again))
        name = f"scaffold_m on disk {again}"
        measured(name, address, "scaffold_m", out, lambda c, f=on_disk: partial(f, c))
