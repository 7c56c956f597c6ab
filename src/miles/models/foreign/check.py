"""The proof asked of every foreign model when it is loaded: our way to run it gives what its own way gives.

Shapes: T tokens, H query heads, G key-value heads, r = H / G, S tokens seen, d channels, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.head import logits_of
from miles.kernels.varlen import PackedAttend
from miles.models.foreign.attention import NAME, Line, Unfit, hang, survey
from miles.models.foreign.decoder import ForeignDecoder
from miles.models.foreign.spec import ForeignSpec
from miles.models.memory import Carry, Index, Terms
from miles.models.spec import LayerSpec

_LENGTHS = (19, 1, 26)
# How many tokens of which sequence are read together; after the first, most stand alone.
_STEPS = ({0: 3, 2: 4}, *({0: 1, 2: 1}, {2: 1, 0: 1}) * 4, {2: 1}, {0: 3, 2: 5})


def proven(module: Any, spec: ForeignSpec) -> ForeignDecoder:
    """The module behind our decoder's face; Unfit says what about it we cannot do, or do not do as it does."""
    try:
        return _proven(module.eval(), spec)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:  # from inside the module
        reason = (str(error).strip().splitlines() or [""])[0]
        raise Unfit(f"running it on packed tokens fails ({type(error).__name__}: {reason}).") from error


def _proven(module: Any, spec: ForeignSpec) -> ForeignDecoder:
    _look_at_head(module)
    line = Line()
    hang(module, line)
    config: Mapping[str, Any] = module.config.get_text_config().to_dict()
    layers = survey(module, line, positions=spec.max_positions, chunk=config.get("attention_chunk_size"))
    spec = replace(spec, layers=tuple(LayerSpec(mixer=mixer, ffn=spec.layers[0].ffn) for mixer in layers))
    sequences = _tokens(spec, module.device)
    theirs = _own_logits(module, sequences)
    measure = _Measure(exact=module.dtype in (torch.float32, torch.float64))
    spec = _with_ending(ForeignDecoder(module, spec, line), sequences[0], theirs[0], config, measure)
    decoder = ForeignDecoder(module, spec, line)
    after = len(sequences[0])  # nothing can leak into the first
    measure.hold("sequences packed side by side", _packed(decoder, sequences)[after:], torch.cat(theirs[1:]))
    measure.hold("sequences read piece by piece", *_step_by_step(decoder, sequences, theirs))
    return decoder


@dataclass(frozen=True, slots=True)
class _Measure:
    """How far logits may be off, against the largest.

    In low precision a token may be sent to other experts than it was, so most tokens must agree instead of all.
    """

    exact: bool

    @property
    def tolerance(self) -> float:
        return 1e-4 if self.exact else 5e-2

    def off(self, ours_TV: Tensor, theirs_TV: Tensor) -> float:
        off_T = (ours_TV.float() - theirs_TV).abs().amax(-1) / theirs_TV.abs().max()
        if not bool(off_T.isfinite().all()):
            return math.inf
        return float(off_T.max() if self.exact else off_T.median())

    def hold(self, what: str, ours_TV: Tensor, theirs_TV: Tensor) -> None:
        off = self.off(ours_TV, theirs_TV)
        if not off <= self.tolerance:
            raise Unfit(
                f"{what} get other logits than alone and whole ({off:.1e} off, against the largest): "
                "it lets tokens reach each other by more than attention, such as a recurrence or a convolution."
            )


def _look_at_head(module: Any) -> None:
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise Unfit("it has no linear head of its own.")
    if head.bias is not None:
        raise Unfit("its head has a bias, and logits here are hidden states times a weight.")
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter is not head.weight:
            names.setdefault(id(parameter), []).append(name)
    shared = next((each for each in names.values() if len(each) > 1), None)
    if shared is not None:
        raise Unfit(f"{' and '.join(shared[:2])} are one parameter.")


def _tokens(spec: ForeignSpec, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(spec.vocab_size, (n,), generator=generator).to(device) for n in _LENGTHS]


