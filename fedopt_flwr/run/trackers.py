"""Trackers that people look at runs with: TensorBoard, MLflow and Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError, FedoptWarning
from ..files import replacing
from ..own_code import described
from ..rounds.record import RoundRecord, as_json

TENSORBOARD = "tensorboard"  # folder in a run's
IDENTITIES = "trackers.json"  # file in a run's: where a resumed run continues
_PROJECT = "fedopt-flwr"
_SECONDS = 30  # that a tracker may keep a run waiting
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_LONGEST_NAME = 250


class Tracker(Protocol):
    """One place that hears of a run; each of its methods may raise anything."""

    identity: str  # by which a resumed run finds it again; "" where it needs none

    def add(self, number: int, values: Mapping[str, float]) -> None: ...

    def close(self, files: Sequence[Path], *, is_done: bool) -> None: ...


class Trackers:
    """Tells the trackers of a run in `directory`, which continues without one that fails."""

    def __init__(
        self, names: Sequence[str], directory: Path, config: Mapping[str, Any], next_round: int
    ) -> None:
        """Open them; `next_round` is the first whose record is still to come."""
        self._open: dict[str, Tracker] = {}
        identities = _read_identities(directory)
        for name in names:
            try:
                known = identities.get(name, "")
                self._open[name] = _KINDS[name](directory, config, known, next_round)
            except Exception as error:
                _warn(name, error)
        identities |= {n: tracker.identity for n, tracker in self._open.items() if tracker.identity}
        if identities:
            with replacing(directory / IDENTITIES) as file:
                file.write(json.dumps(identities).encode())

    def add(self, record: RoundRecord) -> None:
        values = numbers_of(record) if self._open else {}
        for name, tracker in list(self._open.items()):
            try:
                tracker.add(record.round, values)
            except Exception as error:
                del self._open[name]
                _warn(name, error)
                with contextlib.suppress(Exception):
                    tracker.close([], is_done=False)

    def close(self, files: Sequence[Path] = (), *, is_done: bool = False) -> None:
        """End them, with the files of a run that is done; a second call does nothing."""
        while self._open:
            name, tracker = self._open.popitem()
            try:
                tracker.close([file for file in files if file.exists()], is_done=is_done)
            except Exception as error:
                _warn(name, error)


def require_trackers(names: Sequence[str], directory: Path | None) -> None:
    """Raise ConfigError for a tracker that is not installed, or that has no folder to write to."""
    if names and directory is None:
        raise ConfigError(
            f"output.trackers: got {list(names)} without output.directory; name a folder"
        )
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise ConfigError(
            [
                f"output.trackers: {name!r} needs a package that is not installed; run "
                f"`pip install 'fedopt-flwr[{name}]'`, or leave it out"
                for name in missing
            ]
        )


def _is_installed(name: str) -> bool:
    found = find_spec(name)  # of a folder of that name, as wandb makes, too; it has no file
    return found is not None and found.origin is not None


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a line of rounds.jsonl; those of its tables as table/name, and how many
    clients there are in its lists. Tables by client are left out: nobody looks at a curve a client.
    """
    found: dict[str, float] = {}
    values = record.to_dict()
    for name in ("each_client", "seconds_by_client", "examples_by_client"):
        del values[name]
    _collect(found, "", as_json(values))
    del found["round"]
    return found


