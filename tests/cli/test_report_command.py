"""`fedopt report` and `fedopt watch` as a user runs them: what they say and refuse."""

from __future__ import annotations

import json
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers import write_run_at_work
from processes import InProcess, Process, Processes, fedopt, refused

from fedopt_flwr.rounds.record import RoundRecord


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run at work without data that would have to be loaded."""
    write_run_at_work(tmp_path / "run", RoundRecord(1, [0]), data={"name": "own:load"})
    return tmp_path / "run"


def answer(url: str, host: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    try:
        with direct(request, timeout=30) as found:
            return found.status, found.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def watched(processes: Processes, *more: object) -> tuple[Process, str]:
    watch = processes.start("watch", "watch", "run", "--address", "127.0.0.1:0", *more)
    watch.wait_for("from another machine: ssh -L")
    return watch, watch.log.split(" at ")[1].split(" until ")[0]


def test_a_page_is_written_and_its_own_place_is_written_again(
    run: Path, in_process: InProcess
) -> None:
    for _ in range(2):
        ended = in_process("report", "run", "--output", "page.html")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("1 run in page.html (4.9 MB); open it")
    assert b"1 of 50 rounds are over" in Path("page.html").read_bytes()


def test_a_file_of_somebody_else_stays(run: Path, in_process: InProcess) -> None:
    Path("mine.html").write_text("<!DOCTYPE html><p>mine")
    ended = in_process("report", "run", "--output", "mine.html")
    refused(ended, "--output: got 'mine.html', which is there and is no page of `fedopt report`")
    assert Path("mine.html").read_text().endswith("mine")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "--output", "page.pdf"], "--output: got 'page.pdf'; must end with .html or .htm"),
        (["run", "--output", "no/page.html"], "there is no folder 'no'"),
        (["run", "--output", "folder.html"], "it is a folder; name"),
        (["nothing"], "RUN: got 'nothing'; there is no such folder"),
        (["folder.html"], "neither it nor a folder in it holds a run"),
    ],
)
def test_bad_input_is_refused(
    run: Path, in_process: InProcess, arguments: list[str], text: str
) -> None:
    Path("folder.html").mkdir()
    refused(in_process("report", *arguments), text)
    assert not Path("report.html").exists()


@pytest.mark.parametrize(("verb", "missing"), [("report", "plotly.offline"), ("watch", "uvicorn")])
def test_a_missing_package_names_the_extra(
    run: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch, verb: str, missing: str
) -> None:
    for module in [m for m in sys.modules if m.startswith("fedopt_flwr.run.report.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    ended = in_process(verb, "run")
    refused(ended, f"fedopt {verb}: needs {missing}", "pip install 'fedopt-flwr[report]'")


@pytest.mark.slow
def test_watch_serves_only_its_page_to_this_machine_until_it_is_stopped(
    run: Path, processes: Processes
) -> None:
    watch, url = watched(processes)
    status, page = answer(url)
    assert (status, b"1 of 50 rounds are over" in page) == (200, True)
    assert answer(f"{url}content?seen=older")[0] == 200
    for foreign in ("../run/config.toml", "%2e%2e/run/config.toml", "run/config.toml"):
        assert answer(url + foreign)[0] == 404
    assert answer(url, host="rebound.example")[0] == 400
    assert answer(url, host=f"localhost:{url.rpartition(':')[2].strip('/')}")[0] == 200
    (run / "rounds.jsonl").rename(run / "moved")
    status, text = answer(f"{url}content?seen=older")
    assert (status, b"holds a run" in text) == (503, True)
    watch.process.send_signal(signal.SIGINT)
    watch.ended(20)
    assert "Traceback" not in watch.log


@pytest.mark.slow
def test_watch_answers_at_any_address_of_this_machine_alone_and_follows_a_comparison(
    run: Path, processes: Processes, tmp_path: Path
) -> None:
    watch = processes.start("watch", "watch", tmp_path, "--address", "127.0.0.2:0")
    watch.wait_for("from another machine: ssh -L")
    url = watch.log.split(" at ")[1].split(" until ")[0]
    state = json.loads(answer(f"{url}content")[1])["state"]
    assert len(state) <= 16  # it is part of the address, however many runs there are
    assert answer(f"{url}content?seen={state}")[0] == 204
    failed = [{"algorithm": "stem", "error": "no memory"}]
    (tmp_path / "comparison.json").write_text(json.dumps(failed))
    status, content = answer(f"{url}content?seen={state}")
    assert (status, b"stem could not be run: no memory" in content) == (200, True)


@pytest.mark.slow
def test_watch_refuses_a_port_in_use_and_warns_of_other_readers(
    run: Path, processes: Processes, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = fedopt("watch", "run", "--address", f"127.0.0.1:{port}", cwd=tmp_path)
    refused(ended, f"--address: cannot listen on 127.0.0.1 port {port}")
    refused(fedopt("watch", "run", "--address", "8050", cwd=tmp_path), "must be HOST:PORT")
    refused(fedopt("watch", "no", cwd=tmp_path), "RUN: got 'no'; there is no such folder")
    watch = processes.start("all", "watch", "run", "--address", "0.0.0.0:0")
    watch.wait_for("until Ctrl-C")
    assert "anyone who reaches 0.0.0.0:0 can read this run" in watch.log
    assert "ssh -L" not in watch.log
