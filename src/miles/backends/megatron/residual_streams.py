"""Residual state wider than one hidden state in Megatron's layers: AltUp, hyper-connections and per-layer inputs.

Megatron passes one tensor from layer to layer. Its batch dimension here holds the residual streams, and its ``context``
the inputs of the layers, of which each layer reads its own. Between pipeline stages both are one tensor. All of it is
computed token by token, so that a rank has what belongs to its own slots under sequence parallelism.

Shapes: ``s`` slots of this rank, S residual streams, D features, P channels of a layer's input, X those of the layers
from this one to the last.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from miles.backends.megatron.decoder_modules import TensorParallelRegion, rank_spec
from miles.backends.megatron.packed_batch import PackedParams
from miles.backends.megatron.param_mapping import build_param_mappings
from miles.backends.megatron.sharded_state import build_sharded_tensors
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.models.activation_checkpointing import checkpoint_full
from miles.models.layers.altup import AltUp, AltUpStreams, Laurel
from miles.models.layers.gated_residual import GatedResidual, GatedResidualHead
from miles.models.layers.hyper_connections import HyperConnection, HyperHead, mean_streams
from miles.models.layers.ngram_embedding import NgramEmbedding
from miles.models.layers.per_layer_input import PerLayerEmbedding, PerLayerInput
from miles.models.parallel.tp_decoder import split_table
from miles.models.residual_spec import GatedResidualSpec, HyperConnectionSpec
from miles.models.spec import AttentionSpec, DecoderSpec


def _place(config: DecoderTransformerConfig) -> dict[str, Any]:
    return {"device": config.param_device, "dtype": config.params_dtype}


def _factory(config: DecoderTransformerConfig) -> dict[str, Any]:
    return {**_place(config), "numerics": config.numerics}


def _norm_options(config: DecoderTransformerConfig) -> dict[str, Any]:
    spec = config.decoder_spec
    return {"eps": spec.norm_eps, "offset": spec.norm_offset, **_factory(config)}


# -- around the layers of a stage -----------------------------------------------------------


def has_wide_state(spec: DecoderSpec) -> bool:
    """Return whether more than one hidden state passes from layer to layer."""
    return spec.streams > 1 or spec.altup is not None or spec.per_layer_input is not None


class ResidualState(nn.Module):
    """The state that enters and leaves a stage: the ``first`` one makes it of embeddings, the ``last`` one joins it.

    ``end`` is the number of layers in this and all earlier stages.
    """

    def __init__(self, config: DecoderTransformerConfig, *, first: bool, last: bool, end: int) -> None:
        super().__init__()
        spec, factory = config.decoder_spec, _factory(config)
        self.numerics = config.numerics
        self._streams = spec.streams if spec.altup is None else spec.altup.streams
        self._width = self._streams * spec.hidden_size
        self._behind = (spec.num_layers - end) * (0 if spec.per_layer_input is None else spec.per_layer_input.size)
        self.per_layer: PerLayerEmbedding | None = None
        if first and spec.per_layer_input is not None:
            sizes = (spec.num_layers, spec.hidden_size)
            self.per_layer = PerLayerEmbedding(spec.per_layer_input, *sizes, **_norm_options(config))
        self.altup: AltUpStreams | None = None
        if spec.altup is not None:
            self.altup = AltUpStreams(spec.altup, spec.hidden_size, **factory)
            # A parameter is that of one stage.
            self.altup.projections = self.altup.projections if first else nn.ModuleList()
            self.altup.unembed_projections = self.altup.unembed_projections if last else nn.ModuleList()
        self.hyper_head: HyperHead | GatedResidualHead | None = None
        if last and isinstance(spec.hyper, GatedResidualSpec):
            self.hyper_head = GatedResidualHead(spec.hyper, spec, **factory)
        elif last and isinstance(spec.hyper, HyperConnectionSpec) and spec.hyper.learned_join:
            self.hyper_head = HyperHead(spec.hyper, spec, **_place(config), numerics=config.numerics)

    def begin(
        self, tokens_s: Tensor, x_s1D: Tensor, placeholder_I: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the streams of the first layer and the inputs of all layers, from tokens and their embeddings.

        Tokens ``placeholder_I`` have features of images for an embedding.
        """
        x_sD = x_s1D.squeeze(1)
        inputs_s1X = None
        if self.per_layer is not None:
            inputs_s1X = self.per_layer(tokens_s, x_sD, placeholder_I).flatten(1).unsqueeze(1)
        return (x_s1D.expand(-1, self._streams, -1) if self.altup is None else self.altup.split(x_sD)), inputs_s1X

    def receive(self, packed_s1X: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the streams and the inputs that an earlier stage has sent."""
        x_s1X, inputs_s1X = packed_s1X.tensor_split((self._width,), dim=-1)
        return x_s1X.reshape(len(packed_s1X), self._streams, -1), inputs_s1X if inputs_s1X.shape[-1] else None

    def send(self, x_sSD: Tensor, inputs_s1X: Tensor | None) -> Tensor:
        """Return the streams and the inputs of later stages as one tensor, which is no view."""
        x_s1X = x_sSD.reshape(len(x_sSD), 1, self._width)
        parts = [x_s1X] if inputs_s1X is None else [x_s1X, inputs_s1X[..., inputs_s1X.shape[-1] - self._behind :]]
        return torch.cat(parts, -1)

    def join(self, x_sSD: Tensor) -> Tensor:
        """Return the hidden states behind the last layer, [s, 1, D]."""
        if self.altup is not None:
            return self.altup.join(x_sSD).unsqueeze(1)
        if self.hyper_head is not None:
            return self.hyper_head(x_sSD).unsqueeze(1)
        return x_sSD if self._streams == 1 else mean_streams(x_sSD, self.numerics).unsqueeze(1)


# -- layers ---------------------------------------------------------------------------------


def select_input(inputs_s1X: Tensor, spec: DecoderSpec, layer: int) -> Tensor:
    """Return the input [s, P] of a layer, from those of this and later ones."""
    assert spec.per_layer_input is not None
    size = spec.per_layer_input.size
    return inputs_s1X.narrow(-1, inputs_s1X.shape[-1] - (spec.num_layers - layer) * size, size).squeeze(1)


def build_per_layer_input(config: DecoderTransformerConfig, index: int) -> PerLayerInput | None:
    """Build what a layer adds to its residual stream, or to all but one, from its input, if it has one."""
    spec = config.decoder_spec
    size = spec.layers[index].per_layer_size
    return PerLayerInput(spec.hidden_size, size, **_norm_options(config)) if size else None


def build_layer_streams(config: DecoderTransformerConfig, index: int) -> AltUpStep | HyperStep | None:
    """Build what reads and writes the residual streams of a layer; None if it has one stream."""
    layer = config.decoder_spec.layers[index]
    if layer.altup is not None:
        return AltUpStep(config, index)
    return None if layer.hyper is None else HyperStep(config, index)


class AltUpStep(nn.Module):
    """AltUp and the learned residual around the parts of Megatron's layer, as in ``models.decoder``."""

    def __init__(self, config: DecoderTransformerConfig, index: int) -> None:
        super().__init__()
        spec, options = config.decoder_spec, _norm_options(config)
        self.spec, self.index = spec, index
        layer = spec.layers[index]
        assert layer.altup is not None
        self.altup = AltUp(layer.altup, spec.hidden_size, **options)
        self.laurel = Laurel(layer.laurel_rank, spec.hidden_size, **options)

    def forward(self, layer: Any, x_sSD: Tensor, inputs_s1X: Tensor | None, packed: PackedParams) -> Tensor:
        """Return the streams behind Megatron's ``layer``."""
        assert inputs_s1X is not None
        altup = self.altup
        predicted_sSD = altup.predict(x_sSD)
        active_sD = predicted_sSD[:, altup.spec.active]
        y_sD = layer.input_layernorm(active_sD)
        mixed_sD = layer.self_attn_bda.norm(_attend(layer, y_sD, packed))
        x_sD = (active_sD + mixed_sD + self.laurel(y_sD)) * 2.0**-0.5
        out_sD = layer.mlp_bda.norm(_feed_forward(layer, layer.pre_mlp_layernorm(x_sD)))
        corrected_sSD = altup.correct(predicted_sSD, x_sD + out_sD)
        added_sD = layer.per_layer(altup.scale_active(corrected_sSD), select_input(inputs_s1X, self.spec, self.index))
        return altup.add_to_others(corrected_sSD, added_sD)


class HyperStep(nn.Module):
    """Hyper-connections around the parts of Megatron's layer, and n-gram embeddings, as in ``models.decoder``."""

    def __init__(self, config: DecoderTransformerConfig, index: int) -> None:
        super().__init__()
        spec, factory = config.decoder_spec, _factory(config)
        hyper, ngram = spec.hyper, rank_spec(config).layers[index].ngram
        assert hyper is not None
        self.spec, self.index = spec, index
        self.region = TensorParallelRegion(config)
        self.ngram = None if ngram is None else NgramEmbedding(ngram, spec, index, **factory)
        if self.ngram is not None and self.region.group.world > 1:
            split_table(self.ngram, self.region.group.rank, self.region.all_reduce)
        self.attention_hyper, self.mlp_hyper = (
            GatedResidual(hyper, spec, **factory)
            if isinstance(hyper, GatedResidualSpec)
            else HyperConnection(hyper, spec, **_place(config), numerics=config.numerics)
            for _ in range(2)
        )

    def forward(self, layer: Any, x_sSD: Tensor, inputs_s1X: Tensor | None, packed: PackedParams) -> Tensor:
        """Return the streams behind Megatron's ``layer``."""
        if self.ngram is not None:
            ngram = self.ngram
            x_sSD = x_sSD + self.region.run_on_all_slots(
                lambda x_tSD: ngram(x_tSD, packed.tokens_t, packed.attn_backend), x_sSD
            )
        read_sD, mixing = self.attention_hyper(x_sSD)
        out_sD = _attend(layer, layer.input_layernorm(read_sD), packed)
        x_sSD = self.attention_hyper.join(out_sD, x_sSD, mixing)
        read_sD, mixing = self.mlp_hyper(x_sSD)
        out_sD = _feed_forward(layer, layer.pre_mlp_layernorm(read_sD))
        return self.mlp_hyper.join(out_sD, x_sSD, mixing)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return the state for Megatron's checkpoints: the decoder's tensors, of which tables are sharded."""
        assert not sharded_offsets, "keys of these layers have their number"
        home = f"layers.{self.index}."
        mappings = build_param_mappings(self.spec, transformer_engine=False)
        own = {full.removeprefix(home): mapping for full, mapping in mappings.items() if full.startswith(home)}
        return dict(build_sharded_tensors(self, prefix, own))


def _attend(layer: Any, y_sD: Tensor, packed: PackedParams) -> Tensor:
    out_s1D, bias = layer.self_attention(y_sD.unsqueeze(1), attention_mask=None, packed_seq_params=packed)
    return (out_s1D if bias is None else out_s1D + bias).squeeze(1)


def _feed_forward(layer: Any, y_sD: Tensor) -> Tensor:
    y_s1D = y_sD.unsqueeze(1)
    out_s1D, bias = checkpoint(layer.mlp, False, y_s1D) if layer.recompute_mlp else layer.mlp(y_s1D)
    return (out_s1D if bias is None else out_s1D + bias).squeeze(1)


# -- recomputation --------------------------------------------------------------------------


def shares_keys(spec: DecoderSpec) -> bool:
    """Return whether a layer attends to the keys and values of another."""
    return any(isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_source is not None for layer in spec.layers)


def recompute_layers(
    block: TransformerBlock,
    *,
    hidden_states: Tensor,
    context: Tensor | None,
    packed_seq_params: PackedParams,
    **_: Any,
) -> Tensor:
    """Run the layers of ``block`` under checkpoints, in place of its own ``_checkpointed_forward``.

    Megatron's checkpoints run without gradients first, so that keys which later layers attend to would have none.
    """

    def run(layers: range, x_sSD: Tensor, inputs_s1X: Tensor | None) -> Tensor:
        for i in layers:
            x_sSD, _ = block.layers[i](
                hidden_states=x_sSD, attention_mask=None, context=inputs_s1X, packed_seq_params=packed_seq_params
            )
        return x_sSD

    for layers, is_recomputed in _split_recomputed(block):
        call = checkpoint_full(run, layers, hidden_states, context) if is_recomputed else None
        hidden_states = run(layers, hidden_states, context) if call is None else call
    return hidden_states


def _split_recomputed(block: TransformerBlock) -> Iterator[tuple[range, bool]]:
    """Yield runs of layers, and whether they are recomputed, as the method and number of layers of the config say."""
    config: Any = block.config
    count, each = len(block.layers), config.recompute_num_layers
    if config.recompute_method == "uniform":
        yield from ((range(first, min(first + each, count)), True) for first in range(0, count, each))
        return
    yield from ((range(i, i + 1), i < each) for i in range(count))
