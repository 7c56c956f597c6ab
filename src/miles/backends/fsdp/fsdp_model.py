"""Decoder sharded over several ranks, as the trainer's model: tensor, context and expert parallelism, and FSDP.

Each rank's decoder has some heads, channels and vocabulary rows (``tensor_parallel``) and some experts
(``expert_parallel``), of which FSDP shards the rows (``fully_shard``); a rank's part of a parameter is a
``ParamShard``.

``_T`` packed input tokens, ``_R`` trained tokens, ``L`` MoE layers, ``k`` experts per token, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.backends.fsdp import expert_parallel, tensor_parallel
from miles.backends.fsdp.autograd_collectives import gather_replicated
from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fully_shard import accept_no_images, apply_fully_shard
from miles.backends.fsdp.master_params import MasterParams
from miles.backends.fsdp.packed_batch import RankBatch, build_rank_batch
from miles.backends.fsdp.param_shard import build_param_shards
from miles.backends.fsdp.routing_replay import build_routing, collect_routing_stats
from miles.core.errors import CheckpointError, UsageError
from miles.kernels.attention.gather_rows import index_rows
from miles.kernels.numerics import Numerics
from miles.models.activation_checkpointing import RecomputeMode, set_recompute
from miles.models.checkpoint import hf
from miles.models.checkpoint.load import load_params
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import StoredTensor
from miles.models.checkpoint.save_plan import SavePlan, plan_save
from miles.models.checkpoint.tensor_sources import locate_tensors
from miles.models.decoder import Decoder, DecoderLayer
from miles.models.hidden_capture import HiddenCapture
from miles.models.layers.moe import Routing
from miles.models.lora.adapters import LoraAdapters, ParamPart
from miles.models.optim_groups import TRAINED_VISION, FrozenVision, MuonMatrices, find_muon_matrices, is_vision_param
from miles.models.parallel.quantized_shards import find_divided_block
from miles.models.parallel.tp_decoder import build_tp_decoder
from miles.models.parallel.tp_sharding import compute_tp_shards
from miles.models.quantization import count_packed_columns
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import MicroBatch
from miles.train.indexer_replay import collect_counts
from miles.train.logprobs import HeadOutput, PolicyFeatures, build_head_lora
from miles.train.model_protocols import KeptTensors, LossCallback
from miles.train.stopwatch import Stopwatch


class FsdpModel:
    """A TrainModel with uninitialized parameters and the numerics of ``mesh``; a ``frozen`` one takes no gradient, and
    ``frozen_vision`` parts neither.

    It computes in ``dtype``, and its parameters are float32 unless it is frozen. With ``cpu_offload`` they are on the
    host. Saved weights are accompanied by the tokenizer files of the folder ``like`` and by ``config``, else the config
    of ``like``, else one built from the spec. Training checkpoints have them in ``save_dtype``, by default ``dtype``.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        mesh: FsdpMesh,
        *,
        dtype: torch.dtype,
        config: Mapping[str, Any] | None = None,
        like: Path | None = None,
        save_dtype: torch.dtype | None = None,
        recompute: RecomputeMode = "none",
        recompute_layers: int | None = None,
        cpu_offload: bool = False,
        frozen: bool = False,
        frozen_vision: FrozenVision = TRAINED_VISION,
    ) -> None:
        problem = mesh.layout.find_model_problem(spec)
        if problem is not None:
            raise UsageError(problem)
        if (divided := find_divided_block(spec, mesh.tp_group.world)) is not None:
            raise UsageError(f"{divided}; lower --tensor-model-parallel-size.")
        self.spec = spec
        self.mesh = mesh
        self.dtype = dtype
        self._config, self._like = config, like
        self._save_dtype = save_dtype or dtype
        sharded = mesh.shard_mesh is not None
        self._decoder = self._build_decoder(torch.float32 if sharded and not frozen else dtype)
        if frozen:
            self._decoder.requires_grad_(False)
        rank_shapes = {name: parameter.shape for name, parameter in self._decoder.named_parameters()}
        for name in frozen_vision.select(rank_shapes):
            self._decoder.get_parameter(name).requires_grad_(False)
        set_recompute(self._decoder, recompute, recompute_layers)
        self._feature_layers: tuple[int, ...] | None = None
        self._adapters: LoraAdapters | None = None
        self._beside = False
        self._stopwatch, self._tokens = Stopwatch(mesh.device), 0
        self._time_layers()
        replicated = apply_fully_shard(
            self._decoder, mesh, dtype=dtype if sharded and not frozen else None, cpu_offload=cpu_offload
        )
        full = dict(Decoder(spec, device="meta", dtype=dtype, numerics=mesh.numerics).named_parameters())
        full_shapes = {name: parameter.shape for name, parameter in full.items()}
        self._shards = build_param_shards(
            compute_tp_shards(spec),
            full_shapes,
            rank_shapes,
            mesh,
            unmanaged=replicated,
            packs=count_packed_columns(spec, full_shapes),
        )
        self._decoder.to_empty(device="cpu" if cpu_offload and sharded else mesh.device)
        for name in replicated:  # FSDP does not move these to the device
            self._decoder.get_parameter(name).data = self._decoder.get_parameter(name).data.to(mesh.device)
        self._masters = MasterParams(self._decoder)
        self._vocab_shard = None
        if mesh.tp_group.world > 1:
            self._vocab_shard = tensor_parallel.VocabShard(spec.vocab_size, mesh.tp_group, padding=spec.vocab_padding)

    def freeze_head(self) -> None:
        """Do not train the head, unless it is the embedding; call before the first forward."""
        if self._decoder.lm_head is not None:
            self._decoder.lm_head.requires_grad_(False)
            self.parameters()["lm_head.weight"].requires_grad_(False)

    def attach_adapters(self, adapters: LoraAdapters, *, beside: bool = False) -> None:
        """Attach LoRA adapters, which are replicated on every rank, merged into the weights or ``beside`` them; call
        before the first forward.
        """
        self._adapters, self._beside = adapters, beside
        if beside:
            adapters.attach_beside(self._decoder, self._find_rank_part)
        else:
            adapters.attach(self._decoder, self._find_rank_part)

    def _find_rank_part(self, name: str) -> ParamPart:
        return self._shards[name].find_rank_part()

    def local_part(self, name: str) -> ParamPart:
        """Return which part of a parameter this rank has."""
        return self._shards[name].find_local_part()

    def sum_grad(self, grad: Tensor) -> Tensor:
        """All-reduce the gradient of replicated factors.

        Ranks have other tokens, or other channels or experts of a layer: each has a part of the sum.
        """
        return self.mesh.world_group.sum(grad)

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        """All-reduce by the maximum over all ranks."""
        return self.mesh.world_group.max(tensor)

    def counts_grad(self, name: str) -> bool:
        """Return whether this rank counts the gradient of a parameter's adapters in the sum over ranks.

        Tensor-parallel ranks encode the same images, unless they have other tokens: one of them counts.
        """
        return not is_vision_param(name) or self.mesh.layout.sequence or self.mesh.tp_group.rank == 0

    @property
    def rank(self) -> int:
        """The number of this rank among those that have other tokens."""
        return self.mesh.dp_group.dp_rank * self.mesh.cp_group.world + self.mesh.cp_group.rank

    def _build_decoder(self, dtype: torch.dtype) -> Decoder:
        """Build this rank's decoder, without storage, with its collectives."""
        collectives = tensor_parallel.build_tp_collectives(self.mesh.tp_group, sequence=self.mesh.layout.sequence)
        decoder = build_tp_decoder(
            self.spec,
            self.mesh.tp_group,
            device="meta",
            dtype=dtype,
            numerics=self.numerics,
            collectives=collectives,
        )
        expert_parallel.shard_experts(decoder, self.mesh.ep_group)
        if decoder.vision is not None:
            assert self.spec.vision is not None
            num_deepstack = len(self.spec.vision.tower.deepstack_layers)
            accept_no_images(decoder.vision, self.spec.hidden_size, num_deepstack, self._adapts_vision)
        return decoder

    def _adapts_vision(self) -> bool:
        return self._adapters is not None and any(map(is_vision_param, self._adapters.targets_by_param))

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def numerics(self) -> Numerics:
        return self.mesh.numerics

    # -- parameters and gradients ---------------------------------------------------------------

    def parameters(self) -> Mapping[str, Tensor]:
        return self._masters.tensors

    def finalize_grads(self) -> None:
        grads = self._masters.collect_grads()
        starts = {name: self._shards[name].bounds[0] for name in grads}
        tensor_parallel.reduce_partial_grads(
            grads, compute_tp_shards(self.spec), starts, self.mesh.tp_group, sequence=self.mesh.layout.sequence
        )

    def squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Compute the sum of squares of the gradient values that no earlier rank has."""
        found = [self._shards[name].squares(grad).to(self.device) for name, grad in grads.items()]
        return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=self.device)

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return self.mesh.world_group.sum(self.squares(grads)).sqrt().float()

    def after_update(self) -> None:
        self._masters.sync_to_module()

    def gather(self, name: str, local: Tensor) -> Tensor:
        return self._shards[name].gather(local)

    def shard(self, name: str, full: Tensor) -> Tensor:
        return self._shards[name].shard(full)

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return find_muon_matrices(self.spec)

    def move(self, device: torch.device) -> None:
        self._masters.move(device)

    # -- forward and backward ------------------------------------------------------------------

    def forward_backward(self, plan: Sequence[MicroBatch], judge: LossCallback) -> list[KeptTensors]:
        kept: list[KeptTensors] = []
        for number, rows in enumerate(plan):
            output = self._output(rows)
            with self._stopwatch:
                loss, found = judge(number, output)
            self._tokens += len(rows.tokens_T)
            # Adapters of a vision tower alone have no gradient from a global batch without images.
            if loss is not None and loss.requires_grad:
                loss.backward()
            kept.append(found)
        return kept

    def seconds_per_token(self) -> float | None:
        """Of the layers' forward, each with its weights brought together already, and of the loss."""
        seconds = self._stopwatch.read_and_reset()
        tokens = self._tokens
        self._tokens = 0
        return seconds / tokens if tokens else None

    def _time_layers(self) -> None:
        """Time the layers' forward; called before FSDP wraps them, so that all-gathers are not included."""
        for layer in self._decoder.layers:
            assert isinstance(layer, DecoderLayer)
            layer.forward_deferred = self._stopwatch.wrap(layer.forward_deferred)
            layer.register_forward_pre_hook(lambda module, args: self._stopwatch.__enter__())
            layer.register_forward_hook(lambda module, args, out: self._stopwatch.__exit__(None, None, None))

    def enable_features(self, layers: Sequence[int]) -> None:
        """Return the features of a draft model from every forward with gradients from now on."""
        self._feature_layers = tuple(layers)

    def _output(self, rows: MicroBatch) -> HeadOutput:
        packed = build_rank_batch(rows, self.mesh, self.spec)
        routing = build_routing(self.spec, packed.replay_TLk, rows.routed_cache, device=self.device, fill=packed.fill)
        hidden_rD, features = self._read_features(packed, routing)
        stats = collect_routing_stats(routing, rows.routed_cache, self.mesh.cp_group.sum)
        lora = None
        if self._adapters is not None:
            lora = build_head_lora(self._adapters, merged=not self._beside, part_of=self._find_rank_part)
        indexer = collect_counts(packed.selections, self.device, self.mesh.cp_group.sum, self.mesh.tp_group.sum)
        return HeadOutput(
            hidden_RD=hidden_rD,
            head_VD=self._decoder.head(),
            softcap=self.spec.logit_softcap,
            vocabulary=self._vocab_shard,
            tokens=packed.tokens,
            flips=stats.flips,
            replayed=stats.replayed,
            indexer_flips=None if indexer is None else indexer.mismatches,
            indexer_replayed=None if indexer is None else indexer.replayed,
            load_LE=stats.load_LE,
            numerics=self.numerics,
            features=features,
            lora=lora,
        )

    def _read_features(self, packed: RankBatch, routing: Routing | None) -> tuple[Tensor, PolicyFeatures | None]:
        """Compute the needed hidden states, and the features of a draft model if they are wanted."""
        wanted = self._feature_layers if torch.is_grad_enabled() else None
        if wanted is None:
            return self.read(packed, routing), None
        capture = HiddenCapture(wanted) if wanted else None
        hidden_TD = self._decoder(
            packed.tokens_T, packed.positions_T, packed.attn_backend, routing, packed.vision, capture
        )
        found_TF = hidden_TD.detach() if capture is None else capture.concatenate()
        if self.mesh.layout.sequence:
            hidden_TD = gather_replicated(hidden_TD, self.mesh.tp_group)
            found_TF = self.mesh.tp_group.all_gather(found_TF)
        if packed.place_T is None:
            found_TF = found_TF[: len(found_TF) - packed.fill]
        else:
            found_TF = self.mesh.cp_group.all_gather(found_TF).index_select(0, packed.place_T)
        features = PolicyFeatures(
            features_TF=found_TF,
            embedding_VD=self._gather_vocabulary(self._decoder.embedding.weight),
            head_VD=self._gather_vocabulary(self._decoder.head()),
        )
        return index_rows(hidden_TD, packed.at_r, repeated=packed.repeated), features

    def _gather_vocabulary(self, local_VD: Tensor) -> Tensor:
        """Return all rows of the embedding or head, detached; a rank's rows are padded at the end."""
        return self.mesh.tp_group.all_gather(local_VD.detach())[: self.spec.vocab_size]

    def read(self, packed: RankBatch, routing: Routing | None = None) -> Tensor:
        """Compute the needed hidden states of this rank, [r, D], equal on all tensor-parallel ranks."""
        hidden_TD = self._decoder(packed.tokens_T, packed.positions_T, packed.attn_backend, routing, packed.vision)
        if self.mesh.layout.sequence:
            hidden_TD = gather_replicated(hidden_TD, self.mesh.tp_group)
        return index_rows(hidden_TD, packed.at_r, repeated=packed.repeated)

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        self.export(folder, lambda name: self.gather(name, self.parameters()[name].detach()))

    def export(self, folder: Path, gather_unit: Callable[[str], Tensor]) -> None:
        """Write a Hugging Face model in the model's dtype, of the full tensors that ``gather_unit`` returns."""
        spec = replace(self.spec, quantization=None)
        decoder = Decoder(spec, device="meta", dtype=self.dtype, numerics=self.numerics)
        lead = self.mesh.dp_group.is_lead
        found: dict[str, Tensor] = {}
        for name, wanted in decoder.named_parameters():
            full = gather_unit(name)
            if lead:
                found[name] = full.to(device="cpu", dtype=wanted.dtype)
        if lead:
            decoder.load_state_dict(found, assign=True)
            hf.export(decoder, folder, like=self._like, config=self._config)
        self.barrier()  # until the files are written

    def barrier(self) -> None:
        """Wait until every rank arrives."""
        self.mesh.world_group.sum(torch.zeros((), device=self.device))

    def save_plan(self) -> SavePlan:
        return plan_save(
            replace(self.spec, quantization=None), dtype=self._save_dtype, like=self._like, config=self._config
        )

    def load(self, folder: Path) -> None:
        tensors = hf.load_decoder_params(folder, self.spec, device="cpu", dtype=self._get_load_dtype())
        self._load_params(folder, tensors)

    def load_decoder(self, folder: Path, stored: Mapping[str, StoredTensor]) -> None:
        """Load the decoder of some of the tensors of ``folder``, which are not quantized."""
        decoder = Decoder(self.spec, device="meta", dtype=self._get_load_dtype(), numerics=self.numerics)
        sources = locate_tensors(self.spec, stored, None, folder)
        wanted = dict(decoder.named_parameters())
        self._load_params(folder, load_params(sources, wanted, rank=0, world=1, device="cpu", reader=FileReader()))

    def _get_load_dtype(self) -> torch.dtype:
        # Corrections and integers are kept in their own dtypes.
        params = self.parameters().items()
        floats = (p for name, p in params if p.is_floating_point() and not name.endswith(".correction"))
        return next((p.dtype for p in floats), self.dtype)

    @torch.no_grad()
    def _load_params(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy full tensors into the parameters."""
        missing = dict(self.parameters())
        for name, full in tensors:
            param = missing.pop(name, None)
            if param is None or full.shape != self._shards[name].full_shape:
                raise CheckpointError(f"{folder} does not match the model in training (see {name}).")
            param.copy_(self.shard(name, full))
        if missing:
            raise CheckpointError(f"{folder} does not match the model in training (see {min(missing)}).")
        self.after_update()
