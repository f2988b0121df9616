"""A small certificate authority for one federation, made with the `cryptography` package."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..config.client_ids import parse_ids
from ..errors import ConfigError

CA = "ca"
SERVER = "server"
REVOKED = "revoked"
MAX_DAYS = 3650
_BACKDATED = timedelta(minutes=5)  # clocks of two machines differ
_MAX_NAME_BYTES = 64  # of a common name


def create_authority(directory: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Write ca and server (.pem and .key) into `directory`; return the four paths.

    `hosts` are the names and addresses under which clients reach the server; its certificate is
    valid for `days`, the authority, which renews it, for `MAX_DAYS`. Existing files are never
    written over: ConfigError names the first.
    """
    alternatives = _alternatives(hosts)
    paths = _free_paths(directory, CA, SERVER)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name("fedopt-flwr CA")
    authority = _builder(subject, subject, key.public_key(), MAX_DAYS, signs_certificates=True)
    _write_pair(directory / CA, authority.sign(key, hashes.SHA256()), key)
    _issue(directory, SERVER, SERVER, ExtendedKeyUsageOID.SERVER_AUTH, days, alternatives)
    return paths


def create_server(directory: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Write one more pair of the server, signed by the authority in `directory`; return its paths.

    It is called server, or else server-2, server-3 and so on, whichever is free.
    """
    alternatives = _alternatives(hosts)
    stems = itertools.chain([SERVER], (f"{SERVER}-{n}" for n in itertools.count(2)))
    stem = next(s for s in stems if not any(path.exists() for path in _pair(directory, s)))
    _issue(directory, stem, SERVER, ExtendedKeyUsageOID.SERVER_AUTH, days, alternatives)
    return _pair(directory, stem)


def create_client(directory: Path, name: str, days: int) -> list[Path]:
    """Write NAME.pem and NAME.key, signed by the authority in `directory`; return their paths.

    The common name is the identity: one client id, or several as in "0-24".
    """
    _require_client_name(name)
    paths = _free_paths(directory, name)
    _issue(directory, name, name, ExtendedKeyUsageOID.CLIENT_AUTH, days, None)
    return paths


def load_certificate(path: Path, option: str) -> x509.Certificate:
    """Read a certificate; ConfigError says that the one named by `option` cannot be read."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {str(path)!r} holds no certificate: {error}") from None


def _require_client_name(name: str) -> None:
    """Raise ConfigError unless a server reads `name` as the ids that a person reads in it.

    Whatever is no number and no range is a name to `parse_ids`, "*" and "-5" too; so a name is held
    to characters that leave no doubt.
    """
    try:
        ids = parse_ids(name)
    except ValueError as error:
        raise ConfigError(f"NAME: {error}") from None
    remedy = "must be a client id, or several as in 0-24 or 1,3,8-9"
    if re.search(r"(?<![0-9])0[0-9]", name) and isinstance(ids[0], int):
        raise ConfigError(f"NAME: got {name!r}; {remedy}, without zeros before a number")
    is_name = re.fullmatch(r"[^\W_]([\w.@ +-]*[\w@+])?", name) and any(c.isalpha() for c in name)
    if isinstance(ids[0], str) and not is_name:
        raise ConfigError(
            f"NAME: got {name!r}; {remedy}, or one name of letters, digits, '_', '@', '+' "
            "and, within it, '.', '-' and spaces; it begins with a letter or digit and has a letter"
        )
    if name.lower() in (CA, SERVER, REVOKED) or name.lower().endswith((".pem", ".key")):
        raise ConfigError(
            f"NAME: got {name!r}; must be neither 'ca', 'server' nor 'revoked' and not end in "
            "'.pem' or '.key', as files here do; give the client's id alone"
        )
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(
            f"NAME: got {name!r}; a certificate holds at most {_MAX_NAME_BYTES} bytes of it, and "
            f"these are {len(name.encode())}; shorten it, or make several certificates"
        )


def _issue(
    directory: Path,
    stem: str,
    common_name: str,
    purpose: x509.ObjectIdentifier,
    days: int,
    alternatives: x509.SubjectAlternativeName | None,
) -> None:
    authority, authority_key = load_authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(common_name)
    builder = (
        _builder(subject, authority.subject, key.public_key(), days, signs_certificates=False)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
    )
    if alternatives is not None:
        builder = builder.add_extension(alternatives, critical=False)
    _write_pair(directory / stem, builder.sign(authority_key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    days: int,
    *,
    signs_certificates: bool,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    path_length = 0 if signs_certificates else None
    usage = x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.BasicConstraints(signs_certificates, path_length), critical=True)
        .add_extension(usage, critical=True)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternatives(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    if not hosts:
        raise ConfigError("--host: none given; name every host name and IP address of the server")
    return x509.SubjectAlternativeName([_alternative(host) for host in hosts])


def _alternative(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    labels = host.removeprefix("*.").split(".")  # a name in DNS; the last is no number, as in an IP
    is_name = len(host) <= 253 and not labels[-1].isdigit()
    if is_name and all(re.fullmatch(r"[A-Za-z0-9_]([\w-]{0,61}\w)?", i, re.A) for i in labels):
        return x509.DNSName(host)
    raise ConfigError(
        f"--host: got {host!r}; must be a host name in ASCII or an IP address, without port and "
        "brackets"
    )


def load_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Read the authority's certificate and key; ConfigError says why they are of no use."""
    try:
        contents = (directory / f"{CA}.key").read_bytes()
        key = serialization.load_pem_private_key(contents, password=None)
        authority = x509.load_pem_x509_certificate((directory / f"{CA}.pem").read_bytes())
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("its key is not of the kind that `fedopt certs init` makes")
        if key.public_key() != authority.public_key():
            raise ValueError(f"{CA}.key is not the key of {CA}.pem")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"--directory: no authority in {str(directory)!r}: {error}; run `fedopt certs init`"
        ) from None
    if authority.not_valid_after_utc < datetime.now(UTC):
        raise ConfigError(
            f"--directory: the authority in {str(directory)!r} has expired on "
            f"{authority.not_valid_after_utc:%Y-%m-%d}; make a new one with `fedopt certs init` in "
            "another folder"
        )
    return authority, key


def _free_paths(directory: Path, *names: str) -> list[Path]:
    """Return certificate and key of each name; ConfigError for the first that exists."""
    paths = [path for name in names for path in _pair(directory, name)]
    for path in paths:
        if path.exists():
            raise ConfigError(
                f"{str(path)!r} exists already and is not written over; move it elsewhere first"
            )
    return paths


def _pair(directory: Path, stem: str) -> list[Path]:
    return [directory / f"{stem}{end}" for end in (".pem", ".key")]


def _write_pair(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write(stem.with_name(stem.name + ".key"), private, 0o600)
    public = certificate.public_bytes(serialization.Encoding.PEM)
    write(stem.with_name(stem.name + ".pem"), public, 0o644)


def write(path: Path, contents: bytes, mode: int) -> None:
    """Write a new file of that mode; ConfigError if there is one or it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(contents)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}") from error
