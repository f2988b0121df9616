"""The command as a user runs it: real processes, exit codes, what is printed, what is left."""

from __future__ import annotations

import importlib
import json
import platform
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import FEDOPT, QUICK, InProcess, fedopt, refused

WIDE = ["--set", "model.options.hidden=[9000]"]


def test_simulate_prints_header_and_rounds_and_writes_its_files(tmp_path: Path) -> None:
    more = ("--algorithm", "padamfed", "--set", "output.directory=out")
    result = fedopt("simulate", *more, *QUICK, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "digits, mlp with 610 parameters, 20 clients" in result.stdout
    assert "padamfed: " in result.stdout
    assert "η = 0.05" in result.stdout  # 1/(10·√4)
    assert "γ = η_g·η·K = 0.9402" in result.stdout  # 50^¼/4^¾
    assert "round 4/4" in result.stdout
    assert "warning: algorithm.momentum: the theorem's" in result.stderr
    installed = json.loads((tmp_path / "out" / "versions.json").read_text())
    assert installed["Python"] == platform.python_version()
    assert installed["torch"].split("+")[0] == torch.__version__.split("+")[0]
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {
        "config.toml",
        "versions.json",
        "rounds.jsonl",
        "summary.json",
        "model.safetensors",
        "curves.png",
    }


@pytest.mark.slow
def test_a_run_without_a_directory_gets_one_under_runs(tmp_path: Path) -> None:
    result = fedopt("simulate", "--algorithm", "fedavg", *QUICK, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-fedavg-digits")
    assert f"results in runs/{folder.name}" in result.stdout


@pytest.mark.slow
def test_python_and_command_give_the_same_model(tmp_path: Path) -> None:
    from fedopt_flwr import RunConfig, simulate

    settings = ["algorithm.name=scaffold_m", "federation.num_rounds=3"]
    simulate(RunConfig.from_file(None, [*settings, f"output.directory={tmp_path / 'python'}"]))
    options = [part for s in [*settings, "output.directory=command"] for part in ("--set", s)]
    assert fedopt("simulate", *options, "--workers", "2", cwd=tmp_path).returncode == 0
    one, other = (tmp_path / d / "model.safetensors" for d in ("python", "command"))
    assert one.read_bytes() == other.read_bytes()


BAD_INPUT = {
    "unknown algorithm": (
        ["--algorithm", "scafold"],
        ["algorithm.name", "'scafold'", "did you mean 'scaffold'?"],
    ),
    "unknown key": (
        ["--set", "federation.num_round=3"],
        ["'num_round'", "did you mean 'num_rounds'?"],
    ),
    "S > N": (
        ["--set", "federation.clients_per_round=99"],
        ["clients_per_round: got 99", "num_clients (20)"],
    ),
    "no steps": (["--set", "training.local_steps=0"], ["training.local_steps: got 0"]),
    "momentum": (["--set", "algorithm.momentum=1.5"], ["algorithm.momentum: got 1.5"]),
    "batch size": (["--set", "training.batch_size=-1"], ["training.batch_size: got -1"]),
    "data folder": (
        ["--set", "data.name=mnist", "--set", "data.path=/nowhere"],
        ["data.path: '/nowhere' is not a folder"],
    ),
    "import path": (
        ["--set", "model.name=no_such:thing"],
        ["model.name: cannot import 'no_such:thing'"],
    ),
    "no file": (["absent.toml"], ["'absent.toml' is not a file"]),
    "not TOML": (["broken.toml"], ["'broken.toml' is not TOML", "Invalid value"]),
    "no data": (
        ["--set", "data.partition.min_examples=0", "--set", "data.partition.concentration=0.01"],
        ["client ", "has no data"],
    ),
    "nothing to train": (["--set", "model.name=torch.nn:ReLU"], ["no trainable parameter"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_ends_with_code_2_and_leaves_nothing(
    case: str, tmp_path: Path, in_process: InProcess
) -> None:
    arguments, texts = BAD_INPUT[case]
    (tmp_path / "broken.toml").write_text("federation = [")
    result = in_process("simulate", *arguments, "--set", "output.directory=out")
    refused(result, "error:", *texts)
    assert [p.name for p in tmp_path.iterdir()] == ["broken.toml"]


@pytest.mark.slow
def test_a_run_in_which_no_reply_counts_ends_with_code_1_and_the_last_error(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Sensor(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer, self.calls = torch.nn.Linear(64, 10), 0\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        "        if self.training and self.calls > 1:\n"
        "            raise ValueError('sensor 7 is blind')\n"
        "        return self.layer(x.flatten(1))\n"
    )
    options = ["--algorithm", "fedavg", "--set", "model.name=own:Sensor"]
    rounds = ["--set", "federation.num_rounds=2", "--set", "output.directory=out"]
    result = fedopt("simulate", *options, *rounds, cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "not counted: ValueError: sensor 7 is blind" in result.stdout
    assert "warning: no client's reply was counted in any round" in result.stderr
    assert "error: no reply was counted, so nothing was trained" in result.stderr
    assert len((tmp_path / "out" / "rounds.jsonl").read_text().splitlines()) == 2
    own = ["--set", "model.name=own:Sensor", "--set", "output.directory=all"]
    compared = fedopt("compare", "--algorithms", "fedavg", *own, *rounds[:2], cwd=tmp_path)
    assert compared.returncode == 1
    assert "error: fedavg: no reply was counted" in compared.stderr
    assert (tmp_path / "all" / "comparison.json").exists()


def test_runs_of_one_second_do_not_share_a_folder() -> None:
    from fedopt_flwr.cli.options import new_folder

    assert new_folder("fedavg-digits") != new_folder("fedavg-digits")


def test_several_problems_are_printed_together(tmp_path: Path) -> None:
    result = fedopt("simulate", "--set", "federation.seed=-1", "--set", "data.nam=x", cwd=tmp_path)
    refused(result, "federation.seed: got -1", "data.nam: unknown 'nam'")
    assert result.stderr.count("error:") == 2


def test_an_output_folder_that_cannot_be_written_is_refused(in_process: InProcess) -> None:
    result = in_process("simulate", "--set", "output.directory=/proc/run", *QUICK)
    refused(result, "output.directory: cannot write '/proc/run'")


@pytest.mark.slow
def test_resume_goes_on_and_takes_no_other_configuration(tmp_path: Path) -> None:
    options = ["--set", "output.directory=out", "--set", "output.checkpoint_every=3", *QUICK]
    assert fedopt("simulate", *options, cwd=tmp_path).returncode == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    (tmp_path / "out" / "model.safetensors").unlink()
    result = fedopt("simulate", "--resume", "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    refused(
        fedopt("simulate", "--resume", "out", "--algorithm", "fedavg", cwd=tmp_path), "--resume"
    )


def test_algorithms_shows_one_rule_in_full(tmp_path: Path) -> None:
    result = fedopt("algorithms", "padamfed", cwd=tmp_path)
    assert result.returncode == 0
    for text in ("ICLR 2025", "Algorithm 1", "√(SK/T)", "control_variate_change", "Deviations:"):
        assert text in result.stdout
    refused(fedopt("algorithms", "padamfd", cwd=tmp_path), "did you mean 'padamfed'?")
    one = json.loads(fedopt("algorithms", "scaffold_m", "--json", cwd=tmp_path).stdout)
    assert [rule["name"] for rule in one] == ["scaffold_m"]
    assert (len(one[0]["down"]), len(one[0]["up"])) == (2, 1)
    assert one[0]["fields"]["momentum"]["symbol"] == "β"


@pytest.mark.slow
def test_partition_prints_and_draws_the_histogram(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[federation]\nnum_clients = 6\n")
    result = fedopt("partition", "run.toml", "--plot", "p.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    rows = {line[0]: [int(n.replace("·", "0")) for n in line[1:]] for line in lines[1:8]}
    assert list(rows) == ["0", "1", "2", "3", "4", "5", "all"]
    assert all(counts[0] == sum(counts[1:]) for counts in rows.values())
    assert rows["all"] == [
        sum(column) for column in zip(*[rows[str(i)] for i in range(6)], strict=True)
    ]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    refused(fedopt("partition", "--plot", "/proc/p.png", cwd=tmp_path), "--plot: cannot write")
    (tmp_path / "folder").mkdir()
    into = fedopt("partition", "--plot", "folder", cwd=tmp_path)
    refused(into, "--plot: cannot write 'folder': it is a folder; name a file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "p.png", "run.toml"]
    none = [f"data.partition.{key}" for key in ("min_examples=0", "concentration=0.01")]
    options = [part for setting in none for part in ("--set", setting)]
    result = fedopt("partition", "--plot", "p.png", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert any(line.split()[1:] == ["0", *"·" * 10] for line in result.stdout.splitlines())


def test_a_run_may_be_shown_from_a_thread() -> None:
    """Flower's local simulation runs a ServerApp so, where no signal can be handled."""
    from concurrent.futures import ThreadPoolExecutor

    from fedopt_flwr.cli.show import RunDisplay

    def show() -> bool:
        with RunDisplay():
            return True

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(show).result()
    with RunDisplay():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_doctor_reports_and_its_code_says_whether_a_run_would_start(in_process: InProcess) -> None:
    good = in_process("doctor")
    assert good.returncode == 0, good.stdout
    for text in (
        "packages",
        "flwr 1.",
        "digits",
        "autofed on digits with mlp (15,010 parameters)",
    ):
        assert text in good.stdout
    bad = in_process("doctor", "--set", "data.name=mnist", "--set", "data.path=/nowhere")
    assert bad.returncode == 1
    assert "problem" in bad.stdout
    assert "data.path: '/nowhere' is not a folder" in bad.stdout
    bad = in_process("doctor", "--set", "stop.metric=f1")
    assert bad.returncode == 1
    assert "stop.metric: unknown 'f1'" in bad.stdout


def test_doctor_judges_a_site_by_its_own_data(
    in_process: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ["--set", "data.name=npz", "--set", "data.partition.kind=whole"]
    monkeypatch.setenv("FEDOPT_DATA", str(tmp_path))
    np.savez(tmp_path / "test.npz", x=np.zeros((4, 3), np.float32), y=np.arange(4))
    bad = in_process("doctor", *whole)
    assert bad.returncode == 1
    assert f"data.path: '{tmp_path}' holds no train.npz" in bad.stdout
    np.savez(tmp_path / "train.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) % 4)
    good = in_process("doctor", *whole)
    assert good.returncode == 0, good.stdout
    assert "a client with 40 examples of its own (npz) on cpu" in good.stdout


def test_doctor_names_what_is_not_installed(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = importlib.import_module("fedopt_flwr.cli.doctor")
    monkeypatch.setattr(doctor, "_PACKAGES", ("flwr", "flwr-datasets-not"))
    shown = in_process("doctor").stdout
    assert "flwr 1." in shown
    assert "no flwr-datasets-not" in shown


@pytest.mark.parametrize(
    ("ending", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_simulation_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, ending: signal.Signals, code: int
) -> None:
    endless = ["--algorithm", "fedavg", "--set", "federation.num_rounds=1000000"]
    files = [
        "--set",
        "output.directory=run",
        "--set",
        "output.checkpoint_every=3",
        "--set",
        "output.keep=1000",
    ]
    process = subprocess.Popen(
        [FEDOPT, "simulate", *endless, *files],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoint-000003.safetensors").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(ending)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert "continue with --resume run" in errors


@pytest.mark.slow
def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    """A pseudo-terminal, as a person has one."""
    import pty

    read, write = pty.openpty()
    process = subprocess.Popen(
        [FEDOPT, "simulate", "--algorithm", "fedavg", *QUICK],
        cwd=tmp_path,
        stdout=write,
        stderr=write,
        env={**__import__("os").environ, "TERM": "xterm-256color", "COLUMNS": "160"},
    )
    import os

    os.close(write)
    seen = b""
    while True:
        try:
            chunk = os.read(read, 65536)
        except OSError:
            break
        if not chunk:
            break
        seen += chunk
    assert process.wait(60) == 0
    text = seen.decode(errors="replace")
    assert "4/4" in text
    assert "accuracy" in text
    assert "ETA" in text
    assert "━" in text


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["server"], ["--certificate and --key: give both", "or --insecure"]),
        (["server", "--insecure", "--address", "here"], ["--address: got 'here'", "HOST:PORT"]),
        (["server", "--insecure", "--key", "k"], ["--insecure: uses no certificates"]),
        (
            ["server", "--certificate", "c.pem", "--key", "c.key"],
            ["--certificate: 'c.pem' holds no certificate", "without --client-ca any client"],
        ),
        (["server", "--insecure", "--set", "federation.clients=3"], ["did you mean"]),
        (["client", "--insecure"], ["--client-id, --client-ids or --one-of: give one"]),
        (["client", "--insecure", "--one-of", "site"], ["--one-of: got 'site'; must be numbers"]),
        (["client", "--insecure", "--client-id", "1-2"], ["several clients go with --client-ids"]),
        (["client", "--insecure", "--client-ids", "3-1"], ["a range must go upwards"]),
        (["client", "--insecure", "--client-ids", "0-9999999999"], ["at most 100000 ids"]),
        (
            ["client", "--insecure", "--client-id", "0", "--server", "127.0.0.1:²"],
            ["--server: got '127.0.0.1:²'; must be HOST:PORT"],
        ),
        (
            ["client", "--insecure", "--client-id", "0", "--state-dir", "/dev/null/x"],
            ["--state-dir: got '/dev/null/x'; '/dev/null' is no folder"],
        ),
        (["server", "--insecure", "--resume", "gone"], ["--resume: 'gone' is not a folder"]),
        (["doctor", "gone.toml"], ["config file: 'gone.toml' is not a file"]),
        *(
            ([verb, "--algorithm", "fedavg", "--set", given], ["give one of the two"])
            for verb in ("simulate", "launch")
            for given in ("algorithm.name=scaffold", "algorithm.name = scaffold")
        ),
        (["simulate", "--gpus-per-client", "1"], ["--gpus-per-client: only with --engine ray"]),
        (["client", "--client-id", "1"], ["--ca: give the CA", "or --insecure"]),
        (["client", "--client-id", "1", "--ca", "no.pem"], ["--ca: 'no.pem' holds no certificate"]),
        (
            ["client", "--client-id", "1", "--ca", "a", "--key", "b"],
            ["--certificate and --key: give both or neither"],
        ),
        (["client", "--client-id", "1", "--insecure", "--server", "x:1:y"], ["must be HOST:PORT"]),
        (["launch", "--clients", "3"], ["federation.clients_per_round: got 5"]),
        (["launch", "--resume", "gone"], ["--resume: 'gone' is not a folder"]),
        (
            [
                "launch",
                "--set",
                "transport.max_message_mb=1",
                "--set",
                "model.options.hidden=[9000]",
            ],
            ["transport.max_message_mb: got 1; autofed with", "set it to 6 or more"],
        ),
        (["certs", "client", "0"], ["no authority in 'certs'", "run `fedopt certs init`"]),
        (["certs", "init", "--host", "ä"], ["--host: got 'ä'"]),
    ],
)
def test_bad_input_for_a_federation_of_processes(
    tmp_path: Path, in_process: InProcess, arguments: list[str], texts: list[str]
) -> None:
    refused(in_process(*arguments), *texts)
    assert list(tmp_path.iterdir()) == []


def test_certs_makes_what_server_and_clients_need(tmp_path: Path) -> None:
    result = fedopt("certs", "init", "--host", "fl.example.org", "--host", "10.0.0.1", cwd=tmp_path)
    assert result.stdout.split() == [
        "certs/ca.pem",
        "certs/ca.key",
        "certs/server.pem",
        "certs/server.key",
    ]
    assert fedopt("certs", "client", "0-24", cwd=tmp_path).stdout.split() == [
        "certs/0-24.pem",
        "certs/0-24.key",
    ]


def test_doctor_names_the_limit_that_messages_would_break(in_process: InProcess) -> None:
    result = in_process("doctor", "--set", "transport.max_message_mb=1", *WIDE)
    assert result.returncode == 1
    assert "transport.max_message_mb: got 1" in result.stdout
