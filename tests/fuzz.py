"""Messages that are almost right, peers that send them, and what must hold afterwards.

By hand, against processes of their own:

    python tests/fuzz.py --messages 10000 --instructions 5000 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import FitIns
from flwr.common.serde import fit_ins_to_proto, fit_res_from_proto, get_properties_ins_to_proto
from flwr.common.typing import GetPropertiesIns
from flwr.proto.transport_pb2 import ClientMessage, ServerMessage
from google.protobuf.descriptor import FieldDescriptor
from hostile import FACTS, HostileServer, Liar, honest_instruction
from processes import (
    Process,
    Processes,
    free_port,
    records,
    start_client,
    start_server,
    wait_until,
    write_config,
)

from fedopt_flwr import RunConfig
from fedopt_flwr.engines.stream import client as stream_client
from fedopt_flwr.flower import DiskStates
from fedopt_flwr.flower.messages import ROUND, to_arrays
from fedopt_flwr.run.directory import RunDirectory

TENSOR_TYPES = ("memory", "Memory", "", "numpy.ndarray", "numpy.nda", "torch.Tensor", "pickle")
_WHOLE = (0, 1, 2, 7, 99, 10**6, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
_REAL = (math.nan, math.inf, -math.inf, 1e308, 5e-324, -1.0, 0.0, 0.5)
_TEXTS = (
    *TENSOR_TYPES,
    ",",
    "delta",
    "delta,delta",
    "control_variate_change,delta",
    "delta,control_variate_change,",
    "start",
    "train",
    "x/../../../planted",
    "\0",
    "\x1b[2J\nclient 0: joined",
    "-1",
    "1e5",
    "nan",
    "{}",
    '{"hidden": [9]}',
    "(" * 3000,
    "9" * 400,
    "0" * 32,
    "x" * 20_000,
)
_KEYS = ("error", "loss", "num_steps", "arrays", "client_id", "fedopt.round", "own", "")
_HEADER_BYTES = 128  # before the values of an array of ours
_SHAPES = ("(650,)", "(65, 10)", "()", "(0,)", "(-650,)", "(10**12,)", "(1000000000000,)", "650")
_DTYPES = ("<f4", "<f8", ">f4", "<f2", "<i4", "|b1", "<c8", "|O", "|V4", "<U1", "<M8[s]", "|S0")


def _odd(field: FieldDescriptor, rng: random.Random) -> Any:
    kinds = FieldDescriptor
    if field.cpp_type == kinds.CPPTYPE_STRING:
        text = rng.choice(_TEXTS)
        return text.encode() if field.type == kinds.TYPE_BYTES else text
    if field.cpp_type in (kinds.CPPTYPE_DOUBLE, kinds.CPPTYPE_FLOAT):
        return rng.choice(_REAL)
    if field.cpp_type == kinds.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == kinds.CPPTYPE_ENUM:
        return rng.randrange(8)
    signed = field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
    bits = 31 if field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_UINT32) else 63
    number = rng.choice([n for n in _WHOLE if n < 2**bits])
    return -number if signed and rng.random() < 0.5 else number


def _odd_array(data: bytes, rng: random.Random) -> bytes:
    """Return something like an array: another header, another length, values that are none."""
    header, values = data[:_HEADER_BYTES], bytearray(data[_HEADER_BYTES:])
    draw = rng.randrange(5)
    if draw == 0:
        return header + bytes(values[: rng.randrange(len(values) + 1)])
    if draw == 1 and len(values) >= 4:
        at = 4 * rng.randrange(len(values) // 4)
        values[at : at + 4] = struct.pack("<f", rng.choice(_REAL[:3]))
        return header + bytes(values)
    if draw == 2:
        return rng.randbytes(rng.choice((0, 1, 100, 10_000)))
    shape, dtype = rng.choice(_SHAPES), rng.choice(_DTYPES)
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    if draw == 3:
        text = rng.choice(_TEXTS)
    version = rng.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"))
    encoded = text.encode().ljust(_HEADER_BYTES - 11) + b"\n"
    size = len(encoded).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + encoded + bytes(values)


def _edit_repeated(arrays: Any, rng: random.Random) -> None:
    if not arrays or rng.random() < 0.2:
        arrays.append(rng.choice([b"", *arrays]))
        return
    at = rng.randrange(len(arrays))
    if rng.random() < 0.3:
        del arrays[at]
    else:
        arrays[at] = _odd_array(arrays[at], rng)


def _edit_map(values: Any, rng: random.Random) -> None:
    key = rng.choice([*sorted(values), rng.choice(_KEYS)])
    if rng.random() < 0.3 and key in values:
        del values[key]
        return
    value = values[key]
    field = rng.choice(value.DESCRIPTOR.fields)
    setattr(value, field.name, _odd(field, rng))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _nodes(message: Any) -> list[Any]:
    """Return the message and those in it; values of maps are their map's to change."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None and not _is_map(field):
            found += _nodes(value)
    return found


