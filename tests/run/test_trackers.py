"""Trackers have the numbers of rounds.jsonl, a resumed run continues there, none ends a run."""

from __future__ import annotations

import json
import struct
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import linear_model, small_config, three_datasets
from matplotlib.image import imread

from fedopt_flwr import ConfigError, resume, simulate
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.run import trackers
from fedopt_flwr.run.resuming import read_run
from fedopt_flwr.run.trackers import IDENTITIES, TENSORBOARD

# what the trackers' own packages do
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves this machine."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "hospital")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)


def run(folder: Path, *names: str, rounds: int = 3, **output: Any) -> Any:
    config = small_config(output={"directory": str(folder), "trackers": list(names), **output})
    config["federation"]["num_rounds"] = rounds
    data = three_datasets()
    return simulate(config, linear_model, data, data[0])


def lines(folder: Path) -> dict[int, dict[str, float]]:
    """The numbers of rounds.jsonl by round, read without this package."""
    found = {}
    for line in (folder / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        own = {k: float(v) for k, v in record.items() if isinstance(v, (int, float))}
        own |= {f"test_metrics/{k}": v for k, v in record["test_metrics"].items()}
        own |= {f"chosen/{k}": v for k, v in record["chosen"].items()}
        own |= {name: float(len(record[name])) for name in ("clients", "errors")}
        found[int(own.pop("round"))] = own
    return found


def in_tensorboard(folder: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / TENSORBOARD), {"scalars": 0})
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.setdefault(event.step, {})
            found[event.step][name] = event.value
    return found


