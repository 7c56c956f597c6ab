"""The backends that ``miles parity`` holds side by side: each reads the same tokens and tells what every step gave.

Shapes: T tokens of all sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
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
from miles.core.errors import UsageError
from miles.core.protocols import Sampling
from miles.core.types import Tokens, Version
from miles.kernels.head import logits_of
from miles.launch.sglang_side import launched, visited
from miles.launch.side import MOST, SECONDS, Model, Side, Traced
from miles.models import hub
from miles.models.decoder import Decoder
from miles.models.foreign.taps import tapped_foreign
from miles.models.taps import Trace, tapped, watching
from miles.sync.publish import Publication
from miles.train.logits import Output, logprobs
from miles.train.prefix import attend_of


def side_of(name: str, *, sglang_python: str | None = None) -> Side:
    """The backend of that name; an address is of a server that speaks SGLang's API."""
    if name.startswith(("http://", "https://")):
        return lambda model, sequences: visited(name, model, sequences)
    if name not in SIDES:
        raise UsageError(f"{name} is no backend; there are {', '.join(SIDES)}, or the address of an SGLang server.")
    if name == "transformers" and find_spec("transformers") is None:
        raise UsageError("transformers is not installed, and --a or --b names it; pip install transformers.")
    if name == "megatron" and find_spec("megatron") is None:
        raise UsageError("megatron needs Megatron-Core, which is not installed; pip install miles-rl[megatron].")
    if name == "sglang" and sglang_python is None and find_spec("sglang") is None:
        raise UsageError(
            "sglang is not installed beside Miles; say with --sglang-python which interpreter has it, or give the "
            "address of a server instead of the name."
        )
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
    """Megatron-Core's modules on one rank: all sequences packed, one after the other."""
    from miles.backends.megatron.layout import leave as part
    from miles.backends.megatron.model import open_megatron
    from miles.backends.megatron.taps import tapped_megatron
    from miles.cluster.group import join, leave
    from miles.cluster.layout import Layout
    from miles.cluster.team import Place as Rank
    from miles.launch.parity_rows import rows_for

    _on_a_card()
    # A trainer leaves out what predicts nothing; here it is to read the last tokens too, so that one more follows.
    rows, trace, found = rows_for([np.append(s, s[-1]) for s in sequences], model.device), Trace(), list[Tensor]()

    def judge(_: int, output: Output) -> tuple[None, Mapping[str, Tensor]]:
        found.append(logprobs(output, rows.target_R)[0])
        return None, {}

    with tempfile.TemporaryDirectory() as folder:
        alone = {"team": "parity", "rank": 0, "world": 1, "device": str(model.device), "apart": True}
        join(Rank(**alone, folder=Path(folder), patience=SECONDS))
        try:
            how: dict[str, Any] = {"dtype": model.dtype, "frozen": True, "device": model.device}
            actor = open_megatron(model.folder, model.spec, Layout(), **how)
            (trunk,) = actor.chunks().values()
            with tapped_megatron(trunk, model.spec, trace):
                actor.each([rows], judge)
        finally:
            part()
            leave()
    real_R = np.concatenate([np.arange(len(tokens)) < len(tokens) - 1 for tokens in sequences])
    return _ended(model, trace, trunk.head().detach(), found[0][torch.from_numpy(real_R).to(found[0].device)])


def _on_a_card() -> None:
    """Megatron asks for CUDA by name, wherever its tensors are."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise UsageError("megatron computes on an accelerator only, and there is none here.") from error


SIDES: Mapping[str, Side] = {
    "native": _native,
    "sglang": launched,
    "transformers": _transformers,
    "fsdp": _fsdp,
    "megatron": _megatron,
}


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
    return model.spec.vocab_size * sum(map(len, sequences)) <= MOST


def _ended(model: Model, trace: Trace, head_VD: Tensor, scores_R: Tensor) -> Traced:
    """With the logits, where they are few, and the log-probs."""
    layers = model.spec.num_layers
    hidden_TD = trace.whole()[layers, "final norm"]
    if len(hidden_TD) * model.spec.vocab_size <= MOST:
        trace.keep(layers, "logits", logits_of(hidden_TD.to(head_VD.device), head_VD, model.spec.logit_softcap))
    trace.keep(layers, "log-probs", scores_R[:, None])
    return trace.whole()
