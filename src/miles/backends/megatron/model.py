"""Decoder run by Megatron-Core, as the trainer's model.

A rank has its pipeline stage's layers, of these its tensor-parallel rank's channels and its expert-parallel rank's
experts. Gradients are plain sums: partial gradients are reduced once, in ``finalize_grads``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

from miles.backends.megatron import checkpoint, patches
from miles.backends.megatron.buffers import ParamGradBuffers
from miles.backends.megatron.distributed_optimizer import MegatronOptimizer
from miles.backends.megatron.flags import DISTRIBUTED_OPTIMIZER, parse_flags
from miles.backends.megatron.forward import DraftFeatures, run_forward_backward
from miles.backends.megatron.layer_spec import GPTBackbone, build_gpt_backbone
from miles.backends.megatron.lora import attach_adapters, find_part
from miles.backends.megatron.module_choice import list_adapted_parts
from miles.backends.megatron.packed_batch import MegatronRows
from miles.backends.megatron.parallel_state import MegatronGroup, ParallelState, initialize_parallel_state
from miles.backends.megatron.param_mapping import LM_HEAD, TIED, ParamMapping, build_head_mappings, build_param_mappings
from miles.backends.megatron.param_registry import ParamRegistry
from miles.backends.megatron.router import RouterBalance, split_balance, update_expert_bias
from miles.backends.megatron.supported_models import holds_packed_weights
from miles.backends.megatron.transformer_config import DecoderTransformerConfig, build_transformer_config
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import CheckpointError
from miles.kernels.numerics import FAST, Numerics
from miles.models.checkpoint import hf
from miles.models.checkpoint.load import load_params
from miles.models.checkpoint.packed import load_packed
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import param_shape
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import StoredTensor, read_config, stored_tensors
from miles.models.checkpoint.save_plan import SavePlan, plan_save
from miles.models.checkpoint.tensor_sources import locate_tensors, read_quant_config
from miles.models.checkpoint.torch_dist_folders import is_torch_dist
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.lora.adapters import LoraAdapters, ParamPart
from miles.models.lora.targets import LoraSpec
from miles.models.optim_groups import TRAINED_VISION, FrozenVision, MuonMatrices, find_muon_matrices, is_vision_param
from miles.models.quantization import QuantizedParam, plan_quantization
from miles.models.spec import DecoderSpec
from miles.train.config import TrainConfig
from miles.train.dp_group import DataParallelGroup
from miles.train.logprobs import TrainedHeadLora, build_head_lora
from miles.train.model_protocols import KeptTensors, LossCallback
from miles.train.optim.lr_scheduler import LRSchedule
from miles.train.optim.optimizer import OptimizerProtocol
from miles.train.stopwatch import Stopwatch


def load_megatron_model(
    folder: Path | str,
    spec: DecoderSpec,
    layout: ParallelDims,
    *,
    dtype: torch.dtype,
    flags: Sequence[str] = (),
    frozen: bool = False,
    transformer_engine: bool = True,
    device: torch.device | None = None,
    config: Mapping[str, Any] | None = None,
    like: Path | None = None,
    scalar_head: Mapping[str, tuple[int, ...]] | None = None,
    balanced: bool = True,
    numerics: Numerics = FAST,
    lora: LoraSpec | None = None,
    frozen_vision: FrozenVision = TRAINED_VISION,
) -> MegatronModel:
    """Load the model of the Hugging Face ``folder`` over the ranks of torch's default group; every rank calls it.

    ``flags`` are Megatron's own, as on a command line. ``device`` is this rank's; by default its current GPU, or the
    CPU. Saved weights are accompanied by ``config`` and the tokenizer files of ``like``, by default those of
    ``folder``. Transformer Engine is used where it is installed, unless ``transformer_engine`` is false. With the
    shapes of a ``scalar_head`` the model has this head too, with zeros. Flags of the load balancing of routers are
    ignored unless ``balanced``: they are about the policy, and another model may have no routers. With batch-invariant
    ``numerics`` its layers are those of ``batch_invariant_layers``. Parts whose packed weights, or adapters of
    ``lora``, Megatron's modules cannot have are the decoder's modules. ``frozen_vision`` parts are not trained.
    """
    assert frozen or not holds_packed_weights(spec), "packed weights are not trained"
    fields = parse_flags(flags)
    if not balanced:
        _, fields = split_balance(fields)
    distributed_optimizer = bool(fields.pop(DISTRIBUTED_OPTIMIZER, False))
    device = _use_device(device)
    tf_config = build_transformer_config(
        spec,
        layout,
        fields,
        dtype=dtype,
        device=device,
        transformer_engine=transformer_engine,
        numerics=numerics,
        adapted=list_adapted_parts(spec, lora),
    )
    state = initialize_parallel_state(layout, virtual=tf_config.virtual_pipeline_model_parallel_size)
    patches.patch_router_without_te()
    patches.patch_mla_without_te()
    patches.patch_optimizer_without_te()
    model = MegatronModel(
        tf_config,
        state,
        frozen=frozen,
        distributed_optimizer=distributed_optimizer,
        config=config,
        like=Path(folder) if like is None else like,
        scalar_head=scalar_head or {},
        frozen_vision=frozen_vision,
    )
    model.load(Path(folder))
    return model


def _use_device(device: torch.device | None) -> torch.device:
    """Return the device of this rank, which becomes the current one: Megatron allocates on that."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class MegatronModel:
    """A TrainModel over Megatron's modules, filled by ``load``; a ``frozen`` one takes no gradient.

    With ``distributed_optimizer`` its optimizer is Megatron's (``optimizer``); over a frozen one ranks share the
    moments of adapters. A ``scalar_head`` on the last stage, given by its tensors' shapes, is trained in float32; the
    decoder's own head, unless it is the embedding, is then not trained.
    """

    def __init__(
        self,
        tf_config: DecoderTransformerConfig,
        state: ParallelState,
        *,
        frozen: bool = False,
        distributed_optimizer: bool = False,
        config: Mapping[str, Any] | None = None,
        like: Path | None = None,
        scalar_head: Mapping[str, tuple[int, ...]] | None = None,
        frozen_vision: FrozenVision = TRAINED_VISION,
    ) -> None:
        self.tf_config = tf_config
        self.state = state
        self.spec = tf_config.decoder_spec
        self._config, self._like = config, like
        self._stopwatch, self._tokens = Stopwatch(tf_config.param_device), 0
        self._feature_layers: tuple[int, ...] | None = None
        self._has_images = False
        self._adapters: LoraAdapters | None = None
        self._adapter_hooks: list[RemovableHandle] = []
        self._beside = False
        self._expert_load_LE: Tensor | None = None
        self._save_group: Any = None
        self._chunks = _build_chunks(tf_config, state)
        self.scalar_head = dict(scalar_head or {})
        for chunk in self._chunks:
            if chunk.post_process:
                chunk.add_scalar_head(self.scalar_head, tf_config.param_device)
        self._decoder_mappings = build_param_mappings(
            tf_config.decoder_spec,
            transformer_engine=tf_config.transformer_engine,
            batch_invariant=tf_config.numerics.batch_invariant,
            adapted=tf_config.adapted,
        )
        self.mappings: Mapping[str, ParamMapping] = {
            **self._decoder_mappings,
            **build_head_mappings(self.scalar_head),
        }
        use_buffers = distributed_optimizer and not frozen
        self._shards_moments = distributed_optimizer and frozen
        self._registry = ParamRegistry(
            self._chunks,
            tf_config,
            state,
            self.mappings,
            trained=not frozen,
            buffers=use_buffers,
            scalar_head=self.scalar_head,
            frozen_vision=frozen_vision,
        )
        self._buffers = (
            ParamGradBuffers(self._chunks, tf_config, self._registry, self.mappings) if use_buffers else None
        )

    @property
    def numerics(self) -> Numerics:
        return self.tf_config.numerics

    @property
    def device(self) -> torch.device:
        return self.tf_config.param_device

    @property
    def dp_group(self) -> DataParallelGroup:
        """The data-parallel group."""
        return self.state.dp_group

    @property
    def pipeline_size(self) -> int:
        """The number of pipeline ranks."""
        return self.state.pp_group.world

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters, float32 if trained; empty for those of another stage."""
        return self._registry.parameters

    def forward_backward(
        self, plan: Sequence[MegatronRows], judge: LossCallback, *, is_policy: bool = True
    ) -> list[KeptTensors]:
        """As that of a TrainModel. If it ``is_policy``, router balancing and a draft's features are as configured."""
        balance = self.tf_config.balance if is_policy else RouterBalance()
        self._tokens += sum(len(rows.tokens_T) for rows in plan)
        # Every rank knows whether a global batch has images, also one whose samples have none.
        self._has_images |= torch.is_grad_enabled() and any(rows.images is not None for rows in plan)
        return run_forward_backward(
            self._chunks,
            self.tf_config,
            self.state,
            plan,
            judge,
            trained=self._registry.trained or self._adapters is not None,
            stopwatch=self._stopwatch,
            balance=balance,
            add_expert_load=self._add_expert_load if balance.bias_rate else None,
            draft=self._gather_draft_features() if is_policy and torch.is_grad_enabled() else None,
            build_lora=self._build_head_lora,
        )

    def _build_head_lora(self) -> TrainedHeadLora | None:
        """Return the adapter of this rank's rows of the output layer, with a graph of its own for each micro-batch."""
        if self._adapters is None:
            return None
        return build_head_lora(self._adapters, merged=not self._beside, part_of=self.local_part)

    def enable_features(self, layers: Sequence[int]) -> None:
        """Return the features of a draft model from every forward with gradients from now on."""
        self._feature_layers = tuple(layers)

    @torch.no_grad()
    def _gather_draft_features(self) -> DraftFeatures | None:
        """Gather the whole embedding and head, which are on other stages and tensor-parallel ranks, on every rank.

        None if no draft is trained.
        """
        if self._feature_layers is None:
            return None
        params, dtype = self.parameters(), self.tf_config.params_dtype
        names = (TIED, TIED if self.spec.tie_embeddings else LM_HEAD)
        found = {name: self.gather(name, params[name].detach().to(dtype)) for name in dict.fromkeys(names)}
        return DraftFeatures(self._feature_layers, found[names[0]], found[names[1]])

    def _add_expert_load(self, load_LE: Tensor) -> None:
        self._expert_load_LE = load_LE if self._expert_load_LE is None else self._expert_load_LE + load_LE

    def seconds_per_token(self) -> float | None:
        """Of the forward of this rank's stages."""
        seconds = self._stopwatch.read_and_reset()
        tokens = self._tokens
        self._tokens = 0
        return seconds / tokens if tokens else None

    # -- LoRA -------------------------------------------------------------------------------

    def attach_adapters(self, adapters: LoraAdapters, *, beside: bool = False) -> None:
        """Attach LoRA adapters, which are replicated on every rank, merged into the weights or ``beside`` them; others
        that are attached are detached.

        The model must be frozen, and its linear layers those without Transformer Engine, whose norms are separate.
        """
        assert not self._registry.trained and not self.tf_config.transformer_engine
        for hook in self._adapter_hooks:
            hook.remove()
        self._adapters, self._beside = adapters, beside
        self._adapter_hooks = attach_adapters(
            self._chunks,
            adapters,
            self.mappings,
            self.state,
            sequence=bool(self.tf_config.sequence_parallel),
            beside=beside,
        )

    def local_part(self, name: str) -> ParamPart:
        """Return which part of a parameter this rank has."""
        part = find_part(self.mappings[name], self.state)
        return part if name in self._registry.local_names else replace(part, rows=torch.empty(0, dtype=torch.int64))

    def sum_grad(self, grad: Tensor) -> Tensor:
        """All-reduce the gradient of replicated factors: ranks have other tokens, channels or layers."""
        return self.state.world_group.sum(grad)

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        """All-reduce by the maximum over all ranks."""
        return self.state.world_group.max(tensor)

    def counts_grad(self, name: str) -> bool:
        """Return whether this rank counts the gradient of a parameter's adapters in the sum over ranks.

        Tensor-parallel ranks encode the same images, unless they have other tokens: one of them counts.
        """
        return not is_vision_param(name) or self.tf_config.sequence_parallel or self.state.tp_group.rank == 0

    @property
    def moments_group(self) -> MegatronGroup | None:
        """The ranks that share the moments of adapters: all, since adapters are replicated on every rank."""
        return self.state.world_group if self._shards_moments else None

    @property
    def rank(self) -> int:
        """The number of this rank among those that have other tokens."""
        return self.state.dp_cp_group.rank

    # -- gradients --------------------------------------------------------------------------

    def finalize_grads(self) -> None:
        state = self.state
        mappings = self.mappings
        sequence = self.tf_config.sequence_parallel
        own = self._registry.grads() if self._buffers is None else self._buffers.grads()
        state.tp_group.all_reduce_bucketed(
            [own[n] for n in own if mappings[n].summed or (sequence and mappings[n].by_token)]
        )
        if self._buffers is not None:
            self._buffers.reduce()
        else:
            state.expert_dp_group.all_reduce_bucketed([own[n] for n in own if mappings[n].expert])
            state.dp_cp_group.all_reduce_bucketed([own[n] for n in own if not mappings[n].expert])
        # Last, and over the same values on both stages, so that both get the same bits.
        if self.spec.tie_embeddings and state.pp_group.world > 1 and state.embedding_group is not None and TIED in own:
            state.embedding_group.all_reduce_bucketed([own[TIED]])
        if self._buffers is None:
            self._registry.set_grads(own, images=self._has_images)
        self._has_images = False

    def optimizer(self, train: TrainConfig, schedule: LRSchedule, *, lr_flag: str) -> OptimizerProtocol | None:
        """Build Megatron's distributed optimizer if it was selected, once per model; None otherwise."""
        if self._buffers is None:
            return None
        return MegatronOptimizer(
            self._buffers, self._registry, self.mappings, self.state, train, schedule, rate=lr_flag
        )

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        parts = [grad for name, grad in grads.items() if self.is_main_replica(name)]
        norms = torch._foreach_norm(parts) if parts else []  # pyright: ignore[reportPrivateImportUsage]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in norms:
            square += each.to(device=self.device, dtype=torch.float64).square()
        return self.state.world_group.sum(square).sqrt().to(torch.float32)

    def is_main_replica(self, name: str) -> bool:
        """Return whether this rank's part of a parameter counts, among all ranks that have the same."""
        mapping, state = self.mappings[name], self.state
        if not self._registry.owns(name) or not (mapping.tp_shard.segments or state.tp_group.rank == 0):
            return False
        same = state.expert_dp_group if mapping.expert else state.dp_cp_group
        return same.rank == 0

    # -- sharding ---------------------------------------------------------------------------

    def gather(self, name: str, local: Tensor) -> Tensor:
        mapping, group = self.mappings[name], self.state.pp_group
        full = self._gather_local(mapping, local) if self._registry.owns(name) else local.new_empty(mapping.shape)
        return group.broadcast(full.contiguous(), self._registry.stage(name))

    def _gather_local(self, mapping: ParamMapping, local: Tensor) -> Tensor:
        if mapping.expert:
            part = mapping.tp_shard.gather(self.state.etp_group.gather(local))
            found = self.state.ep_group.gather(part)
            return found[0] if len(found) == 1 else torch.cat(found)
        if mapping.tp_shard.first_rank_only:
            return self.state.tp_group.broadcast(local.clone(), 0)
        if not mapping.tp_shard.segments:
            return local
        return mapping.from_megatron(mapping.tp_shard.gather(self.state.tp_group.gather(local)))

    def shard(self, name: str, full: Tensor) -> Tensor:
        if name not in self._registry.local_names:
            return full.new_empty((0, *full.shape[1:]))
        mapping, state = self.mappings[name], self.state
        if not mapping.expert:
            return self._shard_channels(name, full)
        each = len(full) // state.ep_group.world
        return self._shard_channels(name, full[state.ep_group.rank * each : (state.ep_group.rank + 1) * each])

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return find_muon_matrices(self.spec)

    def _shard_channels(self, name: str, experts: Tensor) -> Tensor:
        """Return this rank's part of a parameter, or of this rank's experts."""
        mapping, state = self.mappings[name], self.state
        group = state.etp_group if mapping.expert else state.tp_group
        return mapping.tp_shard.shard(mapping.to_megatron(experts), group.rank, group.world)

    # -- checkpoints and state ----------------------------------------------------------------

    def after_update(self) -> None:
        self._registry.publish()
        if self._expert_load_LE is not None:
            self._update_expert_bias(self._expert_load_LE)
            self._expert_load_LE = None

    @torch.no_grad()
    def _update_expert_bias(self, load_LE: Tensor) -> None:
        """Update the correction bias of this rank's routers from the selections of the last optimizer step."""
        load_LE = self.state.dp_cp_group.sum(load_LE)
        if self.tf_config.sequence_parallel:
            load_LE = self.state.tp_group.sum(load_LE)
        for slot, layer in enumerate(self.spec.moe_layers):
            for bias_E in self._registry.modules(f"layers.{layer}.moe.correction"):
                update_expert_bias(bias_E, load_LE[slot], self.tf_config.balance.bias_rate)

    def move(self, device: torch.device) -> None:
        self._registry.move(device)
        if self._buffers is not None:
            self._buffers.move(device)

    def save_plan(self) -> SavePlan:
        spec = replace(self.spec, quantization=None)
        return plan_save(spec, dtype=self.tf_config.params_dtype, like=self._like, config=self._config)

    def save(self, folder: Path) -> None:
        """Write a folder that transformers loads; all ranks call, and the lead gathers all weights on its host.

        Training checkpoints are written by all ranks, one tensor at a time: see ``train.checkpoint`` and ``save_plan``.
        """
        params = self.parameters()
        self.export(folder, lambda name: self.gather(name, params[name].detach()))

    def export(self, folder: Path, gather_unit: Callable[[str], Tensor]) -> None:
        """Write a Hugging Face model of the full tensors that ``gather_unit`` returns."""
        gathered: dict[str, Tensor] = {}
        spec = replace(self.spec, quantization=None)
        decoder = Decoder(spec, device="meta", dtype=self.tf_config.params_dtype, numerics=self.numerics)
        for name, param in decoder.named_parameters():
            full = gather_unit(name)
            if self.dp_group.is_lead:
                gathered[name] = full.to(device="cpu", dtype=param.dtype)
        if self.dp_group.is_lead:
            decoder.load_state_dict(gathered, assign=True)
            hf.export(decoder, folder, like=self._like, config=self._config)
        self.barrier()  # until the files are written

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.state.world_group.sum(torch.zeros((), device=self.device))

    def load(self, folder: Path) -> None:
        """Load this rank's parts: only the tensors of its stage and its own experts are read."""
        if is_torch_dist(folder):
            checkpoint.load(self, folder)
            return
        self.load_decoder(folder, spec_from_config(read_config(folder)), stored_tensors(folder))

    def save_torch_dist(
        self,
        folder: Path,
        optimizer: OptimizerProtocol,
        *,
        iteration: int,
        background: bool = False,
        gather_unit: Callable[[str], Tensor] | None = None,
        replicated: Mapping[str, Tensor] | None = None,
    ) -> tuple[bool, Callable[[], None] | None]:
        """Write Megatron's distributed checkpoint; the optimizer's state is in it if it is Megatron's."""
        is_megatrons = isinstance(optimizer, MegatronOptimizer)
        if background and self._save_group is None:
            # Collectives of a thread must not meet those of training.
            self._save_group = dist.new_group(backend="gloo")
        group = self._save_group if background else None
        stored = optimizer if is_megatrons else None
        how: Any = {"iteration": iteration, "group": group, "gather_unit": gather_unit, "replicated": replicated}
        return is_megatrons, checkpoint.save(self, folder, stored, **how)

    def load_torch_dist(self, folder: Path, optimizer: OptimizerProtocol) -> None:
        """Load weights and Megatron's optimizer from its distributed checkpoint, of any layout."""
        if not isinstance(optimizer, MegatronOptimizer):
            raise CheckpointError(
                f"{folder} has the state of Megatron's optimizer; resume with --megatron-use-distributed-optimizer."
            )
        checkpoint.load(self, folder, optimizer)

    def find_different_weight(self, folder: Path, gather_unit: Callable[[str], Tensor]) -> str | None:
        """Return the first weight of a distributed checkpoint that differs from the full tensors of ``gather_unit``."""
        return checkpoint.find_different_weight(self, folder, gather_unit)

    @torch.no_grad()
    def set_params(self, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's part of each parameter."""
        params = self.parameters()
        for name, tensor in tensors.items():
            params[name].copy_(tensor)
        self._registry.publish()

    @property
    def has_adapted_parts(self) -> bool:
        """Whether some parts are the decoder's modules for the sake of their adapters."""
        return bool(self.tf_config.adapted)

    def has_param(self, name: str) -> bool:
        """Return whether this rank has a part of a parameter."""
        return name in self._registry.local_names

    @torch.no_grad()
    def load_decoder(self, folder: Path, spec: DecoderSpec, stored: Mapping[str, StoredTensor]) -> None:
        """Load this rank's parts from some of the tensors of ``folder``, which are a model of ``spec``."""
        mappings = self._decoder_mappings
        sources = locate_tensors(spec, stored, read_quant_config(read_config(folder)), folder)
        shapes = {name: param_shape(tuple(s.piece for s in parts)) for name, parts in sources.items()}
        wanted = {name: param_shape(parts) for name, parts in build_param_map(self.spec).items()}
        mismatched = shapes.keys() ^ wanted.keys() or {name for name in wanted if shapes[name] != wanted[name]}
        if mismatched:
            raise CheckpointError(f"{folder} does not match the model in training (see {min(mismatched)}).")
        packed = {name: q for name, q in plan_quantization(self.spec).items() if q.packed}
        self._load_packed(folder, packed)
        sources = {name: parts for name, parts in sources.items() if name not in packed}
        params, group = self.parameters(), self.state.ep_group
        full = {n: torch.empty(mappings[n].shape, device="meta", dtype=params[n].dtype) for n in sources}
        for expert, rank, world in ((False, 0, 1), (True, group.rank, group.world)):
            local = {
                name: parts
                for name, parts in sources.items()
                if name in self._registry.local_names and mappings[name].expert is expert
            }
            tensors = load_params(local, full, rank=rank, world=world, device=self.device, reader=FileReader())
            for name, tensor in tensors:
                params[name].copy_(self._shard_channels(name, tensor))
        self._registry.publish()

    def _load_packed(self, folder: Path, packed: Mapping[str, QuantizedParam]) -> None:
        """Load this rank's parts of ``packed`` weights, which are quantized where ``folder`` has not their bytes."""
        params, group = self.parameters(), self.state.ep_group
        local = {name: each for name, each in packed.items() if name in self._registry.local_names}
        for is_expert, rank, world in ((False, 0, 1), (True, group.rank, group.world)):
            own = {name: each for name, each in local.items() if self._decoder_mappings[name].expert is is_expert}
            if not own:
                continue
            tensors = load_packed(
                folder,
                self.spec,
                {name: each.format for name, each in own.items()},
                device=self.device,
                dtype=self.tf_config.params_dtype,
                tensor_parallel_size=next(iter(own.values())).tensor_parallel_size,
                rank=rank,
                world=world,
            )
            for name, tensor in tensors:
                params[name].copy_(self._shard_channels(name, tensor))

    def chunks(self) -> dict[str, GPTBackbone]:
        """Return this rank's chunks of layers under the names of Megatron's own checkpoints."""
        if len(self._chunks) == 1:
            return {"model": self._chunks[0]}
        return {f"model{number}": chunk for number, chunk in enumerate(self._chunks)}

    def adopt(self) -> None:
        """Update the parameters after Megatron's modules were written."""
        self._registry.adopt()


def _build_chunks(tf_config: DecoderTransformerConfig, state: ParallelState) -> list[GPTBackbone]:
    """Build this pipeline rank's chunks of layers."""
    count = tf_config.virtual_pipeline_model_parallel_size
    rank = state.pp_group.rank
    last = state.pp_group.world - 1
    if count is None:
        return [
            build_gpt_backbone(tf_config, first=rank == 0, last=rank == last, stage=None, rank=rank).to(
                tf_config.param_device
            )
        ]
    chunks: list[GPTBackbone] = []
    for stage in range(count):
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        first, end = rank == 0 and stage == 0, rank == last and stage == count - 1
        chunks.append(
            build_gpt_backbone(tf_config, first=first, last=end, stage=stage, rank=rank).to(tf_config.param_device)
        )
    return chunks
