"""Mixture of experts: router in float32, fused expert computation, and recording or replay of the routed experts.

Shapes: T tokens, D hidden, I intermediate, E experts, k experts per token, R = T * k rows, S shared experts that the
router weighs, L MoE layers, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.batch_invariant import topk_router as invariant_router
from miles.kernels.batch_invariant.activation import gated_activation as invariant_gate
from miles.kernels.batch_invariant.activation import sigmoid, softplus
from miles.kernels.batch_invariant.elementwise import softmax, sum_in_order
from miles.kernels.fused.activation import gated_activation
from miles.kernels.fused.gemv import linear
from miles.kernels.lora.experts import ExpertFactors, ExpertLora
from miles.kernels.moe.fused_moe import moe_forward
from miles.kernels.moe.grouped_gemm import ExpertExchange, RowAdapter, SortedRows
from miles.kernels.moe.topk_router import route_topk
from miles.kernels.numerics import Numerics
from miles.kernels.quantized.moe import QuantizedExperts, quantized_moe
from miles.kernels.runtime.triton_compat import use_triton, use_triton_inference
from miles.models.layers.linear import Linear, pack_parameter, read_weight
from miles.models.layers.lora import add_expert_lora
from miles.models.layers.mlp import Mlp
from miles.models.layers.norm import RMSNorm, unit_rms_norm
from miles.models.lora.layout import LORA_A, LORA_B, LoraLayout, factor_name
from miles.models.quantization import QuantizedParam
from miles.models.spec import Activation, MoeSpec
from miles.precision.quantized_tensor import QuantizedActivation

ReadFactors = Callable[[torch.dtype], tuple[Tensor, Tensor]]
"""Returns the A and B factors of a stacked tensor in a dtype."""

# Avoids 0 / 0 for the weights of replayed experts with zero router probability.
_TINY = 1e-20


def _topk_indices(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count, dim=-1).indices


@dataclass(slots=True, kw_only=True)
class Routing:
    """The routed experts of one forward; use a new object for each forward.

    ``replay_TLk`` are experts to use in place of the router's selection, L counting MoE layers in ascending order; a
    token with a negative entry in a layer keeps the router's selection there. With ``record``, ``recorded`` receives
    one integer tensor [T, k] per MoE layer, in order. ``load_LE``, if given, is incremented by how often each expert
    was selected. ``tokens_T`` are the ids of the tokens, for layers that look experts up by them (hash routing); the
    decoder sets them.
    """

    replay_TLk: Tensor | None = None
    record: bool = False
    recorded: list[Tensor] = field(default_factory=list)
    load_LE: Tensor | None = None
    counted: set[int] = field(default_factory=set)
    tokens_T: Tensor | None = None

    def choose(self, slot: int, own_Tk: Tensor) -> Tensor:
        """Return the experts to use in the ``slot``-th MoE layer, given the router's own selection."""
        experts_Tk = own_Tk
        if self.replay_TLk is not None:
            replayed_Tk = self.replay_TLk[:, slot].to(own_Tk.dtype)
            experts_Tk = torch.where((replayed_Tk >= 0).all(-1, keepdim=True), replayed_Tk, own_Tk)
        # A checkpointed layer runs again in backward, when its slot is already filled.
        if self.record and len(self.recorded) == slot:
            self.recorded.append(experts_Tk.detach())
        if self.load_LE is not None and slot not in self.counted:
            self.counted.add(slot)
            choices_R = experts_Tk.flatten()
            self.load_LE[slot].scatter_add_(0, choices_R, torch.ones_like(choices_R))
        return experts_Tk


def imbalance(load_LE: Tensor) -> Tensor:
    """Compute the load of the busiest expert over the mean load, averaged over the layers; 1 is balanced.

    ``load_LE`` is ``Routing.load_LE`` summed over all ranks that have tokens.
    """
    load_LE = load_LE.to(torch.float64)
    return (load_LE.amax(1) / load_LE.mean(1).clamp(min=torch.finfo(load_LE.dtype).tiny)).mean()


