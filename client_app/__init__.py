"""The ClientApp that `flwr run` starts on every node."""

from __future__ import annotations

from fedopt_flwr.engines.grid import make_client_app
from fedopt_flwr.run.flower_apps import client_of_node, read_run_config

app = make_client_app(lambda context: client_of_node(read_run_config(context.run_config), context))
