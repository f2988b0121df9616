"""The ClientApp that `flwr run` starts on every node."""

from __future__ import annotations

from fedopt_flwr.deployment.apps import client_of_node, read_run_config
from fedopt_flwr.engines.grid import make_client_app

app = make_client_app(lambda context: client_of_node(read_run_config(context.run_config), context))
