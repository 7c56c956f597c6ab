"""SGLang as a side of ``miles parity``: a server that is started for it, or one that runs already and is only asked.

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

from miles.backends.sglang import dumps, flags
from miles.backends.sglang.client import Client
from miles.backends.sglang.launch import Launched
from miles.backends.sglang.process import Command
from miles.core.errors import EngineError
from miles.core.routed import as_choices, from_sglang
from miles.core.types import Tokens
from miles.launch.side import MOST, SECONDS, Model, Traced
from miles.models.taps import CHOICES, Trace

# A number over the wire takes ten times its bytes.
_MOST_WIRED = MOST >> 4
_SLOTS = 4096


def launched(model: Model, sequences: Sequence[Tokens]) -> Traced:
    """Stock SGLang, started for this: what its modules give while it reads prompts, and their log-probs."""
    return asyncio.run(_launched(model, sequences))


async def _launched(model: Model, sequences: Sequence[Tokens]) -> Traced:
    with tempfile.TemporaryDirectory() as folder:
        home, dumped = Path(folder), Path(folder) / "dumps"
        server = Launched("sglang", _command(model, sequences, dumped), home / "sglang.log", _client, seconds=SECONDS)
        try:
            client = await server.open()
            before = set(dumps.steps_in(dumped))
            scores = await asyncio.to_thread(_scored, client.url, sequences)
        finally:
            await server.close()
        trace = Trace()
        steps = [step for step in dumps.steps_in(dumped) if step not in before]
        dumps.read(steps, model.spec, sequences, trace)
    trace.keep(model.spec.num_layers, "log-probs", torch.tensor(scores)[:, None])
    return trace.whole()


def _client(url: str) -> Client:
    return Client(url, "sglang", vocabulary=0)


def _command(model: Model, sequences: Sequence[Tokens], dumped: Path) -> Command:
    device = model.device.type
    given = set(flags.names_of(model.sglang_flags))
    words = [*model.sglang_flags, dumps.FLAG, str(dumped), "--disable-radix-cache"]
    if "max-total-tokens" not in given:  # it reads one prompt at a time
        words += ["--max-total-tokens", str(max(_SLOTS, 2 * max(map(len, sequences))))]
    how: dict[str, Any] = {"dtype": str(model.dtype).removeprefix("torch."), "ranks": 1, "routed": False}
    started = flags.command(
        model.sglang_python or sys.executable,
        str(model.folder.resolve()),
        words,
        device=device,
        trusted=model.trusted,
        **how,
    )
    return Command(words=started, environment=flags.environment(device))


def _scored(url: str, sequences: Sequence[Tokens]) -> list[float]:
    return [score for tokens in sequences for score in _logprobs(url, tokens, _meta(url, _body(tokens)))]


# -- a server that runs already -------------------------------------------------------------


def visited(url: str, model: Model, sequences: Sequence[Tokens]) -> Traced:
    """A server that speaks SGLang's API: log-probs, and what it was started to tell of hidden states and experts."""
    trace, scores, spec = Trace(), list[float](), model.spec
    wanted: dict[str, Any] = {}
    if max(map(len, sequences)) * spec.hidden_size <= _MOST_WIRED:
        wanted["return_hidden_states"] = True
    if spec.moe is not None:
        wanted["return_routed_experts"] = True
    for tokens in sequences:
        meta, wanted = _most(url, tokens, wanted)
        scores += _logprobs(url, tokens, meta)
        _hidden(url, model, tokens, meta, trace)
        _experts(model, tokens, meta, trace)
    trace.keep(spec.num_layers, "log-probs", torch.tensor(scores)[:, None])
    return trace.whole()


def _most(url: str, tokens: Tokens, wanted: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """All that a server tells of what is ``wanted``, and what of that it does not refuse."""
    left = dict(wanted)
    while True:
        try:
            return _meta(url, _body(tokens) | left), left
        except _Refused:
            if not left:
                raise
            left.pop(next(iter(left)))


def _hidden(url: str, model: Model, tokens: Tokens, meta: Mapping[str, Any], trace: Trace) -> None:
    told = meta.get("hidden_states")
    if not told:
        return
    try:
        hidden_TD = torch.tensor(told[0] if isinstance(told[0][0], list) else told, dtype=torch.float32)
    except (TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{url} answered /generate with hidden states that are no numbers.") from error
    if hidden_TD.shape == (len(tokens), model.spec.hidden_size):
        trace.keep(model.spec.num_layers, "final norm", hidden_TD)


def _experts(model: Model, tokens: Tokens, meta: Mapping[str, Any], trace: Trace) -> None:
    told, moe = meta.get("routed_experts"), model.spec.moe
    if moe is None or not isinstance(told, str):
        return
    sizes = {"layers": len(model.spec.moe_layers), "chosen": moe.experts_per_token, "experts": moe.num_experts}
    experts_TLk = torch.from_numpy(as_choices(from_sglang(told, tokens=len(tokens), **sizes)))
    if bool((experts_TLk < 0).any()):
        return  # it kept no record of what it had read before
    for slot, layer in enumerate(model.spec.moe_layers):
        trace.keep(layer, CHOICES, experts_TLk[:, slot].sort(-1).values)


# -- asking ---------------------------------------------------------------------------------


class _Refused(EngineError):
    """The server understood, and says no."""


def _body(tokens: Tokens) -> dict[str, Any]:
    return {
        "input_ids": [int(token) for token in tokens],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _logprobs(url: str, tokens: Tokens, meta: Mapping[str, Any]) -> list[float]:
    try:
        found = [float(line[0]) for line in meta["input_token_logprobs"][1:]]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(f"{url} answered /generate without the prompt's log-probs.") from error
    if len(found) != len(tokens) - 1:
        raise EngineError(f"{url} told {len(found)} log-probs of {len(tokens)} tokens; is its context long enough?")
    return found


def _meta(url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the server at ``url`` says of a prompt."""
    url = f"{url.rstrip('/')}/generate"
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            told = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        kind = _Refused if 400 <= error.code < 500 else EngineError
        raise kind(f"{url} cannot be asked: {error}.") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise EngineError(f"{url} cannot be asked: {error}.") from error
    meta = told.get("meta_info") if isinstance(told, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"{url} does not answer as SGLang does.")
    return meta
