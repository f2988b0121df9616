"""Peers that say what a test puts into their mouths: a client that lies, and a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import grpc
import numpy as np
from flwr.common import Code, FitIns, GetPropertiesIns, GetPropertiesRes
from flwr.common import ndarrays_to_parameters as to_parameters
from flwr.common.serde import (
    fit_ins_to_proto,
    fit_res_from_proto,
    get_properties_ins_to_proto,
    get_properties_res_from_proto,
)
from flwr.proto.transport_pb2 import ClientMessage, ServerMessage
from streams import ClientThread, ServerThread, make_config

from fedopt_flwr import RunConfig
from fedopt_flwr.algorithm import Plan
from fedopt_flwr.data import load_test_data
from fedopt_flwr.engines.stream import ServerAddress, StreamClient
from fedopt_flwr.engines.stream.protocol import LARGEST_MESSAGE, SERVICE, channel_options
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.hosts import ClientHost, HostedClient, states_in

PATIENCE = 60.0
FACTS = {"num_clients": 3, "seed": 0}


class Liar(StreamClient):
    """The real client 1, whose messages are changed before they leave."""

    def __init__(
        self,
        config: RunConfig,
        port: int,
        state: Path,
        change: Callable[[ClientMessage, ServerMessage], bytes | None],
    ) -> None:
        client = HostedClient(1, ClientHost(config, [1]), states_in(state))
        super().__init__(1, client, ServerAddress(f"localhost:{port}", None, 5), lambda text: None)
        self._change = change

    def _answer(self, message: ServerMessage) -> Any:
        answer = super()._answer(message)
        data = self._change(answer, message)
        return answer if data is None else SimpleNamespace(SerializeToString=lambda: data)


def start_liar(server: ServerThread, state: Path, change: Callable[..., bytes | None]) -> Liar:
    liar = Liar(server.config, server.port, state, change)
    threading.Thread(target=liar.run, daemon=True).start()
    return liar


class HostileServer:
    """Says to whoever joins what a test puts in, and returns the answer."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        handler = grpc.method_handlers_generic_handler(
            SERVICE, {"Join": grpc.stream_stream_rpc_method_handler(self._join)}
        )
        options = channel_options(1.0, LARGEST_MESSAGE)  # or it would refuse a client's pings
        pool = futures.ThreadPoolExecutor(8)
        self._server = grpc.server(pool, handlers=(handler,), options=options)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self._server.stop(None)

    def _join(self, answers: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for question in iter(self._questions.get, None):
            answer = None
            try:
                yield question
                answer = next(answers, None)
            except (grpc.RpcError, GeneratorExit):  # the latter if the client hangs up at once
                pass
            self._answers.put(answer)
            if answer is None:
                return

    def hang_up(self) -> None:
        self._questions.put(None)

    def say(self, question: bytes) -> ClientMessage | None:
        """Return the answer, None where the client hung up."""
        self._questions.put(question)
        answer = self._answers.get(timeout=PATIENCE)
        return None if answer is None else ClientMessage.FromString(answer)

    def _ask(self, question: ServerMessage) -> ClientMessage:
        answer = self.say(question.SerializeToString())
        assert answer is not None, "the client hung up"
        return answer

    def ask_facts(self, facts: dict[str, Any]) -> GetPropertiesRes:
        proto = get_properties_ins_to_proto(GetPropertiesIns(facts))
        answer = self._ask(ServerMessage(get_properties_ins=proto))
        return get_properties_res_from_proto(answer.get_properties_res)

    def ask(self, ins: FitIns) -> str:
        """Return what the client says went wrong."""
        answer = self._ask(ServerMessage(fit_ins=fit_ins_to_proto(ins)))
        result = fit_res_from_proto(answer.fit_res)
        return str(result.metrics.get("error", result.status.message))


def honest_instruction(config: RunConfig) -> FitIns:
    """Return what an honest server of PAdaMFed would send in round 1."""
    experiment = Experiment(config, data=load_test_data(config))
    same = [dict.fromkeys(range(3), value) for value in (10, 2, 1 / 3)]
    rule = experiment.rule.resolve(Plan(3, 3, 3, *same))
    own = {"algorithm": "padamfed", "hyperparameters": rule.model_dump_json(), "round": 1}
    own |= {"arrays": "model,direction"}
    told = experiment.template().to_config()
    told |= {f"fedopt.{key}": value for key, value in own.items()}
    return FitIns(to_parameters([np.zeros(experiment.model.size, np.float32)] * 2), told)


class Stage:
    """A client and the instruction that an honest server would send it."""

    def __init__(self, server: HostileServer, folder: Path, **sections: Any) -> None:
        self.config = RunConfig(**{**make_config(), "model": {"name": "mlp"}, **sections})
        self._server, self.state = server, folder / "state"
        self.start()

    def start(self) -> None:
        world = SimpleNamespace(config=self.config, port=self._server.port)
        self.client = ClientThread(world, 0, self.state)  # type: ignore[arg-type]

    def instruct(self) -> None:
        assert self._server.ask_facts(FACTS).status.code == Code.OK
        self.honest = honest_instruction(self.config)

    def ask(self, **changes: Any) -> str:
        own = {f"fedopt.{key}": value for key, value in changes.items()}
        return self._server.ask(FitIns(self.honest.parameters, self.honest.config | own))
