"""What a ClientApp of Flower's Message API answers with, for every rule.

    @app.query()
    def query(message, context):
        return fedopt_query(message, context, dataset=my_data(context))

    @app.train()
    def train(message, context):
        return fedopt_train(message, context, model=Net(), dataset=my_data(context))

`evaluate` is for `@app.evaluate()`. The strategies are those of `fedopt_flwr.serverapp`.
"""

from __future__ import annotations

from .flower.message_client import evaluate as evaluate
from .flower.message_client import query as query
from .flower.message_client import train as train
