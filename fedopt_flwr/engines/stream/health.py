"""gRPC's health protocol: Check alone, as Watch would let strangers hold streams open.

The service "" says that the process lives; the name of Flower's service, that it can do its work:
a server takes clients in, all clients of a process are connected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2

from ...errors import ConfigError
from .protocol import SERVICE

_ALIVE = ""
_LARGEST_REQUEST = 4096  # bytes
_STREAMS = 4


def health_handler(is_ready: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """Return what answers Check on any gRPC server."""

    def check(
        request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in (_ALIVE, SERVICE):
            context.abort(grpc.StatusCode.NOT_FOUND, f"services are '' and {SERVICE!r}")
        serves = request.service == _ALIVE or is_ready()
        response = health_pb2.HealthCheckResponse
        return response(status=response.SERVING if serves else response.NOT_SERVING)

    method = grpc.unary_unary_rpc_method_handler(
        check,
        health_pb2.HealthCheckRequest.FromString,
        health_pb2.HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": method})


@contextlib.contextmanager
def answering_health(address: str, is_ready: Callable[[], bool]) -> Iterator[int]:
    """Answer Check, and nothing else, in plain text at `address` meanwhile; yields the port.

    ConfigError if the address cannot be used.
    """
    server = grpc.server(
        futures.ThreadPoolExecutor(_STREAMS, thread_name_prefix="health"),
        handlers=(health_handler(is_ready),),
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _LARGEST_REQUEST)],
        maximum_concurrent_rpcs=_STREAMS,
    )
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"--health: cannot listen at {address!r}: {error}; must be HOST:PORT of this machine, "
            "with a port that no other program uses"
        ) from None
    server.start()
    try:
        yield port
    finally:
        server.stop(None)