def _build_selection(spec: MoeSpec, device: torch.device | str) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Return the correction bias and the table of hash routing, if there are such; neither has a gradient."""
    correction, table = None, None
    if spec.correction:  # it follows the load of the experts, and must stay in float32
        empty_E = torch.empty(spec.num_experts, device=device, dtype=torch.float32)
        correction = nn.Parameter(empty_E, requires_grad=False)
    if spec.hash_vocab:
        empty_Vk = torch.empty(spec.hash_vocab, spec.experts_per_token, device=device, dtype=torch.int64)
        table = nn.Parameter(empty_Vk, requires_grad=False)
    return correction, table


def _is_plain_softmax(spec: MoeSpec) -> bool:
    """Return whether the router is a plain softmax top-k, which one fused kernel computes."""
    is_plain = not (spec.wide_router or spec.correction or spec.beside_mlp or spec.hash_vocab)
    return spec.score == "softmax" and is_plain and spec.groups == 1


def select_experts(
    spec: MoeSpec,
    correction_E: Tensor | None,
    logits_TE: Tensor,
    scores_TE: Tensor,
    top: Callable[[Tensor, int], Tensor] = _topk_indices,
) -> Tensor:
    """Return the experts that the router selects for each token, [T, k]; ``top`` is the top-k of a tensor."""
    if correction_E is None and spec.groups == 1:
        # The same order as the scores, but without ties where those saturate at 1 or 0.
        return top(logits_TE, spec.experts_per_token)
    if correction_E is not None:
        scores_TE = scores_TE + correction_E
    if spec.groups > 1:
        groups_TgE = scores_TE.unflatten(-1, (spec.groups, -1))
        tops = groups_TgE.gather(-1, top(groups_TgE, spec.group_top)).unbind(-1)
        score_Tg = sum(tops[1:], start=tops[0])
        selected_Tg = torch.zeros_like(score_Tg, dtype=torch.bool)
        selected_Tg.scatter_(-1, top(score_Tg, spec.kept_groups), True)
        scores_TE = groups_TgE.masked_fill(~selected_Tg.unsqueeze(-1), -torch.inf).flatten(-2)
    return top(scores_TE, spec.experts_per_token)


def route_batch_invariant(
    spec: MoeSpec,
    logits_TE: Tensor,
    select: Callable[..., Tensor],
    *,
    dtype: torch.dtype,
    choose: Callable[[Tensor], Tensor] | None = None,
    replays: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the weights of each token's experts, [T, k] in ``dtype``, and their indices, from the router's logits.

    Bitwise the same in engine and trainer. ``select`` gets logits, scores and a top-k function and returns the router's
    selection (``select_experts``), where that is not part of a fused kernel. ``choose`` gets that selection and returns
    the experts to use, which ``replays`` says may be others.
    """
    weighting: dict[str, Any] = {"normalise": spec.norm_topk_prob, "scale": spec.scale, "dtype": dtype}
    if _is_plain_softmax(spec) and use_triton(logits_TE):
        weights_Tk, own_Tk = invariant_router.route_topk(logits_TE, spec.experts_per_token, **weighting)
        experts_Tk = own_Tk if choose is None else choose(own_Tk)
        if replays:
            weights_Tk, _ = invariant_router.route_topk(
                logits_TE, spec.experts_per_token, **weighting, experts_Tk=experts_Tk
            )
        return weights_Tk, experts_Tk
    scores_TE = invariant_router.compute_scores(logits_TE, spec.score)
    experts_Tk = select(logits_TE.detach(), scores_TE.detach(), top=invariant_router.stable_topk)
    if choose is not None:
        experts_Tk = choose(experts_Tk)
    return invariant_router.compute_weights(scores_TE, experts_Tk, **weighting), experts_Tk


