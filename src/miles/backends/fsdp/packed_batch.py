"""A rank's part of a packed micro-batch, with or without context parallelism.

``_T`` input tokens of this rank, ``_R`` tokens whose hidden states are needed, ``_r`` those of them on this rank, ``L``
MoE layers, ``k`` experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.backends.fsdp.context_parallel import PackedRows, RankBatch, shard_batch
from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.core.errors import MilesError
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.models.spec import DecoderSpec
from miles.models.vision.inputs import VisionInputs
from miles.train.indexer_replay import build_selections
from miles.train.packed_images import PackedImages, prepare_positions, select_range
from miles.train.prefix_sharing import TreeNode, build_attention, check_supported


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedText:
    """Packed tokens without sampling data."""

    lengths: Sequence[int]
    tokens_T: Tensor
    positions_T: Tensor
    before_R: Tensor
    replay_TLk: Tensor | None = None
    indexer_TLk: Tensor | None = None
    tree_nodes: Sequence[TreeNode] = ()
    images: PackedImages | None = None


def build_rank_batch(rows: PackedRows, mesh: FsdpMesh, spec: DecoderSpec) -> RankBatch:
    """Build this rank's part of ``rows``, which is the same on all ranks of a data-parallel part."""
    check_supported(spec, rows.tree_nodes)
    longest, most = max(rows.lengths), spec.max_positions
    if longest > most:
        raise MilesError(f"a sample of {longest} tokens is longer than the {most} positions of the model's config.")
    multiple = mesh.tp_group.world if mesh.layout.sequence else 1
    vision = None if rows.images is None else rows.images.build_vision_inputs(spec, mesh.device)
    selections = build_selections(spec, rows.indexer_TLk, tp_rank=mesh.tp_group.rank, tp_size=mesh.tp_group.world)
    if mesh.cp_group.world > 1:
        if rows.images is not None:
            rows.images.check_context_parallel(spec)
        batch = shard_batch(
            rows,
            mesh.cp_group,
            numerics=mesh.numerics,
            multiple=multiple,
            positions_T=prepare_positions(rows.images, spec, rows.positions_T),
            vision=vision,
            selections=selections,
        )
    else:
        batch = _build_batch(rows, mesh, spec, multiple, vision, selections)
    if batch.vision is None or not mesh.layout.sequence:
        return batch
    # Under sequence parallelism the residual stream, which the features enter, has this rank's tokens only.
    count = len(batch.tokens_T) // mesh.tp_group.world
    place_T = torch.arange(len(batch.tokens_T), device=mesh.device)
    return replace(batch, vision=select_range(batch.vision, place_T, mesh.tp_group.rank * count, count))


def _build_batch(
    rows: PackedRows,
    mesh: FsdpMesh,
    spec: DecoderSpec,
    multiple: int,
    vision: VisionInputs | None,
    selections: IndexerSelections | None,
) -> RankBatch:
    """Build the batch of a rank that has all tokens, padded to a ``multiple`` of so many."""
    padded = _pad(rows, -len(rows.tokens_T) % multiple)
    fill = len(padded.tokens_T) - len(rows.tokens_T)
    ends_T = None if rows.images is None else rows.images.build_visible_ends(spec, padding=fill)
    if selections is not None:
        selections = replace(selections, replay_TLk=padded.indexer_TLk)
    return RankBatch(
        tokens_T=padded.tokens_T,
        positions_T=prepare_positions(rows.images, spec, padded.positions_T, padding=fill),
        attn_backend=build_attention(
            padded.lengths,
            padded.tree_nodes,
            mesh.device,
            numerics=mesh.numerics,
            visible_ends_T=ends_T,
            selections=selections,
        ),
        at_r=padded.before_R,
        replay_TLk=padded.replay_TLk,
        repeated=bool(rows.tree_nodes),
        fill=fill,
        vision=vision,
        selections=selections,
    )


def _pad(rows: PackedRows, missing: int) -> PackedText:
    """Append ``missing`` padding tokens as a sequence, so that ranks that share tokens have equally many."""
    text = PackedText(
        lengths=rows.lengths,
        tokens_T=rows.tokens_T,
        positions_T=rows.positions_T,
        before_R=rows.before_R,
        replay_TLk=rows.replay_TLk,
        indexer_TLk=rows.indexer_TLk,
        tree_nodes=rows.tree_nodes,
        images=rows.images,
    )
    if not missing:
        return text
    replay_TLk, indexer_TLk = (
        each if each is None else torch.cat((each, each.new_full((missing, *each.shape[1:]), -1)))
        for each in (rows.replay_TLk, rows.indexer_TLk)
    )
    return replace(
        text,
        lengths=(*rows.lengths, missing),
        tokens_T=torch.cat((rows.tokens_T, rows.tokens_T.new_zeros(missing))),
        positions_T=torch.cat((rows.positions_T, torch.arange(missing, device=rows.positions_T.device))),
        replay_TLk=replay_TLk,
        indexer_TLk=indexer_TLk,
        tree_nodes=(*rows.tree_nodes, TreeNode(missing)) if rows.tree_nodes else (),
    )