@torch.no_grad()
def _own_logits(module: Any, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Each sequence alone, with the plainest attention transformers has."""
    module.set_attn_implementation("eager")
    try:
        return [module(input_ids=tokens_T[None], use_cache=False).logits[0].float() for tokens_T in sequences]
    finally:
        module.set_attn_implementation(NAME)


def _with_ending(
    decoder: ForeignDecoder, tokens_T: Tensor, theirs_TV: Tensor, config: Mapping[str, Any], measure: _Measure
) -> ForeignSpec:
    """The spec with what lies between hidden states and logits: a factor and a bound that the config names."""
    numbers = {float(v) for v in config.values() if isinstance(v, int | float) and not isinstance(v, bool) and v > 0}
    softcap = config.get("final_logit_softcapping")
    positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    with torch.no_grad():
        hidden_TD = decoder(tokens_T, positions_T, _Memory(reads=[(0, len(tokens_T))]))
        raw_TV = logits_of(hidden_TD, decoder.head())
    best, least = decoder.spec, math.inf
    for scale in (1.0, *sorted(numbers | {1 / number for number in numbers})):
        for bound in (None, float(softcap)) if softcap else (None,):
            logits_TV = raw_TV * scale if bound is None else bound * torch.tanh(raw_TV * scale / bound)
            off = measure.off(logits_TV, theirs_TV)
            if off < least:
                best, least = replace(decoder.spec, hidden_scale=scale, logit_softcap=bound), off
        if scale == 1.0 and least <= measure.tolerance:
            break
    if least <= measure.tolerance:
        return best
    raise Unfit(
        "its logits are not hidden states times its head, up to a factor and a soft-cap that its config names "
        f"({least:.1e} off, against the largest)."
    )


@torch.no_grad()
def _packed(decoder: ForeignDecoder, sequences: Sequence[Tensor]) -> Tensor:
    """Logits of sequences side by side, as a trainer reads them."""
    lengths = [len(tokens_T) for tokens_T in sequences]
    device = sequences[0].device
    positions_T = torch.cat([torch.arange(n, device=device) for n in lengths])
    hidden_TD = decoder(torch.cat(list(sequences)), positions_T, PackedAttend(lengths, device))
    return logits_of(hidden_TD, decoder.head(), decoder.spec.logit_softcap)


@torch.no_grad()
def _step_by_step(
    decoder: ForeignDecoder, sequences: Sequence[Tensor], theirs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits of two sequences read in pieces, as an engine does, but for the first; and those they must equal."""
    memory, shown, expected = _Memory(), [], []
    ends = {0: 0, 2: 0}
    for step in _STEPS:
        memory.reads = list(step.items())
        parts = {number: slice(ends[number], ends[number] + count) for number, count in step.items()}
        tokens_T = torch.cat([sequences[number][part] for number, part in parts.items()])
        positions_T = torch.cat([torch.arange(p.start, p.stop, device=tokens_T.device) for p in parts.values()])
        shown.append(logits_of(decoder(tokens_T, positions_T, memory), decoder.head(), decoder.spec.logit_softcap))
        expected += [theirs[number][part] for number, part in parts.items()]
        ends |= {number: part.stop for number, part in parts.items()}
    return torch.cat(shown[1:]), torch.cat(expected[len(_STEPS[0]) :])


@dataclass(slots=True)
class _Memory:
    """A plain ``Attend`` that remembers keys and values of numbered sequences. ``reads`` says who brings how many."""

    reads: list[tuple[int, int]] = field(default_factory=list)
    latent: bool = False
    _kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGe: Tensor,
        terms: Terms,
        *,
        sinks_H: Tensor | None = None,
        index: Index | int | None = None,
    ) -> Tensor:
        counts = [count for _, count in self.reads]
        outs: list[Tensor] = []
        for (number, _), q, k, v in zip(
            self.reads, q_THd.split(counts), k_TGd.split(counts), v_TGe.split(counts), strict=True
        ):
            if (layer, number) in self._kept:
                before = self._kept[layer, number]
                k, v = torch.cat((before[0], k)), torch.cat((before[1], v))
            self._kept[layer, number] = (k, v)
            outs.append(_attention(q, k, v, terms, sinks_H))
        return torch.cat(outs)

    def carry(self, layer: int) -> Carry:
        raise AssertionError("a foreign model has no recurrent layers")


def _attention(q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, terms: Terms, sinks_H: Tensor | None) -> Tensor:
    """The last T of S tokens look back: every score written out."""
    kv_heads = k_SGd.shape[1]
    q_TGrd = q_THd.float().unflatten(1, (kv_heads, -1))
    scores_GrTS = torch.einsum("tgrd,sgd->grts", q_TGrd, k_SGd.float()) * terms.scale
    if terms.softcap is not None:
        scores_GrTS = terms.softcap * torch.tanh(scores_GrTS / terms.softcap)
    at_S = torch.arange(len(k_SGd), device=q_THd.device)
    at_T = at_S[-len(q_THd) :, None]
    seen_TS = at_S <= at_T
    if terms.window is not None:
        seen_TS &= at_S > at_T - terms.window
    if terms.chunk is not None:
        seen_TS &= at_S // terms.chunk == at_T // terms.chunk
    scores_GrTS = scores_GrTS.masked_fill(~seen_TS, -math.inf)
    if sinks_H is not None:
        sinks_GrT1 = sinks_H.float().view(kv_heads, -1, 1, 1).expand(*scores_GrTS.shape[:3], 1)
        scores_GrTS = torch.cat((scores_GrTS, sinks_GrT1), -1)
    weights_GrTS = scores_GrTS.softmax(-1)[..., : len(k_SGd)]
    out_TGre = torch.einsum("grts,sge->tgre", weights_GrTS, v_SGe.float())
    return out_TGre.flatten(1, 2).to(v_SGe.dtype)
