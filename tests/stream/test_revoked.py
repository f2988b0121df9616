"""Certificates that were revoked: who is kept out, who is sent away, and what the list may be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Processes, free_port, write_config
from streams import ClientThread, ServerThread, make_config

from fedopt_flwr import ConfigError
from fedopt_flwr.deployment.certificates import create_authority, create_client, load_certificate
from fedopt_flwr.deployment.revocations import revoke
from fedopt_flwr.engines.stream import ClientTls, ServerTls
from fedopt_flwr.engines.stream.revoked import RevokedList
from fedopt_flwr.rounds.record import RoundRecord

NAMES = ["0", "1", "2"]
KEPT = "stays in force"


def new_authority(folder: Path, names: list[str]) -> Path:
    """A folder with a CA, a server's pair, clients of those names and an empty list."""
    create_authority(folder, ["localhost"], days=60)
    for name in names:
        create_client(folder, name, days=60)
    revoke(folder, [])
    return folder


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return new_authority(tmp_path / "certs", NAMES)


def server_tls(folder: Path) -> ServerTls:
    ca, revoked = folder / "ca.pem", folder / "revoked.pem"
    return ServerTls(folder / "server.pem", folder / "server.key", ca, revoked)


def client_tls(folder: Path, name: str) -> ClientTls:
    return ClientTls(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


def after_round(number: int, act: Callable[[], object]) -> Callable[[RoundRecord], None]:
    def on_round(record: RoundRecord) -> None:
        if record.round == number:
            act()

    return on_round


def test_a_revoked_client_is_refused_when_it_joins(authority: Path, tmp_path: Path) -> None:
    create_client(authority, "1-2", days=60)
    revoke(authority, ["1"])
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        revoked = ClientThread(server, 1, tmp_path, tls=client_tls(authority, "1"))
        revoked.join()
        assert "refuses it: client 1: this certificate was revoked" in str(revoked.error)
        assert "connected to" not in str(revoked.said)  # not one message came
        assert "client 1: this certificate was revoked" in server.said.wait_for("refused")
        # the id itself is not lost: another certificate may hold it
        for i, name in enumerate(["0", "1-2", "2"]):
            ClientThread(server, i, tmp_path, tls=client_tls(authority, name))
        assert server.result().rounds[-1].clients == [0, 1, 2]


def test_a_client_that_is_revoked_takes_part_in_no_further_round(
    authority: Path, tmp_path: Path
) -> None:
    on_round = after_round(2, lambda: revoke(authority, ["1"]))
    config = make_config(num_rounds=5)
    with ServerThread(config, tls=server_tls(authority), on_round=on_round) as server:
        clients = [
            ClientThread(server, i, tmp_path, tls=client_tls(authority, str(i))) for i in range(3)
        ]
        rounds = server.result().rounds
    assert [r.clients for r in rounds[-4:]] == [[0, 1, 2], [0, 2], [0, 2], [0, 2]]
    assert [r.failures for r in rounds] == [0] * len(rounds)  # who is not there is not asked
    clients[1].join()
    assert "refuses it: this certificate was revoked" in str(clients[1].error)
    assert "client 1: left: this certificate was revoked" in str(server.said)


def test_all_clients_of_a_revoked_certificate_leave(authority: Path, tmp_path: Path) -> None:
    create_client(authority, "1-2", days=60)
    on_round = after_round(1, lambda: revoke(authority, ["1-2"]))
    config = make_config("fedavg", num_rounds=3)
    with ServerThread(config, tls=server_tls(authority), on_round=on_round) as server:
        for i, name in enumerate(["0", "1-2", "1-2"]):
            ClientThread(server, i, tmp_path, tls=client_tls(authority, name))
        assert [r.clients for r in server.result().rounds] == [[0, 1, 2], [0], [0]]


def test_a_revoked_client_does_not_count_before_the_start(authority: Path, tmp_path: Path) -> None:
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        early = ClientThread(server, 1, tmp_path, tls=client_tls(authority, "1"))
        server.said.wait_for("client 1: joined")
        revoke(authority, ["1"])
        early.join()
        assert "this certificate was revoked" in str(early.error)
        create_client(authority, "1-2", days=60)
        for i, name in enumerate(["0", "1-2", "2"]):
            ClientThread(server, i, tmp_path, tls=client_tls(authority, name))
        assert server.result().rounds[-1].clients == [0, 1, 2]


def damage(path: Path, contents: bytes | None) -> None:
    """Change a file so that also a coarse clock shows it."""
    before = path.stat().st_mtime_ns
    if contents is None:
        path.unlink()
        return
    path.write_bytes(contents)
    os.utime(path, ns=(before + 10**9, before + 10**9))


@pytest.mark.parametrize("damaged", ["gone", "torn", "of another CA", "a folder"])
def test_a_damaged_list_is_said_once_and_the_one_before_stays_in_force(
    authority: Path, tmp_path: Path, damaged: str
) -> None:
    path = revoke(authority, ["1"])
    said: list[str] = []
    revoked = RevokedList(path, authority / "ca.pem", lambda who, why: said.append(f"{who}: {why}"))
    serials = {name: serial_of(authority, name) for name in NAMES}
    good = path.read_bytes()
    if damaged == "a folder":
        path.unlink()
        path.mkdir()
    else:
        other = new_authority(tmp_path / "other", [])
        foreign = (other / "revoked.pem").read_bytes()
        damage(path, {"gone": None, "torn": good[:200]}.get(damaged, foreign))
    for _ in range(3):
        assert [revoked.refuses(serials[name]) for name in NAMES] == [False, True, False]
    assert len(said) == 1
    assert KEPT in said[0]
    if damaged == "a folder":
        path.rmdir()
        path.write_bytes(good)
    else:
        path.unlink(missing_ok=True)
        path.write_bytes(good)
    revoke(authority, ["2"])
    assert [revoked.refuses(serials[name]) for name in NAMES] == [False, True, True]
    assert len(said) == 1


def serial_of(folder: Path, name: str) -> int:
    return load_certificate(folder / f"{name}.pem", "NAME").serial_number


def test_a_certificate_without_a_readable_number_is_refused(authority: Path) -> None:
    revoked = RevokedList(
        authority / "revoked.pem", authority / "ca.pem", lambda who, why: pytest.fail(why)
    )
    assert revoked.refuses(None)


def test_a_server_does_not_start_without_a_list_of_its_ca(authority: Path, tmp_path: Path) -> None:
    other = new_authority(tmp_path / "other", [])
    pair = (authority / "server.pem", authority / "server.key", authority / "ca.pem")
    for path, reason in [
        (authority / "typo.pem", "No such file"),
        (authority / "ca.pem", "holds no list of revoked certificates"),
        (other / "revoked.pem", "not signed by --client-ca"),
    ]:
        with (
            pytest.raises(ConfigError, match=reason),
            ServerThread(make_config(), tls=ServerTls(*pair, path)),
        ):
            pass


def test_revoking_lists_certificates_of_this_authority_alone(
    authority: Path, tmp_path: Path
) -> None:
    other = new_authority(tmp_path / "other", ["7"])
    for name, reason in [
        ("ca", "of kind 'authority'; only a client's"),
        ("server", "of kind 'server'; only a client's"),
        ("9", r"9\.pem' holds no certificate"),
        (str(other / "7.pem"), "not of the authority in"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            revoke(authority, ["0", name])
    (authority / "0.pem").rename(tmp_path / "old.pem")
    path = revoke(authority, [str(tmp_path / "old.pem")])
    path = revoke(authority, [str(tmp_path / "old.pem"), "2"])  # twice is once
    revoked = RevokedList(path, authority / "ca.pem", lambda who, why: pytest.fail(why))
    assert [revoked.refuses(serial_of(authority, name)) for name in ["1", "2"]] == [False, True]
    path.write_text("not a list")
    with pytest.raises(ConfigError, match="holds no list of revoked certificates"):
        revoke(authority, ["1"])
    assert path.read_text() == "not a list"


@pytest.mark.slow
def test_a_federation_that_revokes_a_client_while_it_runs(processes: Processes) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "fedavg", federation={"num_rounds": 20})
    new_authority(folder / "certs", NAMES)
    files = ("--certificate", "certs/server.pem", "--key", "certs/server.key")
    files += ("--client-ca", "certs/ca.pem", "--revoked", "certs/revoked.pem")
    server = processes.start("server", "server", config, "--address", f"127.0.0.1:{port}", *files)
    clients = []
    for i in range(3):
        own = ("--certificate", f"certs/{i}.pem", "--key", f"certs/{i}.key")
        where = ("--server", f"localhost:{port}", "--ca", "certs/ca.pem", "--client-id", i)
        clients.append(processes.start(f"c{i}", "client", config, *where, *own))
    server.wait_for("round 4/")
    assert processes.start("ca", "certs", "revoke", "1").ended() == 0
    assert clients[1].ended() == 2
    assert server.process.poll() is None
    assert "this certificate was revoked" in clients[1].log
    assert [server.ended(), clients[0].ended(), clients[2].ended()] == [0, 0, 0]
