"""Requests to the service without the official client: JSON over HTTP, and training requests as protobuf."""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles.backends.service.protobuf import read_fields, write_bytes, write_text, write_varint

FLOAT32, INT64 = 1, 2


class Raw:
    """A client of one tenant."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key

    def send(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any]:
        """The status and the JSON or the bytes of the reply."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("X-API-Key", self.key)
        request.add_header("Content-Type", kind)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _read(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _read(error.read())

    def post(self, name: str, **body: Any) -> Any:
        """The reply to a request that is accepted."""
        status, reply = self.send("POST", f"/api/v1/{name}", body)
        assert status < 300, (status, reply)
        return reply

    def open_run(self, model: str, rank: int = 4, seed: int = 0) -> str:
        """A session and a training run in it; returns the run's id."""
        session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.36.0")["session_id"]
        lora = {"rank": rank, "seed": seed}
        reply = self.post("create_model", session_id=session, model_seq_id=0, base_model=model, lora_config=lora)
        return self.result(reply)["model_id"]

    def train(self, run: str, seq: int, sequences: Sequence[Sequence[int]], forward_only: bool = False) -> Any:
        """The reply to a training request with cross entropy."""
        body = encode_train(run, seq, sequences, forward_only=forward_only)
        status, reply = self.send("POST", "/api/v1/forward_backward", body, "application/x-protobuf")
        assert status == 200, reply
        return reply

    def step(self, run: str, seq: int, lr: float = 0.01) -> Any:
        return self.post("optim_step", model_id=run, seq_id=seq, adam_params={"learning_rate": lr})

    def result(self, accepted: Mapping[str, Any]) -> Any:
        """Wait for the result of an accepted request."""
        while True:
            status, reply = self.send("POST", "/api/v1/retrieve_future", {"request_id": accepted["request_id"]})
            if status != 408:
                assert status == 200, reply
                return reply


def _read(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body


def encode_tensor(array: Any) -> bytes:
    array = np.asarray(array)
    code = FLOAT32 if array.dtype.kind == "f" else INT64
    array = array.astype(np.float32 if code == FLOAT32 else np.int64)
    shape = b"".join(write_varint(4, size) for size in array.shape)
    return write_bytes(1, array.tobytes()) + write_varint(3, code) + shape


def encode_train(
    run: str,
    seq: int,
    sequences: Sequence[Sequence[int]],
    *,
    loss_fn: str = "cross_entropy",
    forward_only: bool = False,
) -> bytes:
    """A training request over whole sequences, every token with weight 1."""
    body = write_text(1, run) + write_varint(2, seq) + write_text(4, loss_fn) + write_varint(6, forward_only)
    for tokens in sequences:
        chunk = write_bytes(1, write_bytes(1, np.array(tokens[:-1], np.int32).tobytes()))
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
        entries = b"".join(
            write_bytes(2, write_text(1, name) + write_bytes(2, encode_tensor(array))) for name, array in inputs.items()
        )
        body += write_bytes(3, write_bytes(1, chunk) + entries)
    return body


def read_loss(result: bytes) -> float:
    """The loss in the result of a training request."""
    for number, value in read_fields(result):
        if number == 3:
            entry = dict(read_fields(value))
            if entry[1] == b"loss:sum":
                return struct.unpack("<d", entry[2].to_bytes(8, "little"))[0]
    raise AssertionError("the result has no loss")
