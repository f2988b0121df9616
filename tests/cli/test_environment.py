"""Options of `fedopt server` and `fedopt client` from the environment, as containers give them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import FEDOPT, QUICK, Ended, InProcess, refused

from fedopt_flwr import ConfigError

VARIABLES = {
    "server": "CONFIG ADDRESS ALGORITHM SET CERTIFICATE KEY CLIENT_CA REVOKED INSECURE RESUME "
    "CONTINUE HEALTH METRICS DEBUG",
    "client": "CONFIG SERVER CLIENT_ID CLIENT_IDS ONE_OF STATE_DIR SET CA CERTIFICATE KEY INSECURE "
    "HEALTH METRICS NO_EVALUATION STATE_LOST DEBUG",
}
Started = Callable[..., list[Any]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, in_process: InProcess) -> Started:
    """Returns what a verb would start with: configuration, then its own arguments."""
    given: list[Any] = []

    def take(*arguments: Any, **more: Any) -> None:
        given[:] = [*arguments, *more.values()]
        raise ConfigError("nothing is started")

    monkeypatch.setattr("fedopt_flwr.run.serve.serve", take)
    monkeypatch.setattr("fedopt_flwr.run.hosts.serve_clients", take)

    def start(*arguments: str, **variables: str) -> list[Any]:
        for name, value in variables.items():
            monkeypatch.setenv(f"FEDOPT_{name}", value)
        refused(in_process(*arguments), "error: nothing is started")
        return given

    return start


@pytest.mark.parametrize("verb", VARIABLES)
def test_help_names_a_variable_for_every_option(
    verb: str, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = in_process(verb, "--help").stdout
    named = sorted(
        line.partition("env var: FEDOPT_")[2].partition("]")[0]
        for line in shown.split("\n")
        if "env var" in line
    )
    assert named == sorted(VARIABLES[verb].split())


def test_a_client_starts_from_variables_alone(started: Started, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("[training]\nthreads = 3\n")
    config, ids, state, where, *_ = started(
        "client",
        CONFIG="site.toml",
        SERVER="fl.example.org:443",
        CLIENT_IDS="0-2",
        STATE_DIR="state",
        INSECURE="1",
        SET="transport.keep_alive_seconds=9",
    )
    assert (config.training.threads, config.transport.keep_alive_seconds) == (3, 9)
    assert (ids, state, where.address) == ([0, 1, 2], Path("state"), "fl.example.org:443")
    assert where.tls is None


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    started: Started, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("[federation]\nseed = 1\nnum_rounds = 2\nnum_clients = 6\n")
    lines = "\n federation.num_rounds=3\n\ndata.options.note=a b\nfederation.num_clients=7\n"
    variables = {"SET": lines, "ADDRESS": "127.0.0.1:1", "INSECURE": "true"}
    own = ["--set", "federation.num_clients=8", "--address", "127.0.0.1:2"]
    config, address, *_ = started("server", "run.toml", *own, **variables)
    federation = config.federation
    assert (federation.seed, federation.num_rounds, federation.num_clients) == (1, 3, 8)
    assert config.data.options == {"note": "a b"}
    assert address == "127.0.0.1:2"
    config, address, *_ = started("server", "run.toml", ALGORITHM="fedavg")
    assert (config.federation.num_clients, address) == (7, "127.0.0.1:1")
    assert config.algorithm.name == "fedavg"


@pytest.mark.parametrize(
    ("variables", "arguments", "text"),
    [
        ({"CLIENT_ID": "3"}, ["client", "--insecure", "--client-ids", "1-2"], "FEDOPT_CLIENT_ID"),
        ({"CLIENT_ID": "3", "CLIENT_IDS": "4"}, ["client", "--insecure"], "give one of them"),
        ({"ONE_OF": "3"}, ["client", "--insecure", "--client-id", "4"], "FEDOPT_ONE_OF"),
        ({"INSECURE": "1"}, ["client", "--client-id", "1", "--ca", "c"], "uses no certificates"),
        ({"ALGORITHM": "fedavg"}, ["server", "--set", "algorithm.name=stem"], "--algorithm and"),
        ({"INSECURE": "maybe"}, ["server"], "FEDOPT_INSECURE"),
        ({"ADDRESS": "here"}, ["server", "--insecure"], "got 'here'; must be HOST:PORT"),
    ],
)
def test_a_variable_and_its_rival_or_a_bad_one_are_refused(
    variables: dict[str, str],
    arguments: list[str],
    text: str,
    in_process: InProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"FEDOPT_{name}", value)
    refused(in_process(*arguments), text)


def test_an_unknown_variable_is_said(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDOPT_CLIENTID", "3")
    monkeypatch.setenv("FEDOPT_ADDRESS", "0.0.0.0:1")  # the other verb's
    monkeypatch.setenv("FEDOPT_DATA", "/data")
    ended: Ended = in_process("client", "--insecure")
    refused(ended, "unknown 'FEDOPT_CLIENTID'; did you mean 'FEDOPT_CLIENT_ID'?")
    assert ended.stderr.count("unknown") == 1


@pytest.mark.slow
def test_a_launch_gives_its_clients_none_of_them(tmp_path: Path) -> None:
    own = {"CLIENT_ID": "7", "SET": "federation.seed=x", "STATE_DIR": "/proc", "CA": "none"}
    environment = os.environ | {f"FEDOPT_{name}": value for name, value in own.items()}
    command = [FEDOPT, "launch", "--processes", "2", "--set", "output.directory=run", *QUICK]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
