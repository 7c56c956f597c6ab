"""SGLang backend of ``miles parity``: a server started for it, or a running one.

Shapes: T tokens of a sequence, D hidden, L layers with experts, k experts a token.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from miles.backends.remote import sglang_dumps, sglang_flags
from miles.backends.remote.client import SglangClient
from miles.backends.remote.process.server import LocalServer, ServerCommand
from miles.core.errors import EngineError
from miles.core.routed_experts import decode_from_sglang, to_signed_ids
from miles.core.types import Tokens
from miles.launch.parity.backend import MAX_VALUES, TIMEOUT, Activations, ParityModel
from miles.models.activation_hooks import EXPERTS_OPERATION, ActivationTrace

# A number takes ten times its bytes over HTTP.
_MAX_HTTP_VALUES = MAX_VALUES >> 4
_MIN_KV_TOKENS = 4096


def trace_sglang(model: ParityModel, sequences: Sequence[Tokens]) -> Activations:
    """Stock SGLang, started for this: the activations of its modules during prefill, and log-probs."""
    return asyncio.run(_trace_sglang(model, sequences))


async def _trace_sglang(model: ParityModel, sequences: Sequence[Tokens]) -> Activations:
    with tempfile.TemporaryDirectory() as folder:
        home, dumped = Path(folder), Path(folder) / "dumps"
        server = LocalServer(
            "sglang", _build_command(model, sequences, dumped), home / "sglang.log", _build_client, seconds=TIMEOUT
        )
        try:
            client = await server.open()
            before = set(sglang_dumps.list_steps(dumped))
            scores = await asyncio.to_thread(_score, client.url, sequences)
        finally:
            await server.close()
        trace = ActivationTrace()
        steps = [step for step in sglang_dumps.list_steps(dumped) if step not in before]
        sglang_dumps.read_dumps(steps, model.spec, sequences, trace)
    trace.record(model.spec.num_layers, "log-probs", torch.tensor(scores)[:, None])
    return trace.concatenate()


def _build_client(url: str) -> SglangClient:
    return SglangClient(url, "sglang", vocab_size=0)


def _build_command(model: ParityModel, sequences: Sequence[Tokens], dumped: Path) -> ServerCommand:
    device = model.device.type
    given = set(sglang_flags.parse_flag_names(model.sglang_flags))
    words = [*model.sglang_flags, sglang_dumps.FLAG, str(dumped), "--disable-radix-cache"]
    if "max-total-tokens" not in given:  # it runs one prompt at a time
        words += ["--max-total-tokens", str(max(_MIN_KV_TOKENS, 2 * max(map(len, sequences))))]
    argv = sglang_flags.build_command(
        model.sglang_python or sys.executable,
        str(model.folder.resolve()),
        words,
        device=device,
        dtype=str(model.dtype).removeprefix("torch."),
        ranks=1,
        routed_experts=False,
        trust_remote_code=model.trust_remote_code,
    )
    return ServerCommand(argv=argv, environment=sglang_flags.build_environment(device))


def _score(url: str, sequences: Sequence[Tokens]) -> list[float]:
    return [
        score for tokens in sequences for score in _read_logprobs(url, tokens, _post_generate(url, _build_body(tokens)))
    ]


# -- a running server -----------------------------------------------------------------------


def trace_external_server(url: str, model: ParityModel, sequences: Sequence[Tokens]) -> Activations:
    """A server with SGLang's API: log-probs, and hidden states and experts if it was started to return them."""
    trace = ActivationTrace()
    scores = list[float]()
    spec = model.spec
    wanted: dict[str, Any] = {}
    if max(map(len, sequences)) * spec.hidden_size <= _MAX_HTTP_VALUES:
        wanted["return_hidden_states"] = True
    if spec.moe is not None:
        wanted["return_routed_experts"] = True
    for tokens in sequences:
        meta, wanted = _request_supported(url, tokens, wanted)
        scores += _read_logprobs(url, tokens, meta)
        _record_hidden_states(url, model, tokens, meta, trace)
        _record_experts(model, tokens, meta, trace)
    trace.record(spec.num_layers, "log-probs", torch.tensor(scores)[:, None])
    return trace.concatenate()


def _request_supported(url: str, tokens: Tokens, wanted: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The reply with as many of the ``wanted`` fields as the server supports, and those fields."""
    fields = dict(wanted)
    while True:
        try:
            return _post_generate(url, _build_body(tokens) | fields), fields
        except _BadRequest:
            if not fields:
                raise
            fields.pop(next(iter(fields)))


def _record_hidden_states(
    url: str, model: ParityModel, tokens: Tokens, meta: Mapping[str, Any], trace: ActivationTrace
) -> None:
    states = meta.get("hidden_states")
    if not states:
        return
    try:
        hidden_TD = torch.tensor(states[0] if isinstance(states[0][0], list) else states, dtype=torch.float32)
    except (TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{url} returned hidden states from /generate that are not numbers.") from error
    if hidden_TD.shape == (len(tokens), model.spec.hidden_size):
        trace.record(model.spec.num_layers, "final norm", hidden_TD)


def _record_experts(model: ParityModel, tokens: Tokens, meta: Mapping[str, Any], trace: ActivationTrace) -> None:
    encoded, moe = meta.get("routed_experts"), model.spec.moe
    if moe is None or not isinstance(encoded, str):
        return
    experts = decode_from_sglang(
        encoded,
        tokens=len(tokens),
        layers=len(model.spec.moe_layers),
        top_k=moe.experts_per_token,
        experts=moe.num_experts,
    )
    experts_TLk = torch.from_numpy(to_signed_ids(experts))
    if bool((experts_TLk < 0).any()):
        return  # cached prefixes have no experts
    for slot, layer in enumerate(model.spec.moe_layers):
        trace.record(layer, EXPERTS_OPERATION, experts_TLk[:, slot].sort(-1).values)


# -- requests -------------------------------------------------------------------------------


class _BadRequest(EngineError):
    """The server refused the request."""


def _build_body(tokens: Tokens) -> dict[str, Any]:
    return {
        "input_ids": [int(token) for token in tokens],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _read_logprobs(url: str, tokens: Tokens, meta: Mapping[str, Any]) -> list[float]:
    try:
        found = [float(line[0]) for line in meta["input_token_logprobs"][1:]]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(f"{url} returned no prompt log-probs from /generate.") from error
    if len(found) != len(tokens) - 1:
        raise EngineError(f"{url} returned {len(found)} log-probs for {len(tokens)} tokens; raise its context length.")
    return found


def _post_generate(url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``meta_info`` of the server's reply."""
    url = f"{url.rstrip('/')}/generate"
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            content = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        error_type = _BadRequest if 400 <= error.code < 500 else EngineError
        raise error_type(f"{url} request failed: {error}.") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise EngineError(f"{url} request failed: {error}.") from error
    meta = content.get("meta_info") if isinstance(content, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"{url} does not reply like SGLang.")
    return meta
