"""The ServerApp that `flwr run` starts; its run config is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedopt_flwr.cli.show import RunDisplay
from fedopt_flwr.run.flower_apps import read_run_config, serve_on_grid

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run config describes; lines go to `flwr log`."""
    config = read_run_config(context.run_config)
    if config.output.directory is None:
        folder = Path.cwd() / "runs" / f"flwr-{context.run_id}"
        config = config.with_values({"output.directory": str(folder)})
    with RunDisplay(config.output.directory) as display:
        result = serve_on_grid(config, display, grid)
    display.finish(result)
