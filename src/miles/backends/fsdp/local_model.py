"""Decoder in one process, as the trainer's model.

``_T`` packed input tokens, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles.backends.fsdp.routing_replay import RoutingStats, build_routing, collect_routing_stats
from miles.cluster.host_copies import HostCopies
from miles.core.errors import CheckpointError, MilesError
from miles.kernels.attention.gather_rows import index_rows
from miles.kernels.numerics import Numerics
from miles.models.base import CausalLM
from miles.models.checkpoint import hf
from miles.models.checkpoint.save_plan import SavePlan, plan_save
from miles.models.decoder import Decoder
from miles.models.hf_adapter.decoder import HfDecoder
from miles.models.hidden_capture import HiddenCapture
from miles.models.lora.adapters import WHOLE, LoraAdapters, ParamPart
from miles.models.optim_groups import TRAINED_VISION, FrozenVision, MuonMatrices, find_muon_matrices
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import MicroBatch, RoutedExpertsCache
from miles.train.indexer_replay import IndexerCounts, build_selections, collect_counts
from miles.train.logprobs import HeadOutput, PolicyFeatures, build_head_lora
from miles.train.model_protocols import KeptTensors, LossCallback
from miles.train.optim.optimizer import full_grad_norm
from miles.train.packed_images import PackedImages, prepare_positions
from miles.train.prefix_sharing import TreeNode, build_attention, check_supported


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOutput(RoutingStats):
    """Hidden states of a packed batch and routing statistics. ``flips`` counts the replayed experts that the router
    would not have selected, out of ``replayed``; both None if nothing was replayed. ``indexer`` are the counts of
    replayed selections, if there are any.
    """

    hidden_TD: Tensor
    indexer: IndexerCounts | None = None


class _Unsharded:
    """ShardedParameters in one process: parameters and gradients are always complete."""

    def parameters(self) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def finalize_grads(self) -> None:
        """Gradients need no reduction."""

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return full_grad_norm(grads)

    def after_update(self) -> None:
        """There are no copies of the parameters."""

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local

    def shard(self, name: str, full: Tensor) -> Tensor:
        return full

    @cached_property
    def _host_copies(self) -> HostCopies:
        return HostCopies()

    def move(self, device: torch.device) -> None:
        self._host_copies.move(self.parameters(), device)


class LocalModel(_Unsharded):
    """A TrainModel over ``decoder``; a ``frozen`` one takes no gradient, and ``frozen_vision`` parts neither.

    Saved weights are accompanied by the tokenizer files of the folder ``like`` and by ``config``, else the config of
    ``like``, else one built from the spec. Training checkpoints have them in ``save_dtype``, if it is given; the
    weights as they are trained are then saved with the optimizer state.
    """

    def __init__(
        self,
        decoder: CausalLM,
        *,
        config: Mapping[str, Any] | None = None,
        like: Path | None = None,
        save_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        frozen: bool = False,
        frozen_vision: FrozenVision = TRAINED_VISION,
    ) -> None:
        self._decoder = decoder
        self._config = config
        self._like = like
        self._save_dtype = save_dtype
        self._feature_layers: tuple[int, ...] | None = None
        self._adapters: LoraAdapters | None = None
        self._beside = False
        if frozen:
            self.freeze()
        decoder.checkpoint_layers = gradient_checkpointing
        self._parameters: dict[str, Tensor] = dict(decoder.named_parameters())
        for name in frozen_vision.select(self._parameters):
            self._parameters[name].requires_grad_(False)

    def freeze(self) -> None:
        """Train no parameter of it."""
        self._decoder.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self._decoder.head().device

    @property
    def numerics(self) -> Numerics:
        return self._decoder.numerics

    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def head(self) -> Tensor:
        """Return the output weight [V, D]."""
        return self._decoder.head()

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return find_muon_matrices(self._decoder.spec)

    def attach_adapters(self, adapters: LoraAdapters, *, beside: bool = False) -> None:
        """Attach LoRA adapters, merged into the weights or ``beside`` them; call before the first forward."""
        if isinstance(self._decoder, HfDecoder):
            assert not beside, "a packed base needs the native decoder"
            adapters.attach_to_linears(self._decoder.module)
            return
        assert isinstance(self._decoder, Decoder), "LoRA needs a decoder whose projections it knows"
        self._adapters, self._beside = adapters, beside
        if beside:
            adapters.attach_beside(self._decoder)
        else:
            adapters.attach(self._decoder)

    def local_part(self, name: str) -> ParamPart:
        """Return which part of a parameter this rank has."""
        return WHOLE

    def sum_grad(self, grad: Tensor) -> Tensor:
        """All-reduce the gradient of replicated factors; a no-op in one process."""
        return grad

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        """All-reduce by the maximum; a no-op in one process."""
        return tensor

    def counts_grad(self, name: str) -> bool:
        """Return whether this rank counts the gradient of a parameter's adapters in the sum over ranks."""
        return True

    @property
    def rank(self) -> int:
        """The number of this rank among those that have other tokens."""
        return 0

    @property
    def spec(self) -> DecoderSpec:
        return self._decoder.spec

    def forward_backward(self, plan: Sequence[MicroBatch], judge: LossCallback) -> list[KeptTensors]:
        kept: list[KeptTensors] = []
        for number, rows in enumerate(plan):
            loss, found = judge(number, self._output(rows))
            # Adapters of a vision tower alone have no gradient from a micro-batch without images.
            if loss is not None and loss.requires_grad:
                loss.backward()
            kept.append(found)
        return kept

    def enable_features(self, layers: Sequence[int]) -> None:
        """Return the features of a draft model from every forward with gradients from now on."""
        assert isinstance(self._decoder, Decoder), "features need the native decoder"
        self._feature_layers = tuple(layers)

    def _output(self, rows: MicroBatch) -> HeadOutput:
        spec = self._decoder.spec
        check_supported(spec, rows.tree_nodes)
        wanted = self._feature_layers if torch.is_grad_enabled() else None
        capture = HiddenCapture(wanted) if wanted else None
        read = self.read(
            rows.tokens_T,
            rows.positions_T,
            rows.lengths,
            rows.replay_TLk,
            rows.tree_nodes,
            rows.routed_cache,
            rows.images,
            capture,
            rows.indexer_TLk,
        )
        features = None
        if wanted is not None:
            assert isinstance(self._decoder, Decoder)
            found_TF = read.hidden_TD.detach() if capture is None else capture.concatenate()
            features = PolicyFeatures(
                features_TF=found_TF, embedding_VD=self._decoder.embedding.weight, head_VD=self.head()
            )
        return HeadOutput(
            hidden_RD=index_rows(read.hidden_TD, rows.before_R, repeated=bool(rows.tree_nodes)),
            head_VD=self.head(),
            softcap=spec.logit_softcap,
            flips=read.flips,
            replayed=read.replayed,
            indexer_flips=None if read.indexer is None else read.indexer.mismatches,
            indexer_replayed=None if read.indexer is None else read.indexer.replayed,
            load_LE=read.load_LE,
            numerics=self.numerics,
            features=features,
            lora=None if self._adapters is None else build_head_lora(self._adapters, merged=not self._beside),
        )

    def read(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        replay_TLk: Tensor | None,
        tree_nodes: Sequence[TreeNode] = (),
        used: RoutedExpertsCache | None = None,
        images: PackedImages | None = None,
        capture: HiddenCapture | None = None,
        indexer_TLk: Tensor | None = None,
    ) -> PackedOutput:
        """Compute the hidden states of packed sequences without padding, or of a prefix tree of ``tree_nodes``."""
        longest, most = max(lengths), self._decoder.spec.max_positions
        if longest > most:
            raise MilesError(f"a sample of {longest} tokens is longer than the {most} positions of the model's config.")
        routing = None
        if isinstance(self._decoder, Decoder):  # routing of transformers modules is neither recorded nor replayed
            routing = build_routing(self._decoder.spec, replay_TLk, used, device=self.device)
        ends_T = None if images is None else images.build_visible_ends(self.spec)
        selections = build_selections(self.spec, indexer_TLk)
        attn_backend = build_attention(
            lengths,
            tree_nodes,
            self.device,
            numerics=self.numerics,
            visible_ends_T=ends_T,
            selections=selections,
        )
        # Only the native decoder captures; other models may not have the argument.
        extra: dict[str, Any] = {} if capture is None else {"capture": capture}
        if images is None or images.is_empty:
            hidden_TD = self._decoder(tokens_T, positions_T, attn_backend, routing, **extra)
        else:
            vision = images.build_vision_inputs(self.spec, self.device)
            positions_T = prepare_positions(images, self.spec, positions_T)
            hidden_TD = self._decoder(tokens_T, positions_T, attn_backend, routing, vision, **extra)
        stats = collect_routing_stats(routing, used)
        return PackedOutput(
            hidden_TD=hidden_TD,
            flips=stats.flips,
            replayed=stats.replayed,
            load_LE=stats.load_LE,
            indexer=collect_counts(selections, self.device),
        )

    def save(self, folder: Path) -> None:
        hf.save_model(self._decoder, folder, like=self._like, config=self._config)

    def export(self, folder: Path, gather_unit: Callable[[str], Tensor]) -> None:
        """Write a Hugging Face model in the model's dtype, of the full tensors that ``gather_unit`` returns."""
        spec, dtype = replace(self._decoder.spec, quantization=None), self.head().dtype
        decoder = Decoder(spec, device="meta", dtype=dtype, numerics=self.numerics)
        params = {name: gather_unit(name).to(wanted.dtype) for name, wanted in decoder.named_parameters()}
        decoder.load_state_dict(params, assign=True)
        hf.export(decoder, folder, like=self._like, config=self._config)

    def save_plan(self) -> SavePlan | None:
        spec = self._decoder.spec
        is_packed = spec.quantization is not None and spec.quantization.packed
        if isinstance(self._decoder, Decoder) and (self._save_dtype is not None or is_packed):
            spec, dtype = replace(spec, quantization=None), self._save_dtype or self.head().dtype
            return plan_save(spec, dtype=dtype, like=self._like, config=self._config)
        return hf.plan_model_save(self._decoder, like=self._like, config=self._config)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        missing = dict(self._parameters)
        for name, tensor in hf.iter_model_tensors(self._decoder, folder):
            param = missing.pop(name, None)
            if param is None or tensor.shape != param.shape:
                raise CheckpointError(f"{folder} does not match the model in training (see {name}).")
            param.copy_(tensor)
        if missing:
            raise CheckpointError(f"{folder} does not match the model in training (see {min(missing)}).")


