"""What a run cannot do without, beside what its parts check themselves."""

from __future__ import annotations

from ..errors import ConfigError, RunError
from ..flower import BEGINS_ANEW, STATE_LOST
from ..problems import unknown_name
from ..rounds.record import RoundRecord
from ..training.metrics import METRICS
from .experiment import Experiment
from .trackers import require_trackers


def require_what_is_asked(experiment: Experiment) -> None:
    """Raise ConfigError for what a run is to measure and cannot."""
    _require_data_to_diagnose(experiment)
    _require_what_stops(experiment)
    _require_evaluators(experiment)
    _require_enough_to_start(experiment)
    output = experiment.config.output
    require_trackers(output.trackers, output.directory)


def _require_data_to_diagnose(experiment: Experiment) -> None:
    if experiment.config.output.diagnostics and not experiment.data.clients:
        raise ConfigError(
            "output.diagnostics: got true; the data of all clients must be in this process, which "
            "it is in `fedopt simulate` and `fedopt compare` alone; set it to false"
        )
    if experiment.config.output.diagnostics and experiment.model.local:
        raise ConfigError(
            "output.diagnostics: got true beside federation.local_parameters; f and its gradient "
            "are those of one model, and here each client has its own; set it to false"
        )


def _require_what_stops(experiment: Experiment) -> None:
    """Raise ConfigError where nothing measures `stop.metric`; a dict of your own metric may."""
    config = experiment.config
    name = config.stop.metric
    if name is None or name == "train_loss":
        return
    if name in ("global_train_loss", "gradient_norm"):
        if not config.output.diagnostics:
            raise ConfigError(
                f"stop.metric: got {name!r}, which is measured only with output.diagnostics = true"
            )
        return
    if experiment.data.test is None:
        raise ConfigError(
            f"stop.metric: got {name!r}; {config.data.name!r} has no test data here, so only "
            "'train_loss' is measured; name that, or give some test data"
        )
    known = {"test_loss", *experiment.metrics}
    known |= {"test_accuracy"} if "accuracy" in known else set()
    has_own = not experiment.metrics.keys() <= METRICS.keys()
    if name not in known and not has_own:
        raise ConfigError(unknown_name("stop.metric", name, known))


def _require_evaluators(experiment: Experiment) -> None:
    """Raise ConfigError where clients cannot evaluate as they are asked to."""
    config = experiment.config
    section, everyone = config.evaluation, config.federation.most_clients
    if section.clients != "all" and section.clients > everyone:
        raise ConfigError(
            f"evaluation.clients: got {section.clients}; must be 'all' or between 1 and "
            f"federation.num_clients ({config.federation.num_clients})"
        )
    data = experiment.data
    if section.on_clients and data.clients and not any(data.holdouts):
        raise ConfigError(
            "evaluation.on_clients: got true, and no client holds out any example; set "
            "data.holdout, as to 0.2, or give pairs (training data, held-out data)"
        )


def _require_enough_to_start(experiment: Experiment) -> None:
    """Raise ConfigError where all clients are here and too few for an open federation."""
    here, federation = len(experiment.data.clients), experiment.config.federation
    if federation.is_open and 0 < here < federation.clients_to_start:
        raise ConfigError(
            f"federation.min_clients: got {federation.clients_to_start} (clients_per_round where "
            f"it is not given); client_data holds {here} data sets; lower it, or give more"
        )


def require_states(record: RoundRecord, *, is_open: bool) -> None:
    """End a run that nobody can continue, before a checkpoint takes the good one's place."""
    errors = [error for error in record.errors if error["phase"] != "evaluate"]
    lost = [error for error in errors if STATE_LOST in str(error["error"])]
    if is_open:
        lost = [error for error in lost if BEGINS_ANEW not in str(error["error"])]
    if lost and len(lost) == record.num_asked:
        raise RunError(
            f"--resume: round {record.round}: {lost[0]['error']}; start the clients with the "
            "--state-dir that they had, or start a new run"
        )
