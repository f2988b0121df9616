"""Certificates that end soon, and new ones that take their place while a run continues."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from streams import ClientThread, Lines, ServerThread, make_config

from fedopt_flwr import ConfigError
from fedopt_flwr.deployment.certificates import create_authority, create_client, create_server
from fedopt_flwr.engines.stream import ClientTls, ServerAddress, ServerTls, StreamClient
from fedopt_flwr.errors import FedoptWarning


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    folder = tmp_path / "certs"
    create_authority(folder, ["localhost"], days=60)
    for name in ("0", "1", "2"):
        create_client(folder, name, days=60)
    return folder


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def shown(port: int) -> int:
    """Return the serial number of the certificate that a new connection is shown."""
    pem = ssl.get_server_certificate(("localhost", port), timeout=10)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def client(server: ServerThread, certs: Path, number: int, state: Path) -> ClientThread:
    own = ClientTls(certs / "ca.pem", certs / f"{number}.pem", certs / f"{number}.key")
    return ClientThread(server, number, state, tls=own)


def test_a_server_shows_its_new_certificate_and_the_run_continues(
    certs: Path, tmp_path: Path
) -> None:
    tls = ServerTls(certs / "server.pem", certs / "server.key", certs / "ca.pem")
    with ServerThread(make_config(num_rounds=2, start_timeout=60), tls=tls) as server:
        client(server, certs, 0, tmp_path)
        server.said.wait_for("client 0: joined")
        first = serial(certs / "server.pem")
        assert shown(server.port) == first
        new, key = create_server(certs, ["localhost"], days=60)
        (certs / "server.pem").write_bytes(new.read_bytes())  # its key is still the old one
        assert shown(server.port) == first
        text = server.said.wait_for("certificates: refused: --key:")
        assert "is not the key of" in text
        assert "those that were read before stay in force" in text
        key.replace(certs / "server.key")
        assert shown(server.port) == serial(new) != first
        client(server, certs, 1, tmp_path)
        client(server, certs, 2, tmp_path)
        assert [r.failures for r in server.result().rounds] == [0, 0, 0]


def test_few_days_left_of_any_certificate_are_said(certs: Path, tmp_path: Path) -> None:
    create_server(certs, ["localhost"], days=29)
    tls = ServerTls(certs / "server-2.pem", certs / "server-2.key", certs / "ca.pem")
    with pytest.warns(FedoptWarning, match=r"--certificate: .*server-2\.pem' ends on .* 28 days"):
        tls.credentials()
    create_client(certs, "2,3", days=30)
    short = ClientTls(certs / "ca.pem", certs / "2,3.pem", certs / "2,3.key")
    with pytest.warns(FedoptWarning, match=r"2,3\.pem' ends on .* 29 days from now; make a new"):
        short.credentials()
    ends = tls.ends()
    assert (ends["ca"] - ends["own"]).days > 3600
    assert ClientTls(tmp_path / "gone.pem").ends() == {}


def test_a_client_keeps_what_it_read_while_a_new_pair_is_not_whole(certs: Path) -> None:
    def stream() -> tuple[StreamClient, Lines]:
        own = ClientTls(certs / "ca.pem", certs / "0.pem", certs / "0.key")
        said = Lines()
        return StreamClient(0, None, ServerAddress("localhost:1", own, 5), said), said  # type: ignore[arg-type]

    running, said = stream()
    running._open_channel().close()
    (certs / "0.pem").write_bytes((certs / "1.pem").read_bytes())  # its key is still the old one
    running._open_channel().close()
    assert "is not the key of" in str(said)
    assert "what was read before stays in force" in str(said)
    with pytest.raises(ConfigError, match="is not the key of"):
        stream()[0]._open_channel()


@pytest.mark.filterwarnings("ignore::fedopt_flwr.errors.FedoptWarning")
def test_a_server_says_it_of_a_client_that_joins(certs: Path, tmp_path: Path) -> None:
    (certs / "short").mkdir()
    for name in ("ca.pem", "ca.key"):
        (certs / "short" / name).write_bytes((certs / name).read_bytes())
    create_client(certs / "short", "1", days=5)
    tls = ServerTls(certs / "server.pem", certs / "server.key", certs / "ca.pem")
    with ServerThread(make_config(num_rounds=1), tls=tls) as server:
        client(server, certs, 0, tmp_path)
        client(server, certs / "short", 1, tmp_path)
        client(server, certs, 2, tmp_path)
        server.result()
    said = [line for line in str(server.said).splitlines() if "its certificate ends" in line]
    assert len(said) == 1
    assert said[0].startswith("client 1: its certificate ends on 20")
    assert "4 days from now; make it another with `fedopt certs client 1`" in said[0]
    left = {i: c.certificate_ends for i, c in server.roster.clients().items()}
    assert left[1] is not None
    assert left[0] is not None
    assert (left[0] - left[1]).days == 55