class SharedExperts(nn.Module):
    """Experts of every token, each with a weight from the router: ``gate_up`` [S, 2I, D] and ``down`` [S, D, I].

    ``factor`` multiplies all weights of the router, of routed experts too.
    """

    def __init__(
        self, width: int, spec: MoeSpec, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        self.activation: Activation = spec.activation
        self.interleaved = spec.interleaved
        self.numerics = numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.factor = nn.Parameter(torch.empty(1, **factory))
        self.gate_up = nn.Parameter(torch.empty(spec.weighed_shared, 2 * spec.size, width, **factory))
        self.down = nn.Parameter(torch.empty(spec.weighed_shared, width, spec.size, **factory))

    def forward(self, x_TD: Tensor, weights_TS: Tensor) -> Tensor:
        inner_TX = linear(x_TD, self.gate_up.flatten(0, 1), numerics=self.numerics)
        inner_TSF = inner_TX.unflatten(-1, (len(self.gate_up), -1))
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        if self.numerics.batch_invariant:
            inner_TSI = invariant_gate(inner_TSF, self.activation, interleaved=self.interleaved)
            weighed = (inner_TSI * weights_TS.unsqueeze(-1)).unbind(1)
            outs = [
                linear(x_TI, down_DI, numerics=self.numerics)
                for x_TI, down_DI in zip(weighed, self.down.unbind(0), strict=True)
            ]
            return sum_in_order([out_TD.to(wide) for out_TD in outs]).to(x_TD.dtype)
        inner_TSI = gated_activation(inner_TSF, self.activation, interleaved=self.interleaved)
        weighed_STI = (inner_TSI * weights_TS.unsqueeze(-1)).transpose(0, 1)
        out_STD = torch.bmm(weighed_STI, self.down.transpose(1, 2))
        return out_STD.sum(0, dtype=wide).to(x_TD.dtype)


class MoeMlp(nn.Module):
    """A router and its stacked experts: ``gate_up`` [E, 2I, D] (``up`` [E, I, D] if not gated), ``down`` [E, D, I].

    ``slot`` is the index among MoE layers. With an ``exchange`` (expert parallelism), E in the stacked tensors is the
    number of this rank's experts; the router scores all ranks' experts. ``adapters`` (LoRA merged into the stacked
    tensors) by the names of these get their rows in training. With ``lora``, by the same names, factors are applied
    beside the stacked tensors: the parameters ``X_lora_a`` and ``X_lora_b``, or what ``read_factors`` returns.
    ``eps`` and ``offset`` are those of the norms of experts beside an MLP.
    """

    def __init__(
        self,
        width: int,
        spec: MoeSpec,
        slot: int,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.slot = slot
        self.spec = spec
        self.numerics = numerics
        self.exchange: ExpertExchange | None = None
        self.quantized: dict[str, QuantizedParam] = {}
        self.adapters: dict[str, RowAdapter] = {}
        self.lora: dict[str, LoraLayout] = {}
        self.read_factors: dict[str, ReadFactors] = {}
        # Adapters that the requests of an engine's step have chosen.
        self.served_lora: ExpertLora | None = None
        self.adapts_inference = False
        """Whether ``adapters`` change outputs, so that forwards without gradients need them too."""
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        layer_factory: dict[str, Any] = {**factory, "numerics": numerics}
        inner, count = spec.latent or width, spec.num_experts
        rows = 2 * spec.size if spec.gated else spec.size
        self.router = Linear(width, count + spec.weighed_shared, bias=spec.router_bias, **layer_factory)
        self.shared_experts = SharedExperts(width, spec, **layer_factory) if spec.weighed_shared else None
        self.correction, self.expert_table = _build_selection(spec, device)
        self._fused_router = _is_plain_softmax(spec)
        first = nn.Parameter(torch.empty(count, rows, inner, **factory))
        self.gate_up, self.up = (first, None) if spec.gated else (None, first)
        self.down = nn.Parameter(torch.empty(count, inner, spec.size, **factory))
        assert spec.gated or not spec.expert_bias, "ungated experts have no bias"
        self.gate_up_bias = nn.Parameter(torch.empty(count, rows, **factory)) if spec.expert_bias else None
        self.down_bias = nn.Parameter(torch.empty(count, inner, **factory)) if spec.expert_bias else None
        self.into = Linear(width, inner, bias=spec.latent_bias, **layer_factory) if spec.latent else None
        self.outof = Linear(inner, width, bias=spec.latent_bias, **layer_factory) if spec.latent else None
        self.shared = Mlp(width, spec.shared, **layer_factory) if spec.shared else None
        self.shared_gate = Linear(width, 1, bias=False, **layer_factory) if spec.shared_gate else None
        self.router_scale: nn.Parameter | None = None
        self.expert_scale: nn.Parameter | None = None
        self.expert_norm: RMSNorm | None = None
        if spec.beside_mlp:
            self.router_scale = nn.Parameter(torch.empty(width, **factory))
            self.expert_scale = nn.Parameter(torch.empty(count, **factory))
            self.expert_norm, self.expert_post_norm, self.shared_post_norm = (
                RMSNorm(width, eps, offset=offset, **layer_factory) for _ in range(3)
            )

    def route(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, [T, k], and their indices; gradients flow through the weights."""
        if self.shared_experts is not None:
            return self._route_with_shared(x_TD, routing)[:2]
        return self._route(x_TD, routing)

    def _route_with_shared(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor, Tensor]:
        """Weigh the selected and the shared experts together: the softmax of the logarithms of their sigmoids."""
        assert self.shared_experts is not None
        shapes = (self.spec.num_experts, self.spec.weighed_shared)
        is_invariant = self.numerics.batch_invariant
        logits_TX = self._score_invariant(x_TD) if is_invariant else self._score(x_TD)[0]
        logits_TE, shared_TS = logits_TX.split(shapes, -1)
        own_TE = logits_TE.detach()
        if is_invariant:
            scores_TE = invariant_router.compute_scores(own_TE, "sigmoid")
            experts_Tk = self._select_experts(own_TE, scores_TE, invariant_router.stable_topk)
        else:
            experts_Tk = self._select_experts(own_TE, own_TE.sigmoid())
        if routing is not None:
            experts_Tk = routing.choose(self.slot, experts_Tk)
        all_TX = torch.cat((logits_TE.gather(-1, experts_Tk), shared_TS), -1)
        all_TX = softmax(-softplus(-all_TX)) if is_invariant else F.logsigmoid(all_TX).softmax(-1)
        all_TX = (all_TX * self.spec.scale * self.shared_experts.factor).to(x_TD.dtype)
        weights_Tk, gammas_TS = all_TX.split((self.spec.experts_per_token, self.spec.weighed_shared), -1)
        return weights_Tk, experts_Tk, gammas_TS

    def _route(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        spec = self.spec
        if self.numerics.batch_invariant:
            return self._batch_invariant_route(x_TD, routing)
        if self._fused_router and use_triton_inference(x_TD) and (routing is None or routing.replay_TLk is None):
            weights_Tk, experts_Tk = route_topk(
                self.router(x_TD),
                spec.experts_per_token,
                normalise=spec.norm_topk_prob,
                scale=spec.scale,
                dtype=x_TD.dtype,
            )
            return weights_Tk, experts_Tk if routing is None else routing.choose(self.slot, experts_Tk)
        logits_TE, scores_TE = self._score(x_TD)
        if self.expert_table is None:
            experts_Tk = self._select_experts(logits_TE.detach(), scores_TE.detach())
        else:
            experts_Tk = self._look_up_experts(routing)
        if routing is not None:
            experts_Tk = routing.choose(self.slot, experts_Tk)
        weights_Tk = scores_TE.gather(-1, experts_Tk)
        if spec.norm_topk_prob:
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _TINY)
        if spec.scale != 1.0:
            weights_Tk = weights_Tk * spec.scale
        return self._scale_weights(weights_Tk, experts_Tk).to(x_TD.dtype), experts_Tk

    def _look_up_experts(self, routing: Routing | None) -> Tensor:
        """Return the experts of hash routing."""
        assert routing is not None and routing.tokens_T is not None, "hash routing needs the ids of the tokens"
        assert self.expert_table is not None
        return self.expert_table[routing.tokens_T]

    def _scale_weights(self, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
        """Multiply the weights by the learned scales of their experts, if there are any."""
        return weights_Tk if self.expert_scale is None else weights_Tk * self.expert_scale[experts_Tk]

    def _batch_invariant_route(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """``route`` with batch-invariant kernels: bitwise the same in engine and trainer."""
        spec = self.spec
        fp32 = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = self._score_invariant(x_TD)
        choose = None if routing is None else partial(routing.choose, self.slot)
        weights_Tk, experts_Tk = route_batch_invariant(
            spec,
            logits_TE,
            self._select_experts if self.expert_table is None else lambda *_, **__: self._look_up_experts(routing),
            dtype=fp32 if self.expert_scale is not None else x_TD.dtype,
            choose=choose,
            replays=routing is not None and routing.replay_TLk is not None,
        )
        return self._scale_weights(weights_Tk, experts_Tk).to(x_TD.dtype), experts_Tk

    def _score_invariant(self, x_TD: Tensor) -> Tensor:
        """Return the router logits of batch-invariant numerics."""
        if self._fused_router or (self.spec.score == "softmax" and not self.spec.wide_router):
            return self.router(x_TD)
        fp32 = torch.promote_types(x_TD.dtype, torch.float32)
        bias_E = None if self.router.bias is None else self.router.bias.to(fp32)
        return linear(x_TD.to(fp32), self.router.weight.to(fp32), bias_E, numerics=self.numerics)

    def _score(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router logits and scores, in float32 at least."""
        fp32 = torch.promote_types(x_TD.dtype, torch.float32)
        if self.spec.score == "softmax" and not self.spec.wide_router:
            logits_TE = self.router(x_TD)
            return logits_TE, F.softmax(logits_TE, dim=-1, dtype=fp32)
        bias_E = None if self.router.bias is None else self.router.bias.to(fp32)
        logits_TE = F.linear(x_TD.to(fp32), self.router.weight.to(fp32), bias_E)
        match self.spec.score:
            case "softmax":
                return logits_TE, logits_TE.softmax(-1)
            case "sigmoid":
                return logits_TE, logits_TE.sigmoid()
            case "sqrtsoftplus":
                return logits_TE, F.softplus(logits_TE).sqrt()

    def _select_experts(
        self, logits_TE: Tensor, scores_TE: Tensor, top: Callable[[Tensor, int], Tensor] = _topk_indices
    ) -> Tensor:
        return select_experts(self.spec, self.correction, logits_TE, scores_TE, top)

    def forward(self, x: Tensor | QuantizedActivation, routing: Routing | None) -> Tensor:
        """Return the output of the experts and, unless they are beside an MLP, of ``shared``."""
        x_TD = _read_wide(x)
        if self.shared_experts is None:
            return self.run_experts(x, *self.route_tokens(x_TD, routing))
        weights_Tk, experts_Tk, shared_TS = self._route_with_shared(x_TD, routing)
        return self.run_experts(x, weights_Tk, experts_Tk) + self.shared_experts(x_TD, shared_TS)

    def route_tokens(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """``route`` for this module's input, which experts beside an MLP normalize first."""
        return self.route(x_TD if self.expert_norm is None else self._normalise_for_router(x_TD), routing)

    def compute_router_logits(self, x_TD: Tensor) -> Tensor:
        """Return the router's logits for this module's input."""
        return self._score(x_TD if self.expert_norm is None else self._normalise_for_router(x_TD))[0]

    def run_experts(self, x: Tensor | QuantizedActivation, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
        """Return the output of the routed experts and, unless they are beside an MLP, of ``shared``."""
        x_TD = _read_wide(x)
        if self.expert_norm is not None:
            return self._run_experts(self.expert_norm(x_TD), weights_Tk, experts_Tk)
        out_TD = self._run_experts(x if self.into is None else self.into(x_TD), weights_Tk, experts_Tk)
        if self.outof is not None:
            out_TD = self.outof(out_TD)
        if self.shared is None:
            return out_TD
        shared_TD = self.shared(x)
        if self.shared_gate is not None:
            gate_T1 = self.shared_gate(x_TD)
            shared_TD = shared_TD * (sigmoid(gate_T1) if self.numerics.batch_invariant else gate_T1.sigmoid())
        return out_TD + shared_TD

    def join_branches(self, experts_TD: Tensor, shared_TD: Tensor) -> Tensor:
        """Return the sum of the branches of experts and MLP, each behind its norm."""
        return self.shared_post_norm(shared_TD) + self.expert_post_norm(experts_TD)

    def _normalise_for_router(self, x_TD: Tensor) -> Tensor:
        """Return the residual stream as the router of experts beside an MLP reads it."""
        assert self.expert_norm is not None and self.router_scale is not None
        normed_TD = unit_rms_norm(x_TD, self.expert_norm.eps, self.numerics)
        return normed_TD * self.router_scale * x_TD.shape[-1] ** -0.5

    def quantize(self, quantized: Mapping[str, QuantizedParam]) -> None:
        """Quantize the stacked weights of experts from now on, by their names in this module."""
        self.quantized = dict(quantized)
        for name, param in quantized.items():
            pack_parameter(self, name, param)

    def add_factors(self, name: str, lora: LoraLayout) -> None:
        """Add LoRA factors, without content, as parameters beside the stacked tensor ``name``."""
        weight: Tensor = getattr(self, name)
        assert lora.experts is not None
        (num_a, num_b), (start, stop) = lora.experts, lora.rows[0]
        shapes = {
            LORA_A: (len(lora.rows) * num_a, lora.rank, weight.shape[2]),
            LORA_B: (len(lora.rows) * num_b, stop - start, lora.rank),
        }
        for factor, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device), requires_grad=False)
            self.register_parameter(factor_name(name, factor), parameter)
        self.lora[name] = lora

    def _get_factors(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get_parameter(factor_name(name, LORA_A)), self.get_parameter(factor_name(name, LORA_B))

    def _build_lora(self, first_name: str) -> ExpertLora | None:
        """Return the factors that this module holds, for the Triton kernels of an engine."""
        if not self.lora or self.read_factors:
            return None
        found = {name: self._view_factors(name, lora) for name, lora in self.lora.items()}
        return ExpertLora(first=found.get(first_name), down=found.get("down"))

    def _view_factors(self, name: str, lora: LoraLayout) -> ExpertFactors:
        a_SPXrI, b_SPXOr = (f.unflatten(0, (1, len(lora.rows), -1)) for f in self._get_factors(name))
        return ExpertFactors(a_SPXRI=a_SPXrI, b_SPXOR=b_SPXOr, first_column=lora.rows[0][0], scale=lora.scale)

    def _build_adapter(self, name: str) -> RowAdapter | None:
        """Return what adds adapters to the output of a stacked tensor, or their gradients."""
        lora = self.lora.get(name)
        if lora is None:
            return self.adapters.get(name) if torch.is_grad_enabled() or self.adapts_inference else None
        read, numerics = self.read_factors.get(name), self.numerics

        def add(y_RN: Tensor, x_RI: Tensor, rows: SortedRows) -> Tensor:
            a_XrI, b_XOr = self._get_factors(name) if read is None else read(x_RI.dtype)
            return add_expert_lora(y_RN, x_RI, a_XrI, b_XOr, lora, rows, numerics=numerics)

        return add

    def _run_experts(self, x_TD: Tensor | QuantizedActivation, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
        spec, first_name = self.spec, "up" if self.gate_up is None else "gate_up"
        first, down = (read_weight(self, name, self.quantized.get(name)) for name in (first_name, "down"))
        adapters = self._build_adapter(first_name), self._build_adapter("down")
        lora = self.served_lora or self._build_lora(first_name)
        if not (isinstance(first, Tensor) or isinstance(down, Tensor)):
            values = x_TD.data if isinstance(x_TD, QuantizedActivation) else x_TD
            is_fused = use_triton_inference(values) and not self.numerics.batch_invariant
            if lora is not None and (adapters == (None, None) or is_fused):
                adapters = lora.build_row_adapters(first.shape[0], self.numerics)
            experts = QuantizedExperts(
                first,
                down,
                self.gate_up_bias,
                self.down_bias,
                activation=spec.activation,
                interleaved=spec.interleaved,
                numerics=self.numerics,
                first_adapter=adapters[0],
                down_adapter=adapters[1],
            )
            return quantized_moe(
                x_TD, weights_Tk, experts_Tk, experts, weigh_input=spec.weigh_input, exchange=self.exchange
            )
        assert isinstance(first, Tensor) and isinstance(down, Tensor), "experts are quantized together or not at all"
        assert isinstance(x_TD, Tensor)
        return moe_forward(
            x_TD,
            weights_Tk,
            experts_Tk,
            first,
            down,
            activation=spec.activation,
            numerics=self.numerics,
            interleaved=spec.interleaved,
            first_bias_EF=self.gate_up_bias,
            down_bias_ED=self.down_bias,
            weigh_input=spec.weigh_input,
            exchange=self.exchange,
            adapters=adapters,
            lora=lora,
        )


def _read_wide(x: Tensor | QuantizedActivation) -> Tensor:
    """Return the input before it is quantized, which the router reads."""
    wide = x.wide if isinstance(x, QuantizedActivation) else x
    assert wide is not None, "the router reads the input before it is quantized"
    return wide
