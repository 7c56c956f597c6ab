"""The decoder: the same module samples tokens in the engine and is trained in the trainer.

Shapes: T all tokens of a packed batch, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.fused.lm_head import HeadLora
from miles.kernels.numerics import FAST, Numerics
from miles.kernels.quantized.activation_quant import supports_fused_quantization
from miles.models.activation_checkpointing import CheckpointFn, checkpoint_full
from miles.models.hidden_capture import HiddenCapture
from miles.models.layers.altup import AltUp, AltUpStreams, Laurel
from miles.models.layers.attention import Attention
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.layers.compressed_attention import CompressedAttention
from miles.models.layers.gated_deltanet import GatedDeltaNet
from miles.models.layers.gated_residual import GatedResidual, GatedResidualHead
from miles.models.layers.hyper_connections import HyperConnection, HyperHead, mean_streams
from miles.models.layers.kimi_delta import KimiDeltaAttention
from miles.models.layers.linear import Embedding, Linear
from miles.models.layers.mamba import Mamba2
from miles.models.layers.mla import MultiHeadLatentAttention
from miles.models.layers.mlp import Mlp
from miles.models.layers.moe import MoeMlp, Routing
from miles.models.layers.ngram_embedding import NgramEmbedding
from miles.models.layers.norm import RMSNorm
from miles.models.layers.per_layer_input import PerLayerEmbedding, PerLayerInput
from miles.models.layers.relative_attention import RelativeAttention
from miles.models.layers.residual_conv import ResidualConv
from miles.models.layers.rope import Positions
from miles.models.layers.short_conv import ShortConv
from miles.models.lora.layout import plan_adapters
from miles.models.quantization import QuantizedParam, plan_quantization
from miles.models.residual_spec import GatedResidualSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerPart,
    MambaSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    RelativeAttentionSpec,
    ShortConvSpec,
    output_conv_state,
)
from miles.models.vision.inputs import VisionFeatures, VisionInputs
from miles.models.vision.tower import VisionTower
from miles.precision.formats import WeightFormat
from miles.precision.quantized_tensor import QuantizedActivation

__all__ = [
    "AttentionBackend",
    "CheckpointFn",
    "Decoder",
    "DecoderLayer",
    "Routing",
    "checkpoint_full",
    "quantize_modules",
    "scale_embedding",
]

# Spec type -> attribute name in a layer and module class.
MIXERS: Mapping[type, tuple[str, Callable[..., nn.Module]]] = {
    AttentionSpec: ("attention", Attention),
    RelativeAttentionSpec: ("relative", RelativeAttention),
    MlaSpec: ("mla", MultiHeadLatentAttention),
    CompressedAttentionSpec: ("compressed", CompressedAttention),
    GatedDeltaNetSpec: ("delta", GatedDeltaNet),
    KimiDeltaSpec: ("kda", KimiDeltaAttention),
    MambaSpec: ("mamba", Mamba2),
    ShortConvSpec: ("short_conv", ShortConv),
}


def _build_output_convs(
    spec: DecoderSpec, index: int, factory: dict[str, Any]
) -> tuple[ResidualConv | None, ResidualConv | None]:
    """Return the short convolutions behind the mixer and the feed-forward part of a layer, if it has them."""
    layer = spec.layers[index]

    def build(part: LayerPart, present: bool) -> ResidualConv | None:
        state = output_conv_state(spec, index, part)
        is_there = present and layer.output_kernel > 0
        return ResidualConv(spec.hidden_size, layer.output_kernel, state, **factory) if is_there else None

    return build("mixer", layer.mixer is not None), build("ffn", layer.ffn is not None)


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward part, each with a pre-norm and a residual connection; either may be absent."""

    def __init__(
        self, spec: DecoderSpec, index: int, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        layer = spec.layers[index]
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}

        def norm(present: bool) -> RMSNorm | None:
            return RMSNorm(spec.hidden_size, spec.norm_eps, offset=spec.norm_offset, **factory) if present else None

        self.attention_norm = norm(layer.mixer is not None and layer.has_norms)
        self._mixer = ""
        if layer.mixer is not None:
            self._mixer, mixer_class = MIXERS[type(layer.mixer)]
            self.add_module(self._mixer, mixer_class(layer.mixer, spec, index, **factory))
        self.attention_post_norm = norm(layer.mixer is not None and layer.post_norms)
        self.mlp_norm = norm(layer.ffn is not None and layer.has_norms)
        self.mlp = Mlp(spec.hidden_size, layer.ffn, **factory) if isinstance(layer.ffn, MlpSpec) else None
        self.moe: MoeMlp | None = None
        if isinstance(layer.ffn, MoeSpec):
            norm_options = {"eps": spec.norm_eps, "offset": spec.norm_offset}
            self.moe = MoeMlp(spec.hidden_size, layer.ffn, spec.moe_layers.index(index), **norm_options, **factory)
        self.mlp_post_norm = norm(layer.ffn is not None and layer.post_norms)
        self.attention_conv, self.mlp_conv = _build_output_convs(spec, index, factory)
        self.per_layer: PerLayerInput | None = None
        options: dict[str, Any] = {"eps": spec.norm_eps, "offset": spec.norm_offset, **factory}
        if layer.per_layer_size:
            self.per_layer = PerLayerInput(spec.hidden_size, layer.per_layer_size, **options)
        self.laurel: Laurel | None = None
        self.altup: AltUp | None = None
        if layer.altup is not None:
            self.laurel = Laurel(layer.laurel_rank, spec.hidden_size, **options)
            self.altup = AltUp(layer.altup, spec.hidden_size, **options)
        self.output_scale: nn.Parameter | None = None
        if layer.output_scale:
            self.output_scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype), requires_grad=False)
        self.ngram: NgramEmbedding | None = None
        if layer.ngram is not None:
            self.ngram = NgramEmbedding(layer.ngram, spec, index, **factory)
        self.attention_hyper = _build_hyper_connection(spec, **factory)
        self.mlp_hyper = _build_hyper_connection(spec, **factory)
        # Tensor parallelism: the output of a mixer or feed-forward part is a partial sum, which ``reduce_from_tp``
        # adds up over the ranks. In training so is the gradient of its input, which ``copy_to_tp`` adds up. Under
        # sequence parallelism these gather and scatter tokens, of which ``select_own`` returns this rank's.
        self.copy_to_tp: Callable[[Tensor], Tensor] | None = None
        self.select_own: Callable[[Tensor], Tensor] | None = None
        self.reduce_from_tp: Callable[[Tensor], Tensor] | None = None

    def forward(
        self,
        x_TD: Tensor,
        positions: Positions,
        attn_backend: AttentionBackend,
        routing: Routing | None,
        checkpoint_fn: CheckpointFn | None = None,
        input_TP: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this layer, run under ``checkpoint_fn`` if given."""
        if checkpoint_fn is None:
            return self._run_and_add(x_TD, positions, attn_backend, routing, input_TP)
        return checkpoint_fn(self._run_and_add, x_TD, positions, attn_backend, routing, input_TP)

    def forward_deferred(
        self,
        x_TD: Tensor,
        deferred_TD: Tensor | None,
        positions: Positions,
        attn_backend: AttentionBackend,
        routing: Routing | None,
        input_TP: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream and the output still to be added to it: the next norm fuses add and norm.

        ``input_TP`` is the layer's own input, if it has one. With hyper-connections or AltUp the residual stream is
        several, [T, S, D], to which nothing is still to be added.
        """
        if self.attention_hyper is not None:
            return self._run_streams(x_TD, positions, attn_backend, routing), None
        if self.altup is not None:
            return self._run_altup(x_TD, positions, attn_backend, input_TP), None
        if self.attention_norm is not None:
            x_TD, y_TD = self.attention_norm.add_norm_quantized(x_TD, deferred_TD)
            mixer = self.get_submodule(self._mixer)
            deferred_TD = self._leave_tp(mixer(self._enter_tp(y_TD), positions, attn_backend))
            deferred_TD = self._finish_part(deferred_TD, self.attention_conv, self.attention_post_norm, attn_backend)
        if self.mlp_norm is not None:
            x_TD, y_TD = self.mlp_norm.add_norm_quantized(x_TD, deferred_TD)
            if self.mlp is not None:
                deferred_TD = self._leave_tp(self.mlp(self._enter_tp(y_TD)))
            else:
                deferred_TD = self._run_moe(x_TD, y_TD, routing)
            deferred_TD = self._finish_part(deferred_TD, self.mlp_conv, self.mlp_post_norm, attn_backend)
        if self.per_layer is not None:
            assert input_TP is not None, "the layer has an input of its own"
            x_TD = x_TD if deferred_TD is None else x_TD + deferred_TD
            deferred_TD = self.per_layer(x_TD, input_TP)
        if self.output_scale is not None:
            return (x_TD if deferred_TD is None else x_TD + deferred_TD) * self.output_scale, None
        return x_TD, deferred_TD

    def _run_streams(
        self, x_TSD: Tensor, positions: Positions, attn_backend: AttentionBackend, routing: Routing | None
    ) -> Tensor:
        """Return the streams of a layer with hyper-connections."""
        assert self.attention_hyper is not None and self.mlp_hyper is not None
        if self.ngram is not None:
            assert routing is not None and routing.tokens_T is not None, "n-grams are looked up by the ids of tokens"
            ngram, tokens_T = self.ngram, routing.tokens_T
            x_TSD = x_TSD + self._run_on_all_tokens(lambda all_TSD: ngram(all_TSD, tokens_T, attn_backend), x_TSD)
        read_TD, mixing = self.attention_hyper(x_TSD)
        mixer = self.get_submodule(self._mixer)
        y_TD = read_TD if self.attention_norm is None else self.attention_norm.add_norm_quantized(read_TD, None)[1]
        out_TD = self._leave_tp(mixer(self._enter_tp(y_TD), positions, attn_backend))
        x_TSD = self.attention_hyper.join(out_TD, x_TSD, mixing)
        read_TD, mixing = self.mlp_hyper(x_TSD)
        y_TD = read_TD if self.mlp_norm is None else self.mlp_norm.add_norm_quantized(read_TD, None)[1]
        if self.mlp is not None:
            out_TD = self._leave_tp(self.mlp(self._enter_tp(y_TD)))
        else:
            out_TD = self._run_moe(read_TD, y_TD, routing)
        return self.mlp_hyper.join(out_TD, x_TSD, mixing)

    def _run_altup(
        self, x_TND: Tensor, positions: Positions, attn_backend: AttentionBackend, input_TP: Tensor | None
    ) -> Tensor:
        """Return the residual streams after this layer."""
        altup, laurel, per_layer = self.altup, self.laurel, self.per_layer
        assert altup is not None and laurel is not None and per_layer is not None and input_TP is not None
        assert self.attention_norm is not None and self.attention_post_norm is not None
        assert self.mlp is not None and self.mlp_norm is not None and self.mlp_post_norm is not None
        predicted_TND = altup.predict(x_TND)
        active_TD = predicted_TND[:, altup.spec.active]
        y_TD = self.attention_norm(active_TD)
        mixed_TD = self._leave_tp(self.get_submodule(self._mixer)(self._enter_tp(y_TD), positions, attn_backend))
        x_TD = (active_TD + self.attention_post_norm(mixed_TD) + laurel(y_TD)) * 2.0**-0.5
        out_TD = self._leave_tp(self.mlp(self._enter_tp(self.mlp_norm(x_TD))))
        corrected_TND = altup.correct(predicted_TND, x_TD + self.mlp_post_norm(out_TD))
        return altup.add_to_others(corrected_TND, per_layer(altup.scale_active(corrected_TND), input_TP))

    def _run_moe(self, x_TD: Tensor, y_TD: Tensor | QuantizedActivation, routing: Routing | None) -> Tensor:
        """Run the experts on the residual stream behind the norm, or on itself if they are beside an MLP."""
        moe = self.moe
        assert moe is not None
        if not moe.spec.beside_mlp:
            return self._leave_tp(moe(self._enter_tp(y_TD), routing))
        assert moe.shared is not None
        shared_TD = self._leave_tp(moe.shared(self._enter_tp(y_TD)))
        return moe.join_branches(self._leave_tp(moe(self._enter_tp(x_TD), routing)), shared_TD)

    def _run_and_add(
        self,
        x_TD: Tensor,
        positions: Positions,
        attn_backend: AttentionBackend,
        routing: Routing | None,
        input_TP: Tensor | None,
    ) -> Tensor:
        x_TD, deferred_TD = self.forward_deferred(x_TD, None, positions, attn_backend, routing, input_TP)
        return x_TD if deferred_TD is None else x_TD + deferred_TD

    def fuse_quantization(self) -> None:
        """Let the norms quantize what the layers behind them read, where one format serves all of them."""
        attention, mlp = getattr(self, "attention", None), self.mlp
        moe = self.moe
        if isinstance(attention, Attention) and self.attention_norm is not None:
            self.attention_norm.quantize_to = _fusable_format(attention.qkv.quantized, self.attention_norm)
            reads_wide = attention.gate is not None or attention.indexer is not None
            self.attention_norm.keep_wide = attention.qkv.has_adapter or reads_wide
        if self.mlp_norm is None:
            return
        if moe is not None and moe.spec.beside_mlp:
            mlp = moe.shared
        if mlp is not None:
            first = mlp.gate_up or mlp.up or mlp.down
            self.mlp_norm.quantize_to = _fusable_format(first.quantized, self.mlp_norm)
            self.mlp_norm.keep_wide = first.has_adapter
        elif moe is not None and moe.into is None:
            self.mlp_norm.quantize_to = _fusable_format(next(iter(moe.quantized.values()), None), self.mlp_norm)
            self.mlp_norm.keep_wide = True

    def _enter_tp(self, x_TD: Tensor | QuantizedActivation) -> Tensor | QuantizedActivation:
        if self.copy_to_tp is None:
            return x_TD
        assert isinstance(x_TD, Tensor), "engines, which quantize activations early, have no gradient to copy"
        return self.copy_to_tp(x_TD)

    def _leave_tp(self, part_TD: Tensor) -> Tensor:
        return part_TD if self.reduce_from_tp is None else self.reduce_from_tp(part_TD)

    def _run_on_all_tokens(self, run: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
        """Return this rank's own tokens of what ``run`` computes from all, such as a convolution along them."""
        if self.select_own is None:
            return run(x_TD)
        all_TD = self._enter_tp(x_TD)
        assert isinstance(all_TD, Tensor)
        return self.select_own(run(all_TD))

    def _finish_part(
        self, out_TD: Tensor, conv: ResidualConv | None, post_norm: RMSNorm | None, attn_backend: AttentionBackend
    ) -> Tensor:
        """Return the output of a mixer or feed-forward part behind its convolution and its norm, if it has them."""
        if conv is not None:
            out_TD = self._run_on_all_tokens(lambda all_TD: conv(all_TD, attn_backend), out_TD)
        return out_TD if post_norm is None else post_norm(out_TD)


def _build_hyper_connection(
    spec: DecoderSpec, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
) -> HyperConnection | GatedResidual | None:
    """Build what reads and writes the residual streams of one part; None if there is one stream."""
    if isinstance(spec.hyper, GatedResidualSpec):
        return GatedResidual(spec.hyper, spec, device=device, dtype=dtype, numerics=numerics)
    if spec.hyper is None:
        return None
    return HyperConnection(spec.hyper, spec, device=device, dtype=dtype, numerics=numerics)


def quantize_modules(root: nn.Module, plan: Mapping[str, QuantizedParam]) -> None:
    """Quantize the projections and experts inside ``root`` whose weights ``plan`` names."""
    experts: dict[str, dict[str, QuantizedParam]] = {}
    for name, quantized in plan.items():
        path, _, attribute = name.rpartition(".")
        module = root.get_submodule(path)
        if isinstance(module, Linear):
            module.quantize(quantized)
        else:
            experts.setdefault(path, {})[attribute] = quantized
    for path, params in experts.items():
        module = root.get_submodule(path)
        assert isinstance(module, MoeMlp)
        module.quantize(params)


class Decoder(nn.Module):
    """Maps tokens to hidden states. Parameters are uninitialized: ``hf.load`` and ``hf.init_random`` fill them.

    With ``checkpoint_layers``, the first ``recompute_num_layers`` layers (or all) run under ``checkpoint_fn`` and are
    recomputed in backward. Every layer computes with ``numerics``.
    """

    def __init__(
        self, spec: DecoderSpec, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics = FAST
    ) -> None:
        super().__init__()
        self.spec = spec
        self.numerics = numerics
        self.checkpoint_layers = False
        self.checkpoint_fn: CheckpointFn = checkpoint_full
        self.recompute_num_layers: int | None = None
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.embedding = Embedding(spec.vocab_rows, spec.hidden_size, device=device, dtype=dtype)
        self.embedding_norm: RMSNorm | None = None
        if spec.embedding_norm:
            self.embedding_norm = RMSNorm(spec.hidden_size, spec.norm_eps, offset=spec.norm_offset, **factory)
        self.per_layer: PerLayerEmbedding | None = None
        if spec.per_layer_input is not None:
            options: dict[str, Any] = {"eps": spec.norm_eps, "offset": spec.norm_offset, **factory}
            self.per_layer = PerLayerEmbedding(spec.per_layer_input, spec.num_layers, spec.hidden_size, **options)
        self.altup = None if spec.altup is None else AltUpStreams(spec.altup, spec.hidden_size, **factory)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, **factory) for i in range(spec.num_layers))
        self.hyper_head: HyperHead | GatedResidualHead | None = None
        if isinstance(spec.hyper, GatedResidualSpec):
            self.hyper_head = GatedResidualHead(spec.hyper, spec, **factory)
        elif spec.hyper is not None and spec.hyper.learned_join:
            self.hyper_head = HyperHead(spec.hyper, spec, **factory)
        self.norm: RMSNorm | None = None
        if spec.has_final_norm:
            self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, offset=spec.norm_offset, **factory)
        self.lm_head: Linear | None = None
        if not spec.tie_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_rows, bias=False, **factory)
        self.vision: VisionTower | None = None
        if spec.vision is not None:
            self.vision = VisionTower(spec.vision, spec.hidden_size, **factory)
        self._add_adapters()
        self._quantize()

    def _add_adapters(self) -> None:
        """Add the LoRA factors that the spec says the decoder holds."""
        for name, lora in plan_adapters(self.spec).items():
            if lora.experts is not None:
                path, _, attribute = name.rpartition(".")
                moe = self.get_submodule(path)
                assert isinstance(moe, MoeMlp), f"{name} is not a tensor of experts"
                moe.add_factors(attribute, lora)
                continue
            module = self.get_submodule(name.removesuffix(".weight"))
            assert isinstance(module, Linear), f"{name} is not a projection"
            module.add_factors(lora)

    def _quantize(self) -> None:
        """Quantize the layers that the spec says are quantized."""
        quantize_modules(self, plan_quantization(self.spec))
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.fuse_quantization()

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attn_backend: AttentionBackend,
        routing: Routing | None = None,
        vision: VisionInputs | None = None,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        """Compute hidden states after the final norm, [T, D]; logits are these times ``head()`` transposed.

        Logits are then soft-capped by the spec's ``logit_softcap``, if it has one. ``vision`` are the images of the
        batch; with multimodal RoPE ``positions_T`` may then be [3, T]. ``capture`` takes the output of some layers.
        """
        x_TD = scale_embedding(self.embedding(tokens_T), self.spec)
        checkpoint_fn = self.checkpoint_fn if self.checkpoint_layers and torch.is_grad_enabled() else None
        features: VisionFeatures | None = None
        if vision is not None:
            features = self._encode_images(vision, checkpoint_fn)
            x_TD = x_TD.index_copy(0, vision.token_I, features.embeds_FD.to(x_TD.dtype))
        if self.embedding_norm is not None:
            x_TD = self.embedding_norm(x_TD)
        positions = Positions(positions_T, self.spec.max_positions, x_TD.dtype, numerics=self.numerics)
        inputs_TLP: Tensor | None = None
        if self.per_layer is not None:
            inputs_TLP = self.per_layer(tokens_T, x_TD, None if vision is None else vision.token_I)
        if self.spec.hashes_tokens:
            routing = Routing() if routing is None else routing
            routing.tokens_T = tokens_T
        x_TD = self._split_streams(x_TD)
        deferred_TD: Tensor | None = None
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            input_TP = None if inputs_TLP is None else inputs_TLP[:, number]
            if checkpoint_fn is not None and (self.recompute_num_layers is None or number < self.recompute_num_layers):
                x_TD = layer(x_TD, positions, attn_backend, routing, checkpoint_fn, input_TP)
            else:
                x_TD, deferred_TD = layer.forward_deferred(
                    x_TD, deferred_TD, positions, attn_backend, routing, input_TP
                )
            if features is not None and vision is not None and number < len(features.deepstack):
                x_TD = x_TD if deferred_TD is None else x_TD + deferred_TD
                x_TD, deferred_TD = _add_rows(x_TD, vision.token_I, features.deepstack[number]), None
            if capture is not None and capture.wants(number):
                capture.store(number, self._join_streams(x_TD), deferred_TD)
        x_TD = self._join_streams(x_TD)
        hidden_TD = x_TD if self.norm is None else self.norm.add_norm(x_TD, deferred_TD)[1]
        return hidden_TD if self.spec.output_divisor == 1.0 else hidden_TD / self.spec.output_divisor

    def _split_streams(self, x_TD: Tensor) -> Tensor:
        """Return the residual streams [T, S, D] of a decoder that has several."""
        if self.altup is not None:
            return self.altup.split(x_TD)
        return x_TD if self.spec.streams == 1 else x_TD.unsqueeze(1).expand(-1, self.spec.streams, -1)

    def _join_streams(self, x_TD: Tensor) -> Tensor:
        """Return the hidden states of a decoder's residual streams, if it has several."""
        if self.altup is not None:
            return self.altup.join(x_TD)
        if self.hyper_head is not None:
            return self.hyper_head(x_TD)
        return x_TD if self.spec.streams == 1 else mean_streams(x_TD, self.numerics)

    def _encode_images(self, vision: VisionInputs, checkpoint_fn: CheckpointFn | None) -> VisionFeatures:
        """Return the features of every placeholder token."""
        features = vision.features
        if features is None:
            assert self.vision is not None, "a decoder without a vision tower was given images"
            features = self.vision(vision.images, checkpoint_fn)
        return features.select(vision.feature_I)

    def head(self) -> Tensor:
        """Return the output weight [V, D]: the embedding itself if tied; rows of padding have no logits."""
        weight = self.embedding.weight if self.lm_head is None else self.lm_head.weight
        return weight[: self.spec.vocab_size] if self.spec.vocab_padding else weight

    def head_lora(self) -> HeadLora | None:
        """Return the LoRA adapter that this decoder holds beside its output weight."""
        if self.lm_head is None or self.lm_head.lora is None:
            return None
        a_rD, b_Vr = self.lm_head.lora_factors(self.lm_head.weight.dtype)
        return HeadLora(a_rD=a_rD, b_Vr=b_Vr, scale=self.lm_head.lora.scale, numerics=self.numerics)


def scale_embedding(x_TD: Tensor, spec: DecoderSpec) -> Tensor:
    """Multiply embeddings by the spec's ``embedding_scale``."""
    return x_TD if spec.embedding_scale == 1.0 else x_TD * _round_to_dtype(spec.embedding_scale, x_TD.dtype)


def _add_rows(x_TD: Tensor, token_I: Tensor, rows_ID: Tensor) -> Tensor:
    """Add to some rows, each named once."""
    return x_TD.index_copy(0, token_I, x_TD.index_select(0, token_I) + rows_ID.to(x_TD.dtype))


def _fusable_format(quantized: QuantizedParam | None, norm: RMSNorm) -> WeightFormat | None:
    if quantized is None or not quantized.packed:
        return None
    return quantized.format if supports_fused_quantization(quantized.format, norm.shape[0]) else None


@cache
def _round_to_dtype(scale: float, dtype: torch.dtype) -> float:
    """Round a scale to the model's dtype first, as the models were trained."""
    return torch.tensor(scale, dtype=dtype).item()