class LocalHeadModel(_Unsharded):
    """A decoder with a small float32 head of its own, initially zero: what critic and reward model have in common.

    The decoder's own head, unless it is the embedding, is saved with the model but not trained.
    """

    def __init__(
        self,
        decoder: CausalLM,
        head: Mapping[str, tuple[int, ...]],
        *,
        config: Mapping[str, Any] | None,
        like: Path | None,
        gradient_checkpointing: bool,
        frozen_vision: FrozenVision = TRAINED_VISION,
    ) -> None:
        self._backbone = LocalModel(
            decoder,
            config=config,
            like=like,
            gradient_checkpointing=gradient_checkpointing,
            frozen_vision=frozen_vision,
        )
        if not decoder.spec.tie_embeddings:
            weight_VD = decoder.head()
            # It may be a view of the rows that are tokens.
            (weight_VD if weight_VD._base is None else weight_VD._base).requires_grad_(False)
        self._head: dict[str, Tensor] = {
            name: nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=self._backbone.device))
            for name, shape in head.items()
        }

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self._backbone.parameters(), **self._head}

    @property
    def backbone(self) -> LocalModel:
        """The decoder as a model, without the head."""
        return self._backbone

    @property
    def head_parameters(self) -> Mapping[str, Tensor]:
        """The head's parameters."""
        return self._head

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return self._backbone.muon_matrices()