def _collect(found: dict[str, float], name: str, value: Any) -> None:
    if isinstance(value, (bool, int, float)):
        found[name] = float(value)
    elif isinstance(value, list):
        found[name] = float(len(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(found, f"{name}/{key}" if name else str(key), item)


class _TensorBoard:
    identity = ""

    def __init__(
        self, directory: Path, config: Mapping[str, Any], known: str, next_round: int
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what an earlier attempt wrote of later rounds is not shown
        self._writer: Any = SummaryWriter(directory / TENSORBOARD, purge_step=next_round)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", next_round)

    def add(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self, files: Sequence[Path], *, is_done: bool) -> None:
        from matplotlib.image import imread

        for file in files:
            if file.suffix == ".png":
                self._writer.add_image(file.stem, imread(file), dataformats="HWC")
                continue
            is_model = file.suffix == ".safetensors"  # for which TensorBoard has no place
            text = str(file.resolve()) if is_model else f"```\n{file.read_text('utf-8')}\n```"
            self._writer.add_text(f"files/{file.name}", text)
        self._writer.close()


class _MLflow:
    """Where MLFLOW_TRACKING_URI says, in the experiment of MLFLOW_EXPERIMENT_NAME."""

    def __init__(
        self, directory: Path, config: Mapping[str, Any], known: str, next_round: int
    ) -> None:
        for key, value in _PATIENCE.items():
            os.environ.setdefault(key, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client = _attempted(MlflowClient)
        if known:
            self.identity = known
            self._client.update_run(known, "RUNNING")
            return
        run = self._client.create_run(_attempted(self._experiment), run_name=directory.name)
        self.identity = run.info.run_id
        params: dict[str, str] = {}
        _flatten(params, "", config)
        self._client.log_batch(self.identity, params=[Param(k, v) for k, v in params.items()])

    def _experiment(self) -> str:
        """Return the experiment's id, made if it is not there."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        there = self._client.get_experiment_by_name(name)
        found: str = there.experiment_id if there else self._client.create_experiment(name)
        return found

    def add(self, number: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_plain(name), value, now, number) for name, value in values.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def close(self, files: Sequence[Path], *, is_done: bool) -> None:
        for file in files:
            self._client.log_artifact(self.identity, str(file))
        self._client.set_terminated(self.identity, "FINISHED" if is_done else "KILLED")


class _Wandb:
    """As WANDB_MODE, WANDB_PROJECT and the other variables of wandb say."""

    def __init__(
        self, directory: Path, config: Mapping[str, Any], known: str, next_round: int
    ) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
            raise RuntimeError("nobody is logged in; run `wandb login`, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=directory.name,
            dir=directory,
            config=dict(config),
            id=known or None,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(quiet=True, init_timeout=_SECONDS, finish_timeout=_SECONDS),
        )
        self.identity = self._run.id
        # a resumed run may do rounds again, and wandb's own steps only grow
        self._run.define_metric("*", step_metric="round")

    def add(self, number: int, values: Mapping[str, float]) -> None:
        self._run.log({"round": number, **values})

    def close(self, files: Sequence[Path], *, is_done: bool) -> None:
        import wandb

        for file in files:
            if file.suffix == ".png":
                self._run.log({file.stem: wandb.Image(str(file))})
            else:
                self._run.save(str(file), base_path=str(file.parent), policy="now")
        self._run.finish(exit_code=0 if is_done else 1)


_KINDS: dict[str, type[_TensorBoard] | type[_MLflow] | type[_Wandb]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _Wandb,
}


def _flatten(found: dict[str, str], name: str, value: Any) -> None:
    """Write a configuration's keys as the paths that `--set` takes."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(found, f"{name}.{key}" if name else str(key), item)
    elif value is not None:
        found[_plain(name)] = str(value)


def _plain(name: str) -> str:
    """Return a name that MLflow takes: of its characters, and as a path without empty parts."""
    parts = re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII).split("/")
    return "/".join(part for part in parts if part.strip("."))[:_LONGEST_NAME] or "_"


def _attempted(make: Callable[[], Any]) -> Any:
    """Call it up to three times: runs side by side may make the same store at the same moment."""
    for pause in (1.0, 3.0):
        try:
            return make()
        except Exception:
            time.sleep(pause)
    return make()


def _read_identities(directory: Path) -> dict[str, str]:
    try:
        found = json.loads((directory / IDENTITIES).read_bytes())
    except (OSError, ValueError):  # none yet, or unreadable: the run begins anew there
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _warn(name: str, error: Exception) -> None:
    warnings.warn(
        f"output.trackers: {name!r} failed: {described(error)}; the run continues without it",
        FedoptWarning,
        stacklevel=3,
    )
