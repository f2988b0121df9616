"""`fedopt certs` as people type it: what is made, what is refused, what is shown."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from processes import InProcess

from fedopt_flwr import ConfigError
from fedopt_flwr.config.client_ids import certificate_covers
from fedopt_flwr.deployment.certificates import create_authority, create_client, create_server


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority") / "certs"
    create_authority(folder, ["localhost"], days=30)
    return folder


def common_name(path: Path) -> str:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    (name,) = certificate.subject
    return str(name.value)


@pytest.mark.parametrize("days", ["0", "-1", "3651", "3000000", "1" + 30 * "0"])
@pytest.mark.parametrize("what", [["init"], ["server"], ["client", "0"]])
def test_days_are_within_what_a_certificate_holds(
    in_process: InProcess, authority: Path, what: list[str], days: str
) -> None:
    before = sorted(authority.iterdir())
    directory = ("--directory", str(authority))
    code, _, error = in_process("certs", *what, *directory, "--days", days)
    assert code == 2
    assert "--days" in error
    assert sorted(authority.iterdir()) == before


def test_ten_years_are_possible(in_process: InProcess) -> None:
    assert in_process("certs", "init", "--days", "3650")[0] == 0
    assert in_process("certs", "client", "0", "--days", "3650")[0] == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("0-100001", "must be at most 100000 ids"),
        ("-5", "must be a client id"),
        ("*", "must be a client id"),
        ("0\n1", "must be a number, ranges such as 0-24, or a name"),
        ("ca.pem", "not end in '.pem'"),
        ("0.KEY", "not end in '.pem'"),
        ("CA", "neither 'ca'"),
        ("revoked", "neither 'ca'"),
        ("é" * 60, "at most 64 bytes of it, and these are 120"),
        ("\udcff", "must be a number"),
        ("5-3", "a range must go upwards"),
        ("0-4,3", "an id occurs twice"),
        ("007", "without zeros before a number"),
        ("0-05", "without zeros before a number"),
        ("0 - 5", "must be a client id"),
        ("0-5,", "must be a client id"),
        ("0..5", "must be a client id"),
        ("0–5", "must be a client id"),  # an en dash
        ("٣", "must be a client id"),  # a digit, but none that a number is read from
        ("ward-1,ward-2", "must be a client id"),
        ("ward 3 ", "must be a client id"),
        ("../ward", "must be a client id"),
    ],
)
def test_a_name_that_would_mean_something_else_is_refused(
    in_process: InProcess, authority: Path, name: str, reason: str
) -> None:
    before = sorted(authority.iterdir())
    code, _, error = in_process("certs", "client", "--directory", str(authority), "--", name)
    assert code == 2
    assert "NAME: got" in error
    assert reason in " ".join(error.split())
    assert sorted(authority.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "covered", "others"),
    [
        ("0", [0], [1, "0"]),
        ("100-102", [100, 101, 102], [99, 103]),
        ("1,3,8-9", [1, 3, 8, 9], [2, 7]),
        ("ward-3", ["ward-3"], ["ward-2", 3]),
        ("3rd ward", ["3rd ward"], [3]),
        ("é" * 32, ["é" * 32], ["é"]),
    ],
)
def test_a_certificate_speaks_for_the_clients_that_were_typed(
    tmp_path: Path, authority: Path, name: str, covered: list[int | str], others: list[int | str]
) -> None:
    folder = tmp_path / "certs"
    shutil.copytree(authority, folder)
    path, _ = create_client(folder, name, days=1)
    assert all(certificate_covers(common_name(path), i) for i in covered)
    assert not any(certificate_covers(common_name(path), i) for i in others)


@pytest.mark.parametrize(
    "host", ["", " ", "localhost:8080", "[::1]", "http://x", "10.0.0.256", "a..b", "ä", "x" * 64]
)
def test_a_host_that_no_client_could_dial_is_refused(authority: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--host: got"):
        create_server(authority, [host], days=1)


@pytest.mark.parametrize("host", ["*.example.org", "x." * 60 + "example", "fl_1", "::1"])
def test_a_host_of_any_length_may_be_a_servers(
    in_process: InProcess, tmp_path: Path, host: str
) -> None:
    assert in_process("certs", "init", "--host", host)[0] == 0
    assert host in in_process("certs", "show", "certs/server.pem")[1]


def test_a_server_gets_a_new_pair_under_the_same_authority(
    in_process: InProcess, tmp_path: Path
) -> None:
    assert in_process("certs", "init")[0] == 0
    before = (tmp_path / "certs" / "server.pem").read_bytes()
    for number in (2, 3):
        code, out, _ = in_process("certs", "server", "--host", "new.example.org", "--days", "7")
        assert code == 0
        assert out.split() == [f"certs/server-{number}.pem", f"certs/server-{number}.key"]
    assert (tmp_path / "certs" / "server.pem").read_bytes() == before
    ca, new = (
        x509.load_pem_x509_certificate((tmp_path / "certs" / name).read_bytes())
        for name in ("ca.pem", "server-3.pem")
    )
    new.verify_directly_issued_by(ca)
    names = new.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["new.example.org"]
    assert (new.not_valid_after_utc - datetime.now(UTC)).days in (6, 7)
    # the authority outlives what it signs, so that renewing is of use
    assert (ca.not_valid_after_utc - datetime.now(UTC)).days > 3600


def test_show_says_what_a_folder_or_a_file_holds(in_process: InProcess, tmp_path: Path) -> None:
    for command in (["init"], ["client", "0"], ["client", "1-24"], ["revoke", "0"]):
        assert in_process("certs", *command)[0] == 0
    serial = x509.load_pem_x509_certificate((tmp_path / "certs/0.pem").read_bytes()).serial_number
    code, out, _ = in_process("certs", "show")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert sorted(rows) == ["0.pem", "1-24.pem", "ca.pem", "server.pem"]
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    for part in ("client", f"revoked {today}", f"{serial:x}"):
        assert part in rows["0.pem"]
    assert "valid" in rows["1-24.pem"]
    assert "authority" in rows["ca.pem"]
    assert "localhost, 127.0.0.1" in rows["server.pem"]
    (only,) = in_process("certs", "show", "certs/0.pem")[1].splitlines()
    assert only.split() == rows["0.pem"].split()


def test_show_knows_foreign_certificates_and_files_that_are_none(
    in_process: InProcess, tmp_path: Path
) -> None:
    assert in_process("certs", "init")[0] == 0
    assert in_process("certs", "init", "--directory", "other")[0] == 0
    shutil.copy("other/server.pem", "certs/foreign.pem")
    rows = in_process("certs", "show")[1].splitlines()
    assert [row.split()[0] for row in rows if "of another CA" in row] == ["foreign.pem"]
    (tmp_path / "empty").mkdir()
    for path, reason in [("nowhere", "holds no certificate"), ("empty", "no certificates in")]:
        code, _, error = in_process("certs", "show", path)
        assert code == 2
        assert reason in error
    code, _, error = in_process("certs", "show", "certs/ca.key")
    assert (code, "holds no certificate" in error) == (2, True)


def test_an_authority_whose_time_or_key_is_wrong_signs_nothing(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedopt_flwr.deployment.certificates.MAX_DAYS", 2 / 86400)
    assert in_process("certs", "init")[0] == 0
    time.sleep(2.1)
    code, _, error = in_process("certs", "client", "0")
    assert (code, "has expired on" in error) == (2, True)
    assert in_process("certs", "init", "--directory", "other")[0] == 0
    shutil.copy("other/ca.key", "certs/ca.key")
    code, _, error = in_process("certs", "client", "0")
    assert (code, "ca.key is not the key of ca.pem" in error) == (2, True)


def test_revoked_needs_the_ca_that_signed_the_list(in_process: InProcess) -> None:
    assert in_process("certs", "init")[0] == 0
    pair = ("--certificate", "certs/server.pem", "--key", "certs/server.key")
    code, _, error = in_process("server", *pair, "--revoked", "certs/revoked.pem")
    assert (code, "give --client-ca beside it" in error) == (2, True)
    code, _, error = in_process("server", "--insecure", "--revoked", "certs/revoked.pem")
    assert (code, "uses no certificates" in error) == (2, True)