def in_mlflow(folder: Path) -> dict[int, dict[str, float]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    identity = json.loads((folder / IDENTITIES).read_text())["mlflow"]
    found: dict[int, dict[str, float]] = {}
    for name in client.get_run(identity).data.metrics:
        for metric in client.get_metric_history(identity, name):
            found.setdefault(metric.step, {})[name] = metric.value
    return found


def log_entries(data: bytes) -> Iterator[bytes]:
    """The entries of a log in LevelDB's format, after wandb's own header of seven bytes."""
    place, entry = 7, b""
    while place < len(data):
        if 32768 - place % 32768 < 7:  # no entry begins so late in a block
            place += 32768 - place % 32768
            continue
        if len(data) - place < 7:
            return
        _, size, kind = struct.unpack_from("<IHB", data, place)
        if len(data) - place - 7 < size:  # which is still being written
            return
        entry += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def wandb_records(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in log_entries(file.read_bytes()):
        found.append(wandb_internal_pb2.Record())
        found[-1].ParseFromString(data)
    return found


def ended_wandb(folder: Path) -> Iterator[Any]:
    """All that wandb wrote of a run, in each of its attempts."""
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        # its own process writes on for a moment, up to this record
        deadline = time.monotonic() + 30
        while not any(record.HasField("exit") for record in wandb_records(file)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield from wandb_records(file)


def history_item(item: Any) -> tuple[str, Any]:
    return item.key or "/".join(item.nested_key), json.loads(item.value_json)


def in_wandb(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in ended_wandb(folder):
        items = dict(map(history_item, record.history.item))
        if "round" in items:
            own = {k: v for k, v in items.items() if isinstance(v, (int, float))}
            row = found.setdefault(int(own.pop("round")), {})  # the picture has one, too
            row |= {k: v for k, v in own.items() if not k.startswith(("_", "curves/"))}
    return found


READERS: dict[str, Callable[[Path], dict[int, dict[str, float]]]] = {
    "tensorboard": in_tensorboard,
    "mlflow": in_mlflow,
    "wandb": in_wandb,
}


def require_equal(read: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]) -> None:
    assert read.keys() == expected.keys()
    for number, values in expected.items():
        assert read[number].keys() == values.keys()
        for name, value in values.items():
            assert read[number][name] == pytest.approx(value, rel=1e-6), (number, name)


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_has_the_numbers_of_every_round(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"needs the extra '{name}'")
    run(tmp_path / "run", name)
    read = READERS[name](tmp_path / "run")
    assert len(read) == 3
    require_equal(read, lines(tmp_path / "run"))


@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_continues_there(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"needs the extra '{name}'")
    folder = tmp_path / "run"
    data = three_datasets()
    config = small_config(
        output={"directory": str(folder), "trackers": [name], "checkpoint_every": 2}
    )
    config["federation"]["num_rounds"] = 5

    class Stopped(Exception):
        pass

    class Listener:
        def on_start(self, *_: Any) -> None: ...

        def on_round(self, record: Any) -> None:
            if record.round == 3:
                raise Stopped

    from fedopt_flwr.run.simulate import simulate as simulate_with

    with pytest.raises(Stopped):
        simulate_with(config, linear_model, data, data[0], listener=Listener())
    before = (folder / IDENTITIES).read_text() if (folder / IDENTITIES).exists() else None
    resume(folder, model=linear_model, client_data=data, test_data=data[0])
    after = (folder / IDENTITIES).read_text() if (folder / IDENTITIES).exists() else None
    assert before == after
    assert (before is None) is (name == "tensorboard")
    require_equal(READERS[name](folder), lines(folder))


def test_tensorboard_has_configuration_picture_summary_and_where_the_model_is(
    tmp_path: Path,
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path / "run", "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / TENSORBOARD))
    events.Reload()
    assert events.Tags()["images"] == ["curves"]
    (text,) = events.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert json.loads(shown.strip("`json\n"))["algorithm"]["name"] == "fedavg"
    (image,) = events.Images("curves")
    drawn = imread(tmp_path / "run" / "curves.png")
    np.testing.assert_allclose(imread(BytesIO(image.encoded_image_string)), drawn, atol=1 / 255)

    def text_of(name: str) -> str:
        (event,) = events.Tensors(f"files/{name}/text_summary")
        return str(event.tensor_proto.string_val[0].decode())

    assert text_of("model.safetensors") == str(tmp_path / "run" / "model.safetensors")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert json.loads(text_of("summary.json").strip("`\n")) == summary


def test_wandb_has_configuration_picture_model_and_summary(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run(tmp_path / "run", "wandb")
    records = list(ended_wandb(tmp_path / "run"))
    (config,) = [
        {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for record in records
        if record.HasField("run")
    ]
    assert config["algorithm"]["name"] == "fedavg"
    assert config["training"]["batch_size"] == 4
    items = dict(history_item(item) for record in records for item in record.history.item)
    (folder,) = tmp_path.glob("run/wandb/offline-run-*/files")
    kept = {"curves.png": folder / items["curves/path"]}
    told = {item.path for record in records for item in record.files.files}
    for name in ("model.safetensors", "summary.json", "config.toml"):
        assert name in told
        kept[name] = folder / name
    for name, file in kept.items():
        assert file.read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_mlflow_has_configuration_files_and_state(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    own = client.get_run(json.loads((tmp_path / "run" / IDENTITIES).read_text())["mlflow"])
    assert own.info.status == "FINISHED"
    assert client.get_experiment(own.info.experiment_id).name == "hospital"
    assert own.data.params["training.batch_size"] == "4"
    names = {file.path for file in client.list_artifacts(own.info.run_id)}
    assert names == {"curves.png", "model.safetensors", "summary.json", "config.toml"}


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    expected = run(tmp_path / "plain").parameters
    calls = []

    def add(self: Any, number: int, values: dict[str, float]) -> None:
        calls.append(number)
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(trackers._TensorBoard, "add", add)
    with pytest.warns(FedoptWarning, match=r"'tensorboard' failed: ConnectionError: the server is"):
        result = run(tmp_path / "run", "tensorboard")
    np.testing.assert_array_equal(result.parameters, expected)
    assert calls == [1]


@pytest.mark.parametrize("missing", READERS)
def test_a_tracker_that_is_not_installed_is_named_before_the_run(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ModuleSpec("there", None, origin="there")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == missing else there)
    with pytest.raises(ConfigError) as refused:
        run(tmp_path / "run", *READERS)
    assert refused.value.problems == [
        f"output.trackers: {missing!r} needs a package that is not installed; run "
        f"`pip install 'fedopt-flwr[{missing}]'`, or leave it out"
    ]
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert missing in project["project"]["optional-dependencies"]
    assert not (tmp_path / "run").exists()


def test_trackers_need_a_folder_and_a_name() -> None:
    with pytest.raises(ConfigError, match=r"output.trackers: got \['tensorboard'\] without"):
        simulate(small_config(output={"trackers": ["tensorboard"]}), linear_model, three_datasets())
    with pytest.raises(ConfigError, match=r"output.trackers.*got 'comet'"):
        simulate(small_config(output={"trackers": ["comet"]}), linear_model, three_datasets())


def test_a_run_that_ends_before_its_first_round_leaves_its_folder_free(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = small_config(output={"directory": str(tmp_path / "run"), "trackers": ["tensorboard"]})

    class Listener:
        def on_start(self, *_: Any) -> None:
            raise KeyboardInterrupt

        def on_round(self, record: Any) -> None: ...

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            simulate(config, linear_model, three_datasets(), listener=Listener())
    assert simulate(config, linear_model, three_datasets()).summary["rounds"] == 2


def test_trackers_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    """As where it continues on a machine that has none; the number of rounds may not."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    run(folder, "tensorboard", checkpoint_every=2)
    (folder / "summary.json").unlink()  # as if it had been stopped in its last round
    found, _ = read_run(folder, None, ["output.trackers=[]"])
    assert found.output.trackers == ()
    with pytest.raises(ConfigError, match=r"federation.num_rounds is 9"):
        read_run(folder, None, ["federation.num_rounds=9"])


def test_a_tracker_that_failed_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")

    def add(*_: Any) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(trackers._MLflow, "add", add)
    with pytest.warns(FedoptWarning, match="'mlflow' failed"):
        run(tmp_path / "run", "mlflow")
    identity = json.loads((tmp_path / "run" / IDENTITIES).read_text())["mlflow"]
    assert mlflow.MlflowClient().get_run(identity).info.status == "KILLED"


def test_wandb_asks_nobody_to_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    started = time.monotonic()
    with pytest.warns(FedoptWarning, match="'wandb' failed: RuntimeError: nobody is logged in"):
        result = run(tmp_path / "run", "wandb")
    assert result.summary["rounds"] == 3
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("a/b c", "a/b c"),
        ("a//b/", "a/b"),
        ("../x", "x"),
        ("é%", "__"),
        (".", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_of_metrics_are_those_that_mlflow_takes(name: str, plain: str) -> None:
    assert trackers._plain(name) == plain


def test_a_tracker_is_named_once() -> None:
    names = ["mlflow", "mlflow"]
    with pytest.raises(
        ConfigError, match=r"output.trackers: got \['mlflow', 'mlflow'\]; each must"
    ):
        simulate(small_config(output={"trackers": names}), linear_model, three_datasets())
