"""What a run cannot do without, beside what its parts check themselves."""

from __future__ import annotations

from ..config.run_config import RunConfig
from ..errors import ConfigError, RunError
from ..flower import BEGINS_ANEW, STATE_LOST
from ..problems import unknown_name
from ..rounds.record import AFTERWARDS, DIAGNOSTICS, SPREADS, RoundRecord
from ..training.metrics import METRICS
from .experiment import Experiment
from .trackers import require_trackers


def require_what_is_asked(experiment: Experiment) -> None:
    """Raise ConfigError for what a run is to measure and cannot."""
    _require_one_model(experiment)
    _require_what_stops(experiment)
    _require_evaluators(experiment)
    _require_enough_to_start(experiment)
    output = experiment.config.output
    require_trackers(output.trackers, output.directory)


def _require_one_model(experiment: Experiment) -> None:
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
    if name in (*DIAGNOSTICS, *SPREADS):
        require_measured(config, "stop.metric", name)
        rule = experiment.rule
        lacks = {
            "control_norm": "" if rule.client_means else "has no control variates",
            "drift": "" if "delta" in rule.upload_names else "sends no 'delta'",
        }
        if lacks.get(name):
            raise ConfigError(
                f"stop.metric: got {name!r}; {config.algorithm.name!r} {lacks[name]}; name another"
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


def require_measured(config: RunConfig, source: str, name: str) -> None:
    """Raise ConfigError, beginning with the `source` of the name, for one of `DIAGNOSTICS` or
    `SPREADS` that runs of this configuration do not measure."""
    section, key = (
        ("output", "diagnostics") if name in DIAGNOSTICS else ("evaluation", "on_clients")
    )
    if not getattr(getattr(config, section), key):
        raise ConfigError(
            f"{source}: got {name!r}, which is measured only with {section}.{key} = true; add "
            f"`--set {section}.{key}=true`, or name another"
        )
    metrics = (config.model.metric, *config.evaluation.metrics)
    if name in SPREADS and SPREADS[name][0] not in ("loss", *metrics):
        raise ConfigError(
            f"{source}: got {name!r}; clients do not measure {SPREADS[name][0]!r}; add it to "
            "evaluation.metrics, or name another"
        )


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
    errors = [error for error in record.errors if error["phase"] not in AFTERWARDS]
    lost = [error for error in errors if STATE_LOST in str(error["error"])]
    if is_open:
        lost = [error for error in lost if BEGINS_ANEW not in str(error["error"])]
    if lost and len(lost) == record.num_asked:
        raise RunError(
            f"--resume: round {record.round}: {lost[0]['error']}; start the clients with the "
            "--state-dir that they had, or start a new run"
        )
