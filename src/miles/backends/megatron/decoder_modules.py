"""The decoder's own mixers, MLPs and experts as modules of Megatron's layers, where Megatron has no such module.

A module has this tensor-parallel rank's heads and channels, as in the FSDP2 trainer's tensor parallelism, and under
expert parallelism this rank's experts. It reads all slots of the tensor-parallel ranks and returns a partial sum.

Shapes: ``t`` slots of this rank, ``s`` those of them that are its own under sequence parallelism, 1 Megatron's batch
dimension, D features, E experts, k of them per token.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from miles.backends.megatron.batch_invariant_layers import reduce_in_rank_order
from miles.backends.megatron.packed_batch import LayerRoutingReplay, PackedAttention, PackedParams
from miles.backends.megatron.parallel_state import MegatronGroup
from miles.backends.megatron.param_mapping import build_param_mappings
from miles.backends.megatron.router import RouterLoss, attach_loss
from miles.backends.megatron.sharded_state import build_sharded_tensors
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.kernels.attention.compressed import CompressorInputs
from miles.kernels.attention.params import AttentionInputs, RelativeBias
from miles.kernels.batch_invariant.elementwise import sum_in_rank_order
from miles.models.decoder import MIXERS, quantize_modules
from miles.models.layers.attention import Attention
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.layers.mlp import Mlp
from miles.models.layers.moe import MoeMlp, Routing
from miles.models.layers.norm import RMSNorm
from miles.models.layers.residual_conv import ResidualConv
from miles.models.parallel.expert_dispatch import AllToAllDispatcher
from miles.models.parallel.tp_decoder import ParallelRMSNorm
from miles.models.parallel.tp_sharding import compute_tp_shards, shard_spec
from miles.models.quantization import plan_quantization
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    IndexerSpec,
    LayerPart,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    output_conv_state,
)


class TensorParallelRegion:
    """Where the tensor-parallel ranks compute partial results from the same slots."""

    def __init__(self, config: DecoderTransformerConfig) -> None:
        self.group = MegatronGroup(parallel_state.get_tensor_model_parallel_group())
        self._sequence = bool(config.sequence_parallel) and self.group.world > 1
        self._batch_invariant = config.numerics.batch_invariant
        self._keeps_parts = bool(config.adapted)

    def enter(self, x: Tensor) -> Tensor:
        """Return all slots; their gradient is summed over the ranks."""
        if self._sequence:
            return gather_from_sequence_parallel_region(x, group=self.group.process_group)
        return copy_to_tensor_model_parallel_region(x, group=self.group.process_group)

    def leave(self, part: Tensor) -> Tensor:
        """Sum partial results over the ranks; under sequence parallelism of this rank's own slots."""
        if self._batch_invariant:
            return reduce_in_rank_order(part, self.group, sequence=self._sequence)
        if self._sequence:
            return reduce_scatter_to_sequence_parallel_region(part, group=self.group.process_group)
        # Megatron sums in place, and the gradient of DoRA's magnitudes needs the partial result.
        part = part.clone() if self._keeps_parts else part
        return reduce_from_tensor_model_parallel_region(part, group=self.group.process_group)

    def run_on_all_slots(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return this rank's own slots of what ``run`` computes from all, such as a convolution along them."""
        if not self._sequence:
            return run(x)
        return run(self.enter(x)).chunk(self.group.world)[self.group.rank]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum inside a mixer or MLP, where every rank continues differently: the gradient is summed too."""
        if self.group.world == 1:
            return x
        return _AllReduce.apply(x, self.group, self._batch_invariant)  # pyright: ignore[reportReturnType]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MegatronGroup, batch_invariant: bool) -> Tensor:
        ctx.group = group
        return sum_in_rank_order(group.gather(x)) if batch_invariant else group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.group.sum(grad), None, None


class DecoderModule(MegatronModule):
    """A module of the decoder in Megatron's layer, under the name that it has in the decoder's layer."""

    def __init__(self, config: DecoderTransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        self.region = TensorParallelRegion(config)
        self._homes: dict[str, str] = {}
        self._conv_name: str | None = None

    def add_decoder_module(
        self, config: DecoderTransformerConfig, index: int, name: str, build: Callable[..., nn.Module]
    ) -> nn.Module:
        """Build the decoder's module ``name`` of layer ``index``, uninitialized, on this rank's device."""
        module = build(device="meta", dtype=config.params_dtype, numerics=config.numerics)
        home = f"layers.{index}.{name}."
        plan = plan_quantization(rank_spec(config)) if config.has_packed_weights else {}
        quantize_modules(module, {n.removeprefix(home): each for n, each in plan.items() if n.startswith(home)})
        if isinstance(module, MoeMlp):
            _keep_own_experts(module)
        if isinstance(module, Attention) and module.spec.qk_norm == "all" and self.region.group.world > 1:
            assert module.q_norm is not None and module.k_norm is not None
            module.q_norm, module.k_norm = (
                ParallelRMSNorm(norm, self.region.group.world, self.region.all_reduce)
                for norm in (module.q_norm, module.k_norm)
            )
        module = module.to_empty(device=config.param_device)
        self.add_module(name, module)
        self._homes[name] = home
        if self.region.group.rank:
            shards = compute_tp_shards(config.decoder_spec)
            for inner, parameter in module.named_parameters():
                if shards[f"layers.{index}.{name}.{inner}"].first_rank_only and parameter.requires_grad:
                    # Zeros on this rank, which stay so.
                    parameter.register_hook(torch.zeros_like)
        return module

    def add_output_conv(self, config: DecoderTransformerConfig, index: int, part: LayerPart) -> None:
        """Build the convolution of the outputs of this part of layer ``index``, if there is one."""
        spec = config.decoder_spec
        kernel, name = spec.layers[index].output_kernel, f"{'attention' if part == 'mixer' else 'mlp'}_conv"
        if kernel:
            state = output_conv_state(spec, index, part)
            self.add_decoder_module(config, index, name, partial(ResidualConv, spec.hidden_size, kernel, state))
            self._conv_name = name

    def finish(self, out_sD: Tensor, attn_backend: AttentionBackend | None) -> Tensor:
        """Return the summed output of this part behind its convolution, if it has one."""
        if self._conv_name is None:
            return out_sD
        conv = self.get_submodule(self._conv_name)
        return self.region.run_on_all_slots(lambda out_tD: conv(out_tD, attn_backend), out_sD)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state for Megatron's checkpoints: the decoder's tensors, sharded as in the decoder."""
        assert not sharded_offsets, "keys of these layers have their number"
        config = self.config
        assert isinstance(config, DecoderTransformerConfig)
        mappings = build_param_mappings(config.decoder_spec, transformer_engine=False)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, home in self._homes.items():
            own = {full.removeprefix(home): mapping for full, mapping in mappings.items() if full.startswith(home)}
            state |= build_sharded_tensors(self.get_submodule(name), f"{prefix}{name}.", own)
        return state


def rank_spec(config: DecoderTransformerConfig) -> DecoderSpec:
    """Return the spec of this tensor-parallel rank's part of the decoder."""
    return shard_spec(config.decoder_spec, config.tensor_model_parallel_size)


# -- mixers ---------------------------------------------------------------------------------


class DecoderMixer(DecoderModule):
    """The decoder's mixer as Megatron's self-attention."""

    def __init__(self, config: DecoderTransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config)
        spec, index = rank_spec(config), layer_number - 1
        mixer = spec.layers[index].mixer
        name, mixer_class = MIXERS[type(mixer)]
        self.mixer = name
        self._index = index
        indexer = mixer.indexer if isinstance(mixer, AttentionSpec | MlaSpec) else None
        self._selects = indexer is not None and not (isinstance(indexer, IndexerSpec) and indexer.source is not None)
        others = (layer.mixer for layer in spec.layers)
        self._is_source = any(isinstance(other, AttentionSpec) and other.kv_source == index for other in others)
        self.add_decoder_module(config, index, name, partial(mixer_class, mixer, spec, index))
        self.add_output_conv(config, index, "mixer")
        modules = config.recompute_modules or ()
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in modules

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedParams | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        assert packed_seq_params is not None
        packed = packed_seq_params.attn_backend
        recomputes = self._recomputes and torch.is_grad_enabled()
        backend = _RecomputedAttention(packed) if recomputes else packed
        x_tD = self.region.enter(hidden_states).flatten(0, 1)
        # Layers that reuse a selection or keys are behind this one, and their backward runs earlier.
        if self._selects and x_tD.requires_grad:
            x_tD.register_hook(lambda _: packed.drop_selection(self._index))
        if self._is_source and x_tD.requires_grad:
            shared_kv = packed_seq_params.positions.shared_kv
            x_tD.register_hook(lambda _: shared_kv.pop(self._index, None) and None)
        out_tD = self.get_submodule(self.mixer)(x_tD, packed_seq_params.positions, backend)
        return self.finish(self.region.leave(out_tD), packed).unsqueeze(1), None


class _RecomputedAttention:
    """An attention backend whose intermediate results are computed again in backward."""

    latent = False

    def __init__(self, inner: PackedAttention) -> None:
        self._inner = inner

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        out = checkpoint(self._inner, layer, inputs, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend with a relative position bias."""
        out = checkpoint(self._inner.attend_relative, layer, inputs, bias, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys."""
        out = checkpoint(self._inner.attend_compressed, layer, inputs, compressor, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    def recurrent_state(self, layer: int) -> Any:
        """Return that of the backend."""
        return self._inner.recurrent_state(layer)


# -- feed-forward ---------------------------------------------------------------------------


class DecoderMlp(DecoderModule):
    """The decoder's MLP as Megatron's, which says in ``set_layer_number`` in which layer it is.

    ``attn_backend`` is that of the micro-batch, set before each forward.
    """

    attn_backend: AttentionBackend | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """Build the MLP of this layer."""
        config, index = self.config, layer_number - 1
        assert isinstance(config, DecoderTransformerConfig)
        ffn, full = rank_spec(config).layers[index].ffn, config.decoder_spec.layers[index].ffn
        assert isinstance(ffn, MlpSpec) and full is not None
        mlp = self.add_decoder_module(config, index, "mlp", partial(Mlp, config.hidden_size, ffn))
        assert isinstance(mlp, Mlp)
        if self.region.group.world > 1:
            mlp.all_channels = full.size, self.region.all_reduce
        self.add_output_conv(config, index, "ffn")

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        mlp = self.get_submodule("mlp")
        out_sD = self.region.leave(mlp(self.region.enter(hidden_states).flatten(0, 1)))
        return self.finish(out_sD, self.attn_backend).unsqueeze(1), None


class DecoderMoe(DecoderModule):
    """The decoder's experts as Megatron's MoE layer, built in ``set_layer_number``; every rank routes its own slots.

    ``router_replay``, ``router_loss``, ``tokens_s`` and ``attn_backend`` are those of the micro-batch, set before each
    forward. Experts beside an MLP read the residual stream, of which the norm before the MLP is here.
    """

    attn_backend: AttentionBackend | None = None
    router_replay: LayerRoutingReplay | None = None
    router_loss: RouterLoss | None = None
    tokens_s: Tensor | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """Build the experts of this layer."""
        config, index = self.config, layer_number - 1
        assert isinstance(config, DecoderTransformerConfig)
        spec, ffn = config.decoder_spec, rank_spec(config).layers[index].ffn
        assert isinstance(ffn, MoeSpec)
        norm: dict[str, Any] = {"eps": spec.norm_eps, "offset": spec.norm_offset}
        slot = spec.moe_layers.index(index)
        moe = self.add_decoder_module(config, index, "moe", partial(MoeMlp, config.hidden_size, ffn, slot, **norm))
        assert isinstance(moe, MoeMlp)
        ep_group = MegatronGroup(parallel_state.get_expert_model_parallel_group())
        moe.exchange = AllToAllDispatcher(ep_group) if ep_group.world > 1 else None
        self.mlp_norm: RMSNorm | None = None
        if ffn.beside_mlp:
            factory: dict[str, Any] = {"device": config.param_device, "dtype": config.params_dtype}
            self.mlp_norm = RMSNorm(config.hidden_size, **norm, **factory, numerics=config.numerics)
        self.add_output_conv(config, index, "ffn")

    @property
    def router(self) -> DecoderMoe:
        """What takes the replay and the losses of a micro-batch: the module itself."""
        return self

    @property
    def moe_mlp(self) -> MoeMlp:
        """The decoder's module."""
        moe = self.get_submodule("moe")
        assert isinstance(moe, MoeMlp)
        return moe

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        moe = self.moe_mlp
        x_sD = hidden_states.flatten(0, 1)
        routing = Routing() if self.router_replay is None else LayerRouting(self.router_replay)
        routing.tokens_T = self.tokens_s
        weights_sk, experts_sk, *shared = moe.route_tokens(x_sD, routing)
        weights_sk = self._attach_loss(moe, weights_sk, x_sD)
        group = self.region.group
        if group.world > 1:
            assert self.config.sequence_parallel, "a rule refuses experts and tensor parallelism without it"
            weights_tk = gather_from_sequence_parallel_region(weights_sk, group=group.process_group)
            experts_tk = torch.cat(group.gather(experts_sk))
            shared_t = [gather_from_sequence_parallel_region(x, group=group.process_group) for x in shared]
        else:
            weights_tk, experts_tk = weights_sk, experts_sk
            shared_t = shared
        x_tD = self.region.enter(x_sD)
        out_tD = moe.run_experts(x_tD, weights_tk, experts_tk)
        if moe.shared_experts is not None:
            out_tD = out_tD + moe.shared_experts(x_tD, *shared_t)
        out_sD = self.finish(self.region.leave(out_tD), self.attn_backend)
        if self.mlp_norm is not None:
            assert moe.shared is not None
            shared_sD = self.region.leave(moe.shared(self.region.enter(self.mlp_norm(x_sD))))
            out_sD = moe.join_branches(out_sD, shared_sD)
        return out_sD.view(hidden_states.shape), None

    def _attach_loss(self, moe: MoeMlp, weights_sk: Tensor, x_sD: Tensor) -> Tensor:
        """Let backward also be that of the router losses of this micro-batch, if there are any."""
        is_training = self.training and torch.is_grad_enabled()
        if self.router_loss is None or not is_training or moe.spec.hash_vocab:
            return weights_sk
        logits_sE = moe.compute_router_logits(x_sD)
        loss = self.router_loss.compute(logits_sE, topk=moe.spec.experts_per_token, score=moe.spec.score)
        return attach_loss(weights_sk, loss)


class LayerRouting(Routing):
    """The routing of one layer and micro-batch, which Megatron's replay chooses and counts."""

    def __init__(self, replay: LayerRoutingReplay) -> None:
        super().__init__()
        self._replay = replay
        self.replay_TLk = replay.replay.replay_tLk

    def choose(self, slot: int, own_Tk: Tensor) -> Tensor:
        """Return the experts to use, given the router's own selection."""
        return self._replay.choose(own_Tk)


def _keep_own_experts(moe: MoeMlp) -> None:
    """Give the stacked tensors of a module without storage as many experts as an expert-parallel rank has."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    packed = {name: param.suffixes for name, param in moe.quantized.items() if param.packed}
    for name in ("gate_up", "up", "down", "gate_up_bias", "down_bias"):
        for suffix in packed.get(name, ("",)):
            full: nn.Parameter | None = getattr(moe, f"{name}{suffix}")
            if full is not None and ranks > 1:
                own = torch.empty((len(full) // ranks, *full.shape[1:]), dtype=full.dtype, device=full.device)
                setattr(moe, f"{name}{suffix}", nn.Parameter(own, requires_grad=full.requires_grad))


# -- norms behind a module --------------------------------------------------------------------


class PostNormResidual(MegatronModule):
    """Adds a module's output to the residual stream, in place of Megatron's bias-dropout-add, through a norm."""

    def __init__(self, config: DecoderTransformerConfig, norm: Callable[..., nn.Module]) -> None:
        super().__init__(config=config)
        self.norm = norm(config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        return self._add

    def _add(self, out_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        out, bias = out_with_bias
        out = self.norm(out if bias is None else out + bias)
        return residual + F.dropout(out, dropout, self.training)


# -- layer specs ------------------------------------------------------------------------------


def use_decoder_modules(
    submodules: Any, config: DecoderTransformerConfig, index: int, *, norm: Callable[..., nn.Module]
) -> None:
    """Replace the modules of Megatron's layer spec by the decoder's, where Megatron has none for layer ``index``."""
    layer, modules = config.decoder_spec.layers[index], config.modules
    if index in modules.mixers:
        submodules.self_attention = ModuleSpec(module=DecoderMixer)
    if index in modules.ffns:
        submodules.mlp = DecoderMoe if isinstance(layer.ffn, MoeSpec) else DecoderMlp
        if isinstance(layer.ffn, MoeSpec) and layer.ffn.beside_mlp:
            submodules.pre_mlp_layernorm = IdentityOp
    if layer.post_norms:
        post_norm = ModuleSpec(module=PostNormResidual, params={"config": config, "norm": norm})
        submodules.self_attn_bda = submodules.mlp_bda = post_norm
