"""Certificates and TLS: who is let in, what is said to those who are not, what a listener sees."""

from __future__ import annotations

import contextlib
import socket
import stat
import threading
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from processes import Processes, free_port
from streams import ClientThread, Lines, RawPeer, ServerThread, make_config

from fedopt_flwr import ConfigError, simulate
from fedopt_flwr.deployment import certificates
from fedopt_flwr.deployment.certificates import create_authority, create_client
from fedopt_flwr.engines.stream import ClientTls, ServerAddress, ServerTls, StreamClient


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A folder with a CA, a server certificate for localhost and clients 0, 1 and 2."""
    folder = tmp_path / "certs"
    create_authority(folder, ["localhost", "127.0.0.1"], days=60)
    for name in ("0", "1", "2"):
        create_client(folder, name, days=60)
    return folder


def server_tls(folder: Path, *, mutual: bool = True) -> ServerTls:
    ca = folder / "ca.pem" if mutual else None
    return ServerTls(folder / "server.pem", folder / "server.key", ca)


def client_tls(folder: Path, name: str | None) -> ClientTls:
    own = (None, None) if name is None else (folder / f"{name}.pem", folder / f"{name}.key")
    return ClientTls(folder / "ca.pem", *own)


def finish(server: ServerThread, folder: Path, state: Path) -> Any:
    """Let the three clients that belong here run the federation to its end."""
    for i in range(3):
        ClientThread(server, i, state, tls=client_tls(folder, str(i)))
    return server.result()


def expire(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    """Make a client certificate whose time is over."""
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_BACKDATED", timedelta(days=5))
        create_client(folder, name, days=-1)


def test_mutual_tls_gives_the_same_bits_as_a_simulation(authority: Path, tmp_path: Path) -> None:
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        result = finish(server, authority, tmp_path)
    assert result.parameters.tobytes() == simulate(make_config()).parameters.tobytes()


def test_one_certificate_may_speak_for_a_range_of_clients(authority: Path, tmp_path: Path) -> None:
    create_client(authority, "0-2", days=60)
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        for i in range(3):
            ClientThread(server, i, tmp_path, tls=client_tls(authority, "0-2"))
        assert server.result().rounds[-1].clients == [0, 1, 2]


def test_a_client_cannot_claim_the_id_of_another(authority: Path, tmp_path: Path) -> None:
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        thief = ClientThread(server, 1, tmp_path, tls=client_tls(authority, "0"))
        thief.join()
        assert "client 1: this certificate is for 0" in str(thief.error)
        assert "connected to" not in str(thief.said)  # not one message came
        assert "client 1: this certificate is for 0" in server.said.wait_for("refused")
        finish(server, authority, tmp_path)


@pytest.mark.parametrize("certificate", ["none", "foreign"])
def test_a_client_without_a_certificate_of_the_ca_gets_nothing(
    authority: Path, tmp_path: Path, certificate: str
) -> None:
    tls, reason = client_tls(authority, None), "it wants a certificate"
    if certificate == "foreign":
        other = tmp_path / "other"
        create_authority(other, ["localhost"], days=60)
        create_client(other, "0", days=60)
        tls = ClientTls(authority / "ca.pem", other / "0.pem", other / "0.key")
        reason = "it does not accept the certificate in"
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        stranger = ClientThread(server, 0, tmp_path, tls=tls)
        stranger.join()
        assert reason in str(stranger.error)
        assert "connected to" not in str(stranger.said)
        finish(server, authority, tmp_path)


def test_an_expired_client_certificate_is_named_and_not_let_in(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire(monkeypatch, authority, "old")
    with pytest.raises(ConfigError, match=r"--certificate: the certificate in .* has expired on"):
        client_tls(authority, "old").credentials()
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        files = [authority / name for name in ("ca.pem", "old.key", "old.pem")]
        credentials = grpc.ssl_channel_credentials(*[f.read_bytes() for f in files])
        with (
            grpc.secure_channel(f"localhost:{server.port}", credentials) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            channel.unary_unary("/any/method")(b"", timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # it never got to a method
        finish(server, authority, tmp_path)


def bare_server(credentials: grpc.ServerCredentials | None) -> tuple[grpc.Server, str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, f"localhost:{port}"


def reason_to_give_up(address: str, tls: ClientTls | None) -> str:
    stream = StreamClient(0, None, ServerAddress(address, tls, 5), Lines())  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        stream.run()
    return str(caught.value)


def test_an_expired_server_certificate_is_named(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_BACKDATED", timedelta(days=5))
        purpose = ExtendedKeyUsageOID.SERVER_AUTH
        certificates._issue(authority, "old", "localhost", purpose, -1, names)
    key, pem = authority / "old.key", authority / "old.pem"
    with pytest.raises(ConfigError, match="has expired"):
        ServerTls(pem, key).credentials()
    pair = (key.read_bytes(), pem.read_bytes())
    server, address = bare_server(grpc.ssl_server_credentials([pair]))
    assert "its certificate has expired" in reason_to_give_up(address, client_tls(authority, None))
    server.stop(None)


def test_a_wrong_host_name_and_a_foreign_server_are_named(authority: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    create_authority(other, ["elsewhere.example"], days=60)
    server, address = bare_server(server_tls(other, mutual=False).credentials())
    reason = reason_to_give_up(address, client_tls(other, None))
    assert "its certificate is not for 'localhost'" in reason
    reason = reason_to_give_up(address, client_tls(authority, None))
    assert "not signed by this federation's CA" in reason
    server.stop(None)


def test_a_foreign_authority_of_the_same_name_and_key_id_is_named(
    authority: Path, tmp_path: Path
) -> None:
    real = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    builder = certificates._builder(
        real.subject, real.subject, key.public_key(), 60, signs_certificates=True
    )
    builder._extensions = list(real.extensions)
    namesake = tmp_path / "namesake.pem"
    namesake.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    server, address = bare_server(server_tls(authority, mutual=False).credentials())
    reason = reason_to_give_up(address, ClientTls(namesake))
    assert "not signed by this federation's CA, but by one of the same name" in reason
    server.stop(None)


@pytest.mark.parametrize("client_id", [True, 0.0, "0", 1, "ward-3", None])
def test_with_a_certificate_of_its_own_a_client_gets_no_message_as_another(
    authority: Path, tmp_path: Path, client_id: Any
) -> None:
    files = [authority / name for name in ("ca.pem", "0.key", "0.pem")]
    credentials = grpc.ssl_channel_credentials(*[f.read_bytes() for f in files])
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        peer = RawPeer(server.port, {"client_id": client_id}, credentials=credentials)
        code, _ = peer.refused()
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
        assert peer.heard == []
        finish(server, authority, tmp_path)


@pytest.mark.slow
def test_strangers_write_no_lines_into_the_log_of_a_server_with_tls(
    authority: Path, processes: Processes
) -> None:
    port = free_port()
    files = ["--certificate", authority / "server.pem", "--key", authority / "server.key"]
    more = ["--client-ca", authority / "ca.pem", "--set", f"output.directory={authority / 'run'}"]
    server = processes.start("server", "server", "--address", f"127.0.0.1:{port}", *files, *more)
    server.wait_for("listening")
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            connection.settimeout(2)
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.recv(100)
    assert len(server.log.splitlines()) == 1, server.log


def test_plain_text_and_tls_do_not_meet(authority: Path, tmp_path: Path) -> None:
    with ServerThread(make_config(), tls=server_tls(authority)) as server:
        plain = ClientThread(server, 0, tmp_path)
        plain.join()
        assert "give --ca if it speaks TLS" in str(plain.error)
        finish(server, authority, tmp_path)
    bare, address = bare_server(None)
    reason = reason_to_give_up(address, client_tls(authority, "0"))
    assert "it spoke plain text where TLS is wanted" in reason
    bare.stop(None)


class Tap:
    """Stands between client and server on the loopback and notes every byte."""

    def __init__(self, port: int) -> None:
        self._target, self.seen = port, bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source:  # whichever side closes first
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_listener_sees_the_model_only_where_nothing_is_encrypted(
    authority: Path, tmp_path: Path, encrypted: bool
) -> None:
    config = make_config("fedavg", num_clients=1, clients_per_round=1, num_rounds=2)
    after_first = simulate(config | {"federation": config["federation"] | {"num_rounds": 1}})
    model = after_first.parameters[100:140].astype(np.float32).tobytes()  # travels in round 2
    with ServerThread(config, tls=server_tls(authority) if encrypted else None) as server:
        tap = Tap(server.port)
        tls = client_tls(authority, "0") if encrypted else None
        ClientThread(server, 0, tmp_path, tls=tls, port=tap.port)
        server.result()
        tap.close()
    assert len(tap.seen) > 2 * after_first.parameters.nbytes
    assert (model in bytes(tap.seen)) is not encrypted


def test_certificate_files_are_private_complete_and_never_written_over(authority: Path) -> None:
    for key in authority.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    server = x509.load_pem_x509_certificate((authority / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    before = (authority / "ca.key").read_bytes()
    with pytest.raises(ConfigError, match="exists already and is not written over"):
        create_authority(authority, ["localhost"], days=1)
    with pytest.raises(ConfigError, match="exists already and is not written over"):
        create_client(authority, "0", days=1)
    assert (authority / "ca.key").read_bytes() == before


@pytest.mark.parametrize("name", ["ca", "server", "a/b", ".hidden", "", "x" * 65])
def test_names_that_could_hurt_other_files_are_refused(authority: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="NAME: got"):
        create_client(authority, name, days=1)


def test_a_folder_without_an_authority_and_a_key_of_another_are_named(
    authority: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no authority in .* run `fedopt certs init`"):
        create_client(tmp_path / "nothing", "0", days=1)
    with pytest.raises(ConfigError, match=r"--key: .*1\.key' is not the key of .*0\.pem"):
        ClientTls(authority / "ca.pem", authority / "0.pem", authority / "1.key").credentials()
    with pytest.raises(ConfigError, match=r"--ca: .* holds no certificate"):
        ClientTls(authority / "ca.key").credentials()
