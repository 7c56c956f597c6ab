"""The backends that ``miles parity`` holds side by side: each reads the same tokens and tells what every step gave.

Shapes: T tokens of all sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.backends.fsdp.model import FsdpModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine import NativeEngine
from miles.backends.native.request import Ask
from miles.backends.native.runner import Runner
from miles.cluster.local import Inline
from miles.core.errors import EngineError, UsageError
from miles.core.protocols import Sampling
from miles.core.types import Tokens, Version
from miles.kernels.head import logits_of
from miles.models import hub
from miles.models.decoder import Decoder
from miles.models.foreign.taps import tapped_foreign
from miles.models.spec import DecoderSpec
from miles.models.taps import Place, Trace, tapped, watching
from miles.sync.publish import Publication
from miles.train.logits import Output, logprobs
from miles.train.prefix import attend_of

# More logits than this are not kept: the final norm and the log-probs tell the same.
_LOGITS = 1 << 26
_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint, and how it is computed here. ``prefill_chunk`` is how many tokens an engine's step takes."""

    folder: Path
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    prefill_chunk: int
    trusted: bool = False


Traced = Mapping[Place, Tensor]
Side = Callable[[Model, Sequence[Tokens]], Traced]


def side_of(name: str) -> Side:
    """The backend of that name; an address is of a server that speaks SGLang's API."""
    if name.startswith(("http://", "https://")):
        return lambda model, sequences: _served(name, model, sequences)
    if name == "transformers" and find_spec("transformers") is None:
        raise UsageError("--b transformers needs the package transformers, which is not installed.")
    if name == "megatron" and find_spec("megatron") is None:
        raise UsageError("megatron needs Megatron-Core, which is not installed; pip install miles-rl[megatron].")
    if name not in SIDES:
        raise UsageError(f"{name} is no backend; there are {', '.join(SIDES)}, or the address of an SGLang server.")
    return SIDES[name]


# -- the engine -----------------------------------------------------------------------------


def _native(model: Model, sequences: Sequence[Tokens]) -> Traced:
    """The embedded engine: pages, chunks of a prompt, one request after the other."""
    return asyncio.run(_engine(model, sequences))


async def _engine(model: Model, sequences: Sequence[Tokens]) -> Traced:
    longest, decoder = max(map(len, sequences)), _loaded(model)
    config = NativeConfig(
        engine_max_running=1,
        engine_kv_tokens=-(-(longest + 2) // 16) * 16 + 16,
        engine_prefill_chunk=model.prefill_chunk,
        engine_prefix_cache=False,
        engine_graphs=False,
    )
    how: dict[str, Any] = {"device": model.device, "dtype": model.dtype, "config": config}
    engine = NativeEngine(model.spec, run=Inline(), decode=None, **how)
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=Inline()).publish(Version())
    runner, trace = engine._runner, Trace()
    assert isinstance(runner, Runner) and isinstance(runner.decoder, Decoder)
    attend_in = runner._attend
    setattr(runner, "_attend", lambda *given: watching(attend_in(*given), trace))  # noqa: B010
    scores: list[float] = []
    with tapped(runner.decoder, trace):
        for tokens in sequences:
            ask = Ask(tokens=tokens, sampling=Sampling(max_new_tokens=0), score_from=0)
            answer = engine.open(ask)
            await answer.completion()
            assert answer.scores is not None
            scores += [float(score) for score in answer.scores.logprobs[1:] if score is not None]
    await engine.close()
    return _ended(model, trace, decoder.head(), torch.tensor(scores))


# -- trainers -------------------------------------------------------------------------------


@torch.no_grad()
def _fsdp(model: Model, sequences: Sequence[Tokens]) -> Traced:
    """The embedded trainer: all sequences packed, one after the other."""
    decoder, trace = _loaded(model), Trace()
    actor = FsdpModel(decoder, frozen=True)
    lengths = [len(tokens) for tokens in sequences]
    tokens_T = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(model.device)
    positions_T = torch.cat([torch.arange(n) for n in lengths]).to(model.device)
    with tapped(decoder, trace):
        hidden_TD = decoder(tokens_T, positions_T, watching(attend_of(lengths, (), model.device), trace))
    before_R, target_R = _predicted(lengths, tokens_T)
    output = Output(hidden_RD=hidden_TD[before_R], head_VD=actor.head(), softcap=model.spec.logit_softcap)
    return _ended(model, trace, actor.head(), logprobs(output, target_R)[0])


