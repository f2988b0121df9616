"""A grid of Flower's Message API without a SuperLink."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

SUPERLINK_NODE_ID = 1  # of what a SuperLink says itself


class Room(Grid):
    """A grid whose nodes run an app in this process, one message at a time.

    Nodes of a federation have a process each: Flower's reader of arrays, which mods call too, is
    not safe in threads with CPython 3.11.7 (gh-106905). Those in `lost` never answer; of those in
    `gone` the SuperLink says so in their place.
    """

    def __init__(self, app: ClientApp, count: int = 3) -> None:
        self.app = app
        self.contexts = {
            100 + i: SimpleNamespace(node_config={"partition-id": i}, state=RecordDict())
            for i in range(count)
        }
        # as Flower's runtimes do before a ServerApp begins
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.lost: set[int] = set()
        self.gone: set[int] = set()
        self.seen: list[Message] = []
        self._numbers = itertools.count(1)
        self._one = threading.Lock()

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = []
        with self._one:
            for message in messages:
                message.metadata.__dict__["_message_id"] = str(next(self._numbers))
                if message.metadata.dst_node_id not in self.lost:
                    replies.append(self._reply(message))
        return replies

    def _reply(self, message: Message) -> Message:
        self.seen.append(message)
        node = message.metadata.dst_node_id
        if node in self.gone:
            reply = Message(Error(3, "Node Unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
            return reply
        try:
            return self.app(message, self.contexts[node])  # type: ignore[arg-type]
        except Exception as error:
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)
