"""A policy and its draft on Megatron's ranks, and in one process. Imported by the ranks: no transformers here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.train.draft_ranks import TRAIN, train
from torch.nn import functional as F

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.executor import InlineExecutor
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Sample
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.numerics import FAST, Numerics
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.draft.base import PolicyWeights
from miles.models.draft.checkpoint import init_eagle, load_mtp
from miles.models.draft.eagle import EagleDraft
from miles.models.draft.mtp import MtpDraft
from miles.models.draft.spec import build_eagle_spec
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import flatten_batch, pack_micro_batch
from miles.train.config import TrainConfig
from miles.train.dp_group import SINGLE_RANK
from miles.train.draft_trainer import DraftTrainer
from miles.train.policy_trainer import PolicyTrainer

Found = tuple[list[dict[str, float]], dict[str, np.ndarray], dict[str, np.ndarray]]
Batches = Sequence[Sequence[Sample]] | str
"""Samples of each step, or the kind of model of one step whose samples have images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRun:
    """Which draft is trained, if any, and how; with ``modules`` the policy is adapters of these."""

    kind: str | None
    train: TrainConfig = TRAIN
    numerics: Numerics = FAST
    temperature: float = 1.0
    modules: str | None = None


def train_alone(folder: Path, batches: Batches, run: DraftRun) -> Found:
    """The metrics of each step, the policy and its draft after them: one process of the embedded trainer."""
    decoder = hf.load(folder, device="cpu", dtype=torch.float32, numerics=run.numerics)
    model: Any = LocalModel(decoder, config=read_config(folder), frozen=run.modules is not None)
    return _train(model, folder, batches, run, SINGLE_RANK)


def train_on_ranks(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batches: Batches,
    run: DraftRun,
    target: Path | None = None,
    start: Path | None = None,
) -> Found:
    """The same on one of Megatron's ranks, from the checkpoint ``start`` if there is one."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        config = read_config(folder)
        spec, how = spec_from_config(config), {"flags": flags, "config": config, "numerics": run.numerics}
        if run.modules is not None:
            from tests.backends.megatron.cases import lora_of

            how |= {"frozen": True, "lora": lora_of(spec, run.modules)}
        model = load_megatron_model(folder, spec, layout, dtype=torch.float32, **how)
        try:
            found = _train(model, folder, batches, run, model.dp_group, layout.pipeline, target, start)
            model.barrier()
            return found
        finally:
            destroy_parallel_state()


def _train(
    model: Any,
    folder: Path,
    batches: Batches,
    run: DraftRun,
    group: Any,
    stages: int = 1,
    target: Path | None = None,
    start: Path | None = None,
) -> Found:
    if run.modules is not None:
        from tests.backends.megatron.cases import adapted, read_lora

        model = adapted(model, folder, read_lora(folder, run.modules))
    draft = build_draft(folder, run)
    drafter = None
    if draft is not None:
        drafter = DraftTrainer(
            draft, train=run.train, temperature=run.temperature, dp_group=group, pipeline_size=stages
        )
    policy_train = run.train
    if isinstance(batches, str):
        from tests.backends.megatron.vision_cases import TOKENS, image_samples

        batches = [image_samples(batches, "turns")] * 2
        policy_train = replace(policy_train, max_tokens_per_gpu=TOKENS)
    trainer = PolicyTrainer(
        model,
        algo=AlgoConfig(),
        train=policy_train,
        steps=1,
        updates=10,
        temperature=run.temperature,
        run=InlineExecutor(),
        draft=drafter,
        dp_group=group,
    )
    if start is not None:
        asyncio.run(trainer.load(start))
    metrics = train(trainer, [list(samples) for samples in batches])
    if target is not None:
        asyncio.run(trainer.save(target))
    policy = {n: model.gather(n, p.detach()).numpy().copy() for n, p in model.parameters().items()}
    own = {} if draft is None else {n: p.detach().numpy().copy() for n, p in draft.named_parameters()}
    return metrics, policy, own


def build_draft(folder: Path, run: DraftRun) -> MtpDraft | EagleDraft | None:
    """The MTP layers of the checkpoint, or a new EAGLE-3 head."""
    spec = spec_from_config(read_config(folder))
    how: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "numerics": run.numerics}
    if run.kind == "mtp":
        return load_mtp(folder, spec, **how)
    return None if run.kind is None else init_eagle(build_eagle_spec(spec), seed=3, **how)


def compare_first_depth(rank: int, world: int, folder: Path, batch: list[Sample]) -> dict[str, float]:
    """How far Megatron's own MTP layer and ours are apart: states of the first depth, and gradients by name."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron import patches
        from miles.backends.megatron.parallel_state import destroy_parallel_state, initialize_parallel_state

        policy = spec_from_config(read_config(folder))
        ours = load_mtp(folder, policy, device="cpu", dtype=torch.float32)
        spec = replace(policy, layers=(*policy.layers, ours.spec.decoder.layers[0]))
        state = initialize_parallel_state(ParallelDims(world=1))
        patches.patch_router_without_te()
        try:
            theirs, pairs = build_megatrons_layer(spec, ours)
            return _compare_layers(spec, state, theirs, ours, pairs, batch)
        finally:
            destroy_parallel_state()