def _edit(message: Any, rng: random.Random) -> None:
    nodes = _nodes(message)
    node = rng.choice(nodes[1:] or nodes) if rng.random() < 0.9 else message
    if not node.DESCRIPTOR.fields:
        return
    field = rng.choice(node.DESCRIPTOR.fields)
    value = getattr(node, field.name)
    if rng.random() < 0.1:
        node.ClearField(field.name)
    elif _is_map(field):
        _edit_map(value, rng)
    elif field.is_repeated:
        _edit_repeated(value, rng)
    elif field.message_type is not None:
        value.SetInParent()
    elif field.name == "tensor_type":
        node.tensor_type = rng.choice(TENSOR_TYPES)
    else:
        setattr(node, field.name, _odd(field, rng))


def _bend(data: bytes, arrays: Sequence[bytes], rng: random.Random) -> bytes:
    """Change bytes of a message, but not the values of its arrays, which are the sender's right."""
    draw = rng.randrange(12)
    if draw == 0:
        return data[: rng.randrange(len(data) + 1)]
    if draw == 1:
        return data + rng.choice((data, b"\0", rng.randbytes(5), data[: len(data) // 2]))
    if draw == 2:
        return rng.randbytes(rng.choice((0, 1, 10, 1000, 100_000)))
    if draw > 5 or not data:
        return data
    bent = bytearray(data)
    values = [(data.find(a) + _HEADER_BYTES, data.find(a) + len(a)) for a in arrays if a]
    for _ in range(rng.choice((1, 3, 20))):
        at = rng.randrange(len(bent))
        if not any(first <= at < last for first, last in values):
            bent[at] ^= 1 << rng.randrange(8)
    return bytes(bent)


def mutated(data: bytes, kind: type, rng: random.Random) -> bytes:
    """Return the bytes of a message that differs a little from a right one."""
    message: Any = kind()
    message.ParseFromString(data)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        _edit(message, rng)
    body = message.fit_res if kind is ClientMessage else message.fit_ins
    return _bend(message.SerializeToString(), list(body.parameters.tensors), rng)


class FuzzedPeer(Liar):
    """Client 1, whose reply to each round is what `choose` names; the start is answered honestly.

    After "lie" it comes back with a mutated introduction. `sent` is the last reply to each round,
    `must_fail` the rounds whose reply answers another.
    """

    MOVES = ("honest", "mutated", "stale", "hang up", "lie")

    def __init__(
        self,
        config: RunConfig,
        port: int,
        state: Path,
        choose: Callable[[], tuple[str, random.Random]],
    ) -> None:
        super().__init__(config, port, state, self._changed)
        self._choose = choose
        self.sent: dict[int, bytes] = {}
        self.must_fail: set[int] = set()
        self.counts = dict.fromkeys(self.MOVES, 0)
        self._earlier: list[bytes] = []
        self._lies: random.Random | None = None

    def _changed(self, answer: ClientMessage, asked: ServerMessage) -> bytes | None:
        if asked.WhichOneof("msg") != "fit_ins":
            rng, self._lies = self._lies, None
            return rng and mutated(answer.SerializeToString(), ClientMessage, rng)
        number = int(asked.fit_ins.config[ROUND].sint64)
        move, rng = self._choose() if number > 0 else ("honest", random.Random(0))
        honest = answer.SerializeToString()
        data = honest
        if move == "mutated":
            data = mutated(honest, ClientMessage, rng)
        elif move == "stale" and self._earlier:
            data = rng.choice(self._earlier)
            self.must_fail.add(number)
        elif move in ("hang up", "lie") and self._call is not None:
            self._lies = rng if move == "lie" else None
            self._call.cancel()
        self._earlier = [*self._earlier, honest][-5:]
        self.sent[number] = data
        self.counts[move] += 1
        return data

    def change_of_c(self, number: int) -> np.ndarray:
        """Return what the reply to a round, which was counted, adds to this client's c_i."""
        reply = fit_res_from_proto(ClientMessage.FromString(self.sent[number]).fit_res)
        names = str(reply.metrics["arrays"]).split(",")
        arrays = dict(zip(names, to_arrays(reply.parameters), strict=True))
        name = "control_variate_change" if number else "control_variate"
        return np.asarray(arrays[name], np.float64)


def require_sound(folder: Path, peer: FuzzedPeer) -> float:
    """Check the files of a run of clients 0, 2 and the peer; return the error of c."""
    rounds = records(folder)
    checkpoint = RunDirectory(folder / "run").read_checkpoint()
    own = np.zeros(checkpoint.server.vectors["control_variate"].numel())
    for record in rounds:
        assert {0, 2} <= set(record["clients"]), f"an honest reply was lost: {record}"
        assert [e["client"] for e in record["errors"]] in ([], [1]), record
        assert all(len(e["error"]) <= 500 and e["error"].isprintable() for e in record["errors"])
        if 1 in record["clients"]:
            assert record["round"] not in peer.must_fail, record
            if record["round"] <= checkpoint.server.round:
                own += peer.change_of_c(record["round"])
    states = DiskStates(folder / "state" / f"run-{checkpoint.server.run}")
    for i in (0, 2):
        own += states.load(i, checkpoint.server.versions[i])["control_variate"].double().numpy()
    c = checkpoint.server.vectors["control_variate"].double().numpy()
    error = float(np.abs(own / 3 - c).max())
    assert error < 1e-6 < np.abs(c).max()
    return error


def is_instruction(data: bytes) -> bool:
    """Whether a server's message is not one that rightly ends a client: a goodbye, other facts."""
    try:
        kind = ServerMessage.FromString(data).WhichOneof("msg")
    except Exception:  # a client cannot read it either
        return True
    return kind not in ("reconnect_ins", "get_properties_ins")


def introduction_request() -> bytes:
    facts = get_properties_ins_to_proto(GetPropertiesIns(dict(FACTS)))
    return bytes(ServerMessage(get_properties_ins=facts).SerializeToString())


def instruction(ins: FitIns) -> bytes:
    return bytes(ServerMessage(fit_ins=fit_ins_to_proto(ins)).SerializeToString())


def arrays_of(answer: ClientMessage | None) -> list[bytes]:
    """Return the arrays of a reply, none where there is no good one."""
    return list(answer.fit_res.parameters.tensors) if answer is not None else []


def megabytes(process: Process) -> float | None:
    """Return the resident memory of a process; None of one that has ended."""
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{process.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024
    return None


@contextlib.contextmanager
def _watching(
    processes: dict[str, Process], done: Callable[[], int]
) -> Iterator[dict[str, list[float]]]:
    """Sample the memory of processes meanwhile."""
    samples: dict[str, list[float]] = {name: [] for name in processes}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            for name, process in processes.items():
                size = megabytes(process)
                if size is not None and done():
                    samples[name].append(size)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield samples
    over.set()
    thread.join()


def _print_memory(samples: dict[str, list[float]]) -> None:
    for name, found in samples.items():
        last = len(found) - 1
        at = [f"{found[int(share * last)]:.0f}" for share in (0.1, 0.5, 1.0)]
        print(f"  memory of {name} at 10, 50, 100 %: {', '.join(at)} MB")


def fuzz_server(folder: Path, count: int, seed: int) -> None:
    """Send mutated replies to a server beside two honest clients."""
    rng, started = random.Random(seed), time.monotonic()
    processes, port = Processes(folder), free_port()
    config = write_config(
        folder,
        "padamfed",
        model={"name": "logistic"},
        federation={"num_rounds": 20 * count, "seed": seed},
        output={"checkpoint_every": 20, "evaluate_every": 200},
    )
    (folder / "state").mkdir()
    peer: FuzzedPeer

    def choose() -> tuple[str, random.Random]:
        if peer.counts["mutated"] >= count:
            return "honest", rng
        return rng.choices(FuzzedPeer.MOVES, (3, 10, 1, 0.2, 0.2))[0], rng

    try:
        server = start_server(processes, config, port)
        server.wait_for("listening")
        watched = {f"client {i}": start_client(processes, config, port, i) for i in (0, 2)}
        peer = FuzzedPeer(RunConfig.from_file(config), port, folder / "state", choose)
        threading.Thread(target=peer.run, daemon=True).start()
        with _watching({"the server": server, **watched}, lambda: len(peer.sent)) as samples:
            while peer.counts["mutated"] < count:
                assert server.process.poll() is None, server.log
                time.sleep(0.2)
        before = len(records(folder))
        wait_until(lambda: len(records(folder)) > before + 25, lambda: "more rounds")
        server.process.terminate()
        assert server.ended() == 143, server.log
        assert "Traceback" not in server.log
    finally:
        processes.end()
    error = require_sound(folder, peer)
    rounds = records(folder)
    print(
        f"server: {peer.counts} in {len(rounds)} rounds and {time.monotonic() - started:.0f} s; "
        f"client 1 counted in {sum(1 in r['clients'] for r in rounds)}, failures "
        f"{sum(len(r['errors']) for r in rounds)}; honest replies lost: 0; "
        f"|c - Σ p_i c_i| {error:.2g}"
    )
    _print_memory(samples)


def fuzz_client(folder: Path, count: int, seed: int) -> None:
    """Send mutated instructions to a client, an honest one after each."""
    rng, started = random.Random(seed), time.monotonic()
    processes = Processes(folder)
    limits = {"local_steps": 100, "threads": 2, "parameters": 20_000}
    config = write_config(folder, "padamfed", model={"name": "logistic"}, limits=limits)
    honest = instruction(honest_instruction(RunConfig.from_file(config)))
    done, hung_up = 0, 0
    try:
        with HostileServer() as server:
            client = start_client(processes, config, server.port, 0)
            server.say(introduction_request())
            expected = arrays_of(server.say(honest))
            assert expected
            with _watching({"the client": client}, lambda: done) as samples:
                while done < count:
                    data = mutated(honest, ServerMessage, rng)
                    if not is_instruction(data):
                        continue
                    hung_up += server.say(data) is None
                    assert arrays_of(server.say(honest)) == expected, client.log[-2000:]
                    done += 1
            assert client.process.poll() is None
            assert "Traceback" not in client.log
    finally:
        processes.end()
    files = sum(path.suffix == ".safetensors" for path in (folder / "state").rglob("*"))
    print(
        f"client: {done} instructions in {time.monotonic() - started:.0f} s, after {hung_up} of "
        f"them it connected again; honest instructions lost: 0; files of states: {files}"
    )
    _print_memory(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--instructions", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    stream_client._FIRST_PAUSE_SECONDS = 0.01
    for fuzz, count in ((fuzz_server, given.messages), (fuzz_client, given.instructions)):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            fuzz(Path(folder), count, given.seed)


if __name__ == "__main__":
    main()
