"""digits_app: a Flower / PyTorch app."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from digits_app.task import Net, load_centralized_dataset, test
from fedopt_flwr.serverapp import ScaffoldM

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation and save the model that it ends with."""
    # Read the run config
    fraction_evaluate: float = context.run_config["fraction-evaluate"]
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["learning-rate"]

    # Load the model
    global_model = Net()
    arrays = ArrayRecord(global_model.state_dict())

    # Choose the strategy
    sizes = {"num_clients": 2, "clients_per_round": 2, "fraction_evaluate": fraction_evaluate}
    strategy = ScaffoldM(global_model, **sizes, local_epochs=1, client_learning_rate=lr)

    # Run it
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=num_rounds,
        evaluate_fn=global_evaluate,
    )

    # Save the model
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model on the test set."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loss, accuracy = test(model, load_centralized_dataset(), device)
    return MetricRecord({"accuracy": accuracy, "loss": loss})