def build_megatrons_layer(spec: DecoderSpec, ours: MtpDraft) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """Megatron's MTP layer with our weights, and some of them in pairs; the last layer of ``spec`` is its own."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer, get_mtp_layer_spec

    from miles.backends.megatron.layer_spec import MegatronRMSNorm, _layer_module_spec
    from miles.backends.megatron.param_mapping import build_param_mappings
    from miles.backends.megatron.param_registry import _find_layer_tensors
    from miles.backends.megatron.transformer_config import build_transformer_config

    last, layout = spec.num_layers - 1, ParallelDims(world=1)
    tf_config = build_transformer_config(spec, layout, {}, dtype=torch.float32, device=torch.device("cpu"))
    tf_config.num_layers = last
    parts: Any = get_mtp_layer_spec(_layer_module_spec(tf_config, last), False).submodules
    parts.enorm = parts.hnorm = parts.layer_norm = MegatronRMSNorm
    groups = ProcessGroupCollection.use_mpu_process_groups()
    theirs = MultiTokenPredictionLayer(tf_config, parts, 1, pg_collection=groups)
    block: Any = ours.blocks[0]
    pairs = {
        "enorm": (theirs.enorm.weight, block.embedding_norm.weight),
        "hnorm": (theirs.hnorm.weight, block.hidden_norm.weight),
        "projection": (theirs.eh_proj.weight, block.projection.weight),
        "norm": (theirs.final_layernorm.weight, block.norm.weight),
    }
    own, prefix = dict(block.layer.named_parameters()), f"layers.{last}."
    with torch.no_grad():
        for their, our in pairs.values():
            their.copy_(our)
        for name, mapping in build_param_mappings(spec, transformer_engine=False).items():
            if name.startswith(prefix):
                whole = mapping.to_megatron(own[name.removeprefix(prefix)])
                tensors = _find_layer_tensors(theirs.transformer_layer, name)
                for tensor, part in zip(tensors, whole if mapping.expert else [whole], strict=True):
                    tensor.copy_(part)
    return theirs, pairs


def _compare_layers(
    spec: DecoderSpec, state: Any, theirs: Any, ours: MtpDraft, pairs: dict[str, tuple[Any, Any]], batch: list[Sample]
) -> dict[str, float]:
    from miles.backends.megatron.packed_batch import build_megatron_batch

    flat = flatten_batch([[s] for s in batch], lambda counts: np.ones(len(counts)))
    rows = pack_micro_batch(flat, range(len(batch)), device=torch.device("cpu"), replay=False, share=False)
    packed = build_megatron_batch(rows, spec, state, sequence=False, dtype=torch.float32)
    ends = torch.tensor([0, *rows.lengths]).cumsum(0).int()
    packed.packed.cu_seqlens_q = packed.packed.cu_seqlens_kv = ends
    noise = torch.Generator().manual_seed(3)
    width, count = spec.hidden_size, len(rows.tokens_T)
    hidden_TD = torch.randn(count, width, generator=noise)
    embedding_VD = torch.randn(spec.vocab_size, width, generator=noise)
    # The last token of a sequence has no next one; what is read there is not used.
    weight_TD = torch.randn(count, width, generator=noise).index_fill(0, ends[1:].long() - 1, 0.0)
    out, _, _ = theirs(
        input_ids=packed.tokens_1t,
        position_ids=packed.tokens_1t,
        hidden_states=hidden_TD[:, None],
        attention_mask=None,
        packed_seq_params=packed.packed,
        embedding=lambda input_ids, position_ids: F.embedding(input_ids[0], embedding_VD)[:, None],
    )
    ours.share(PolicyWeights(embed=lambda tokens_T: F.embedding(tokens_T, embedding_VD), head=lambda: embedding_VD))
    attention = VarlenAttentionBackend(rows.lengths, "cpu")
    own_TD = ours(hidden_TD, rows.tokens_T.roll(-1), rows.positions_T, attention)
    (out[:, 0] * weight_TD).sum().backward()
    (own_TD * weight_TD).sum().backward()
    far = {"states": float(((out[:, 0] - own_TD) * (weight_TD[:, :1] != 0)).abs().max())}
    for name, (their, our) in pairs.items():
        assert their.grad is not None and their.grad.abs().max() > 0
        far[name] = float((their.grad - our.grad).abs().max() / our.grad.abs().max())
    return far
