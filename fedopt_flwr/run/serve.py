"""A run whose clients are other processes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

from ..config.run_config import RunConfig
from ..data import load_test_data
from ..engines.common import keep_freed_memory
from ..engines.stream import Roster, ServerTls, run_on_streams
from ..errors import ConfigError, FedoptWarning
from ..flower.sizes import require_messages_fit
from .checkpoints import Checkpoint
from .experiment import Experiment
from .result import Result
from .run import Listener, Run


def serve(
    config: RunConfig,
    address: str,
    *,
    tls: ServerTls | None,
    listener: Listener,
    roster: Roster,
    token: str = "",
    checkpoint: Checkpoint | None = None,
    on_listening: Callable[[int], None] = lambda port: None,
    while_waiting: Callable[[], None] = lambda: None,
) -> Result:
    """Wait for the clients, run the federation, write its files and send the clients home.

    With `checkpoint` and the configuration of its run, continues that run.
    With a `token`, only clients that know it may join. `while_waiting` is called
    while clients are missing and may raise to give up.
    """
    keep_freed_memory()
    if checkpoint and checkpoint.client_states:
        raise ConfigError(
            f"--resume: the run in {str(config.output.directory)!r} was a simulation, whose "
            "clients left no state to other processes; continue with `fedopt simulate --resume`"
        )
    experiment = Experiment(config, data=load_test_data(config))
    require_messages_fit(experiment.rule, experiment.model, config)
    run = Run(experiment, listener, checkpoint, while_waiting=while_waiting)
    if run.num_rounds == 0:
        text = "--resume: no round is left; results follow in 15 s, once late clients are sent home"
        warnings.warn(text, FedoptWarning, stacklevel=2)
    with contextlib.ExitStack() as stack:

        def listening(port: int) -> None:  # nothing is written if the address cannot be used
            stack.enter_context(run.recording())
            on_listening(port)

        run_on_streams(
            run.strategy,
            config,
            address,
            num_rounds=run.num_rounds,
            tls=tls,
            roster=roster,
            token=token,
            on_listening=listening,
        )
        return run.finish()
