"""What verbs do with a console: text that it cannot show, warnings, tracebacks, a run's log."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fedopt_flwr.cli.console import spell_what_cannot_be_shown, steady_console, warnings_as_lines
from fedopt_flwr.errors import FedoptWarning

QUICK = ["--set", "federation.num_rounds=2", "--set", "model.options.hidden=[8]"]
OWN_RULE = """
from fedopt_flwr.algorithms.fedavg import FedAvg

CALLS = []

class Mine(FedAvg):
    name = "mine"

    def server_update(self, state, replies):
        CALLS.append(1)
        if len(CALLS) > 1:
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise ValueError("my mistake") from error
        return super().server_update(state, replies)
"""
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0"}


def fedopt(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "fedopt_flwr", *arguments],
        cwd=cwd,
        capture_output=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONIOENCODING"} | (environment or {}),
        timeout=120,
    )


def logged(result: subprocess.CompletedProcess[bytes]) -> str:
    return (result.stdout + result.stderr).decode("latin-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": name} for name in ("latin-1", "ascii", "cp1252")] + [C_LOCALE],
    ids=["latin-1", "ascii", "cp1252", "C"],
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", *QUICK],
        ["algorithms", "padamfed_vr"],
        ["--help"],
        ["partition", "--set", "federation.num_clients=6"],
    ],
    ids=["simulate", "algorithms", "help", "partition"],
)
def test_a_console_shows_what_it_can(
    tmp_path: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    result = fedopt(*arguments, cwd=tmp_path, environment=environment)
    assert result.returncode == 0, logged(result)
    assert "Traceback" not in logged(result)
    if arguments[0] in ("simulate", "algorithms"):
        assert b"eta" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["launch", "--clients", "5", "--processes", "2"],
        ["compare", "--algorithms", "fedavg,padamfed"],
        ["verify", "fedavg"],
        ["doctor"],
    ],
    ids=["launch", "compare", "verify", "doctor"],
)
@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, C_LOCALE])
def test_tables_of_longer_runs_need_no_unicode(
    tmp_path: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    (tmp_path / "fed.toml").write_text(
        "[federation]\nnum_clients = 5\nnum_rounds = 2\n[output]\ndirectory = 'run'\n"
    )
    if arguments[0] in ("compare", "launch"):
        arguments = [arguments[0], "fed.toml", *arguments[1:]]
    result = fedopt(*arguments, cwd=tmp_path, environment=environment)
    assert result.returncode == 0, logged(result)
    assert result.stdout.isascii()
    for log in tmp_path.glob("run/logs/*"):
        assert "client" in log.read_text(encoding="utf-8")


def test_letters_are_spelled_where_an_encoding_lacks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    spell_what_cannot_be_shown()
    print("η = 1/(K√T), γ = (SK)^¼, Δ̄, c⁰ − 1 … 日 \udce9")
    assert shown.getvalue() == b"eta = 1/(Ksqrt T), gamma = (SK)^1/4, Delta, c0 - 1 ... ? ?\n"


def test_a_warning_is_one_line_and_shown_once_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # two runs
        with warnings_as_lines():
            for _ in range(3):
                warnings.warn("look\nout", FedoptWarning, stacklevel=1)
                with warnings.catch_warnings():  # as libraries do; Python then forgets what it said
                    warnings.simplefilter("default")
            warnings.warn("of another package", DeprecationWarning, stacklevel=1)
            warnings.warn("of another package", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: look out\n" * 2


def test_a_server_app_prints_warnings_as_lines_too(tmp_path: Path) -> None:
    """`flwr run` calls no `main` of ours; what it uses is the display."""
    program = (
        "import warnings\n"
        "from fedopt_flwr.cli.show import RunDisplay\n"
        "from fedopt_flwr.errors import FedoptWarning\n"
        "with RunDisplay():\n"
        "    for text in ('a', 'a', 'b'):\n"
        "        warnings.warn(text, FedoptWarning, stacklevel=1)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stderr == "warning: a\nwarning: b\n"


@pytest.mark.slow
def test_compare_warns_once_for_each_of_its_runs(tmp_path: Path) -> None:
    rules = ("--algorithms", "padamfed", "--seeds", "0,1")
    result = fedopt("compare", *rules, *QUICK, cwd=tmp_path)
    lines = result.stderr.decode().splitlines()
    assert result.returncode == 0, lines
    assert len(lines) == 2
    assert all(line.startswith("warning: algorithm.momentum: the theorem's") for line in lines)


def run_own_rule(folder: Path, *more: str) -> subprocess.CompletedProcess[bytes]:
    (folder / "mine.py").write_text(OWN_RULE)
    own = ("--set", "algorithm.name=mine:Mine", "--set", "output.directory=run")
    return fedopt("simulate", *own, *QUICK, *more, cwd=folder)


@pytest.mark.slow
def test_a_failed_run_leaves_the_traceback_in_its_log_and_not_on_the_console(
    tmp_path: Path,
) -> None:
    result = run_own_rule(tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in logged(result)
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert "Traceback" in log
    assert "ZeroDivisionError" in log  # the cause of the cause
    assert 'raise ValueError("my mistake") from error' in log


@pytest.mark.slow
def test_debug_shows_the_traceback_and_its_causes_before_the_error(tmp_path: Path) -> None:
    result = run_own_rule(tmp_path, "--debug")
    text = result.stderr.decode()
    assert result.returncode == 1
    assert "ZeroDivisionError" in text
    assert 'raise ValueError("my mistake") from error' in text
    last = text.splitlines()[-1]
    assert last.startswith(
        "error: algorithm.name: 'mine:Mine' failed: ValueError: my mistake (mine"
    )


@pytest.mark.slow
def test_a_run_without_failures_has_no_log(tmp_path: Path) -> None:
    result = fedopt("simulate", *QUICK, "--set", "output.directory=run", cwd=tmp_path)
    assert result.returncode == 0, logged(result)
    assert not (tmp_path / "run" / "run.log").exists()
    again = fedopt("simulate", *QUICK, "--set", "output.directory=run", cwd=tmp_path)
    assert again.returncode == 2
    assert not (tmp_path / "run" / "run.log").exists()  # the folder is another run's


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--set", "data.name=npz", "--set", "data.path=."],
        ["launch", "--set", "data.name=npz", "--set", "data.path=."],
        ["server", "--insecure", "--set", "data.name=npz", "--set", "data.path=."],
        ["client", "--insecure"],
        ["compare", "--algorithms", "fedavg", "--set", "data.name=npz", "--set", "data.path=."],
        ["verify", "nothing:there"],
        ["partition", "--set", "data.name=npz", "--set", "data.path=."],
        ["doctor", "--set", "data.name=npz", "--set", "data.path=."],
    ],
    ids=lambda arguments: arguments[0],
)
def test_debug_is_an_option_of_every_verb_that_runs_something(
    tmp_path: Path, arguments: list[str]
) -> None:
    quiet = fedopt(*arguments, cwd=tmp_path)
    loud = fedopt(*arguments, "--debug", cwd=tmp_path)
    assert quiet.returncode == loud.returncode
    assert quiet.returncode in (1, 2)
    assert b"Traceback" not in quiet.stderr + quiet.stdout
    assert b"Traceback" in loud.stderr
    assert b"Traceback" not in loud.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_launch_writes_tracebacks_of_clients_into_their_logs_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nimport torch\n"
        "def load(num_clients, seed):\n"
        "    if 'OMP_NUM_THREADS' in os.environ:  # as only a client of a launch has it\n"
        "        raise KeyError('my mistake')\n"
        "    data = torch.utils.data.TensorDataset(torch.randn(20, 5), torch.arange(20) % 3)\n"
        "    return [data for _ in range(num_clients)], data\n"
    )
    own = ("--set", "data.name=mine:load", "--set", "output.directory=run")
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    for debug in ((), ("--debug",)):
        result = subprocess.run(
            [sys.executable, "-m", "fedopt_flwr", "launch", "--clients", "5", *own, *QUICK, *debug],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
        )
        assert result.returncode in (1, 2)
        assert "my mistake" in result.stderr
        assert ("Traceback" in result.stderr) is bool(debug)


def test_the_log_of_the_package_is_silent_without_debug() -> None:
    program = (
        "import atexit, logging, sys\n"
        "sys.argv = ['fedopt', 'algorithms', 'fedavg']\n"
        "from fedopt_flwr.cli import main\n"
        "log = logging.getLogger('fedopt_flwr.flower')\n"
        "atexit.register(lambda: log.error('of a client'))\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0
    assert "of a client" not in result.stderr


class Full(io.StringIO):
    """A file on a disk that is full for a while."""

    is_full = False

    def flush(self) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")

    def write(self, text: str) -> int:
        self.flush()
        return super().write(text)


def test_a_full_disk_costs_lines_and_says_so_once() -> None:
    file = Full()
    console = steady_console(file)
    console.print("one")
    file.is_full = True
    for word in ("two", "three"):
        console.print(word)
    file.is_full = False
    for word in ("four", "five"):
        console.print(word)
    assert file.getvalue().splitlines() == [
        "one",
        "(lines are missing here: [Errno 28] No space left on device)",
        "four",
        "five",
    ]


@pytest.mark.slow
def test_a_full_disk_changes_no_exit_code(tmp_path: Path) -> None:
    run = ["simulate", "--set", f"output.directory={tmp_path / 'run'}", *QUICK]
    for arguments, code in ((run, 0), (["simulate", "nowhere.toml"], 2), (["algorithms"], 1)):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "fedopt_flwr", *arguments]
            ended = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, timeout=120)
        assert ended.returncode == code
    assert (tmp_path / "run" / "model.safetensors").exists()