@torch.no_grad()
def _transformers(model: Model, sequences: Sequence[Tokens]) -> Traced:
    """transformers' own module of the checkpoint, eager, one sequence after the other."""
    from transformers import AutoModelForCausalLM

    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            model.folder, dtype=model.dtype, attn_implementation="eager", trust_remote_code=model.trusted
        )
    except (ValueError, OSError) as error:
        raise UsageError(f"transformers cannot open {model.folder}: {str(error).splitlines()[0]}") from error
    module = module.to(model.device).eval()
    trace, found = Trace(), list[Tensor]()
    with tapped_foreign(module, model.spec, trace):
        for tokens in sequences:
            ids_T = torch.from_numpy(tokens.astype(np.int64)).to(model.device)
            logits_TV: Tensor = module(ids_T[None], use_cache=False).logits[0]
            if _fits(model, sequences):
                trace.keep(model.spec.num_layers, "logits", logits_TV)
            scores_TV = logits_TV[:-1].float().log_softmax(-1)
            found.append(scores_TV.gather(-1, ids_T[1:, None])[:, 0])
    trace.keep(model.spec.num_layers, "log-probs", torch.cat(found)[:, None])
    return trace.whole()


@torch.no_grad()
def _megatron(model: Model, sequences: Sequence[Tokens]) -> Traced:
    """Megatron-Core's modules on one rank: what its layers give, and the log-probs."""
    from miles.backends.megatron.model import open_megatron
    from miles.cluster.group import join, leave
    from miles.cluster.layout import Layout
    from miles.cluster.team import Place as Rank
    from miles.launch.parity_rows import rows_for

    with tempfile.TemporaryDirectory() as folder:
        alone = Rank(
            team="parity", rank=0, world=1, device=str(model.device), apart=True, folder=Path(folder), patience=_SECONDS
        )
        join(alone)
        try:
            actor = open_megatron(
                model.folder, model.spec, Layout(), dtype=model.dtype, frozen=True, device=model.device
            )
            trace, found = Trace(), list[Tensor]()
            for chunk in actor.chunks().values():
                for index, layer in enumerate(chunk.decoder.layers):
                    layer.register_forward_hook(lambda m, a, out, i=index: trace.keep(i, "residual", out[0].squeeze(1)))
            rows = rows_for(sequences, model.device)

            def judge(_: int, output: Output) -> tuple[None, Mapping[str, Tensor]]:
                found.append(logprobs(output, rows.target_R)[0])
                return None, {}

            actor.each([rows], judge)
        finally:
            leave()
    trace.keep(model.spec.num_layers, "log-probs", found[0][:, None])
    return trace.whole()


SIDES: Mapping[str, Side] = {
    "native": _native,
    "fsdp": _fsdp,
    "transformers": _transformers,
    "megatron": _megatron,
}


# -- a server -------------------------------------------------------------------------------


def _served(url: str, model: Model, sequences: Sequence[Tokens]) -> Traced:
    """A server that speaks SGLang's API: it gives no hidden states, only the log-probs of a prompt."""
    found: list[float] = []
    for tokens in sequences:
        body = {
            "input_ids": [int(token) for token in tokens],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        told = _asked(f"{url.rstrip('/')}/generate", body)
        try:
            lines = told["meta_info"]["input_token_logprobs"]
            found += [float(line[0]) for line in lines[1:]]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(f"{url} answered /generate without the prompt's log-probs.") from error
    if len(found) != sum(len(tokens) - 1 for tokens in sequences):
        raise EngineError(f"{url} told {len(found)} log-probs of a prompt's tokens; is its context long enough?")
    trace = Trace()
    trace.keep(model.spec.num_layers, "log-probs", torch.tensor(found)[:, None])
    return trace.whole()


def _asked(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            return json.loads(reply.read())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise EngineError(f"{url} cannot be asked: {error}.") from error


# -- what all have in common ----------------------------------------------------------------


def _loaded(model: Model) -> Decoder:
    return hub.load(model.folder, device=model.device, dtype=model.dtype)


def _predicted(lengths: Sequence[int], tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens of packed sequences predict another, and which that is."""
    ends = np.cumsum(lengths)
    last = np.zeros(len(tokens_T), bool)
    last[ends - 1] = True
    before_R = torch.from_numpy(np.flatnonzero(~last)).to(tokens_T.device)
    return before_R, tokens_T[before_R + 1]


def _fits(model: Model, sequences: Sequence[Tokens]) -> bool:
    return model.spec.vocab_size * sum(map(len, sequences)) <= _LOGITS


def _ended(model: Model, trace: Trace, head_VD: Tensor, scores_R: Tensor) -> Traced:
    """With the logits, where they are few, and the log-probs."""
    layers = model.spec.num_layers
    hidden_TD = trace.whole()[layers, "final norm"]
    if len(hidden_TD) * model.spec.vocab_size <= _LOGITS:
        trace.keep(layers, "logits", logits_of(hidden_TD.to(head_VD.device), head_VD, model.spec.logit_softcap))
    trace.keep(layers, "log-probs", scores_R[:, None])
    return trace.whole()
