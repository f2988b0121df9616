"""How addresses may be written, and what a user hears of those that gRPC would retry for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedopt_flwr import ConfigError
from fedopt_flwr.cli import main
from fedopt_flwr.cli.doctor import describe_proxy
from fedopt_flwr.cli.options import require_address


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("http://h:80", "write h:80"),
        ("https://fl.example.org:8080/", "write fl.example.org:8080"),
        ("grpc://h:80/path", "write h:80"),
        ("h:80/", "write h:80"),
        ("h", "add the port"),
        ("http://h", "add the port"),
        ("unix:/tmp/socket", "sockets of the file system are not supported"),
        ("unix:///tmp/socket", "sockets of the file system are not supported"),
        ("2001:db8::1", "put an IPv6 address into brackets"),
        ("::1:80", "put an IPv6 address into brackets"),
        *(
            (text, "name the host and the port alone")
            for text in ("", ":80", "h:", "h:0", "h:99999", "h:x", "x:1:y", "u@h:80", "h:80 ")
        ),
        ("dns:///h:80", "name the host and the port alone"),
        ("[::1]", "name the host and the port alone"),
    ],
)
def test_what_is_no_address_is_refused_with_the_remedy(address: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=r"--server: got .*; must be HOST:PORT") as caught:
        require_address("--server", address, lowest_port=1)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    "address", ["h:80", "10.0.0.7:1", "[::1]:8080", "[fe80::1%eth0]:1", "bücher.example:65535"]
)
def test_hosts_and_ports_are_taken(address: str) -> None:
    require_address("--server", address, lowest_port=1)
    require_address("--address", "0.0.0.0:0", lowest_port=0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["client", "--server", "http://h:80", "--client-id", "1", "--insecure"],
        ["server", "--address", "http://h:80", "--insecure"],
    ],
)
def test_both_ends_refuse_a_url_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedopt", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "got 'http://h:80'; must be HOST:PORT" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "proxy", "texts"),
    [
        ([], None, ["none; `fedopt client` connects directly"]),
        (["http_proxy"], None, ["http_proxy: set, but not used", "set transport.proxy"]),
        (["HTTPS_PROXY", "grpc_proxy"], None, ["grpc_proxy, HTTPS_PROXY: set, but not used"]),
        ([], "http://p:3128", ["`fedopt client` uses http://p:3128 (transport.proxy)"]),
        (["all_proxy"], "http://p:3128", ["uses http://p:3128", "all_proxy: set, but not used"]),
    ],
)
def test_doctor_says_which_proxy_would_be_used(
    monkeypatch: pytest.MonkeyPatch, variables: list[str], proxy: str | None, texts: list[str]
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in variables:
        monkeypatch.setenv(name, "http://elsewhere:1")
    said = describe_proxy(proxy)
    for text in texts:
        assert text in said
