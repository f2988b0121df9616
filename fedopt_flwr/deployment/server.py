"""A run whose clients are other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from ..config import RunConfig
from ..data import load_test_data
from ..engines.memory import keep_freed_memory
from ..engines.stream import Roster, ServerTls, run_on_streams
from ..experiment import Experiment
from ..flower.sizes import require_messages_fit
from ..runs import Listener, Result, Run, read_run, require_same


def serve(
    config: RunConfig,
    address: str,
    *,
    tls: ServerTls | None,
    listener: Listener,
    roster: Roster,
    resume: Path | None = None,
    on_listening: Callable[[int], None] = lambda port: None,
    while_waiting: Callable[[], None] = lambda: None,
) -> Result:
    """Wait for the clients, run the federation, write its files and send the clients home.

    `resume` is the directory of a run that stopped: `config` then only says how to listen.
    `while_waiting` is called while clients are missing and may raise to give up.
    """
    keep_freed_memory()
    checkpoint = None
    if resume is not None:
        earlier, checkpoint = read_run(resume)
        config = earlier.model_copy(update={"transport": config.transport}).looking_in(
            earlier.import_folders[0]
        )
    experiment = Experiment(config, data=load_test_data(config))
    if checkpoint and resume:
        require_same(experiment, checkpoint, resume)
    require_messages_fit(experiment.rule, experiment.model, config)
    run = Run(experiment, listener, checkpoint, in_memory=False)
    run.strategy.members.while_waiting = while_waiting
    with contextlib.ExitStack() as stack:

        def listening(port: int) -> None:  # nothing is written if the address cannot be used
            stack.enter_context(run.recording(checkpoint))
            on_listening(port)

        run_on_streams(
            run.strategy,
            config,
            address,
            num_rounds=run.num_rounds,
            tls=tls,
            roster=roster,
            on_listening=listening,
        )
        return run.finish()
