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


def open_health_handler(is_ready: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """Return what answers Check on a port that strangers reach: at once and whatever is asked.

    A request that is not read cannot be large, and cannot hold a stream by never coming.
    """

    def check(_: object, __: grpc.ServicerContext) -> Iterator[bytes]:
        yield _answer(is_ready()).SerializeToString()

    method = grpc.stream_stream_rpc_method_handler(check)
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": method})


def _answer(serves: bool) -> health_pb2.HealthCheckResponse:
    response = health_pb2.HealthCheckResponse
    return response(status=response.SERVING if serves else response.NOT_SERVING)


def _health_handler(is_ready: Callable[[], bool]) -> grpc.GenericRpcHandler:
    def check(
        request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in (_ALIVE, SERVICE):
            context.abort(grpc.StatusCode.NOT_FOUND, f"services are '' and {SERVICE!r}")
        return _answer(request.service == _ALIVE or is_ready())

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
        handlers=(_health_handler(is_ready),),
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
