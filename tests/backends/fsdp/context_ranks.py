"""Functions that context-parallel test ranks run; few imports, since every process repeats them."""

from pathlib import Path

import torch
from tests.backends.fsdp.load import load_fsdp_model
from tests.backends.fsdp.sharded_runs import Found, trained
from tests.models.parallel.split_scans import splitting_all
from torch import distributed as dist

from miles.backends.fsdp.context_parallel import shard_batch
from miles.backends.fsdp.device_mesh import CommGroup, FsdpMesh
from miles.kernels.attention.gather_rows import index_rows
from miles.kernels.numerics import FAST
from miles.models.checkpoint.hf import read_config
from miles.models.decoder import Decoder, Routing
from miles.models.families import spec_from_config
from miles.models.layers.ngram_embedding import NgramEmbedding
from miles.train.indexer_replay import build_selections, collect_counts
from miles.train.logprobs import HeadOutput, compute_logprobs

CPU = torch.device("cpu")


def decoder_of(spec, *, recompute=False, dtype=torch.float32, numerics=FAST):
    """Weights far from tame, so that mistakes show; the same in every process."""
    decoder = Decoder(spec, device="cpu", dtype=dtype, numerics=numerics)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
        for module in decoder.modules():
            if isinstance(module, NgramEmbedding):
                for name, constant in module.constants().items():
                    module.get_parameter(name).copy_(constant)
    decoder.checkpoint_layers = recompute
    return decoder


def learnt(decoder, rows, output):
    """The loss, and every gradient of it."""
    logp_R, entropy_R = compute_logprobs(output, rows.target_R, chunk=16)
    loss = (rows.weight_R * (rows.advantage_R * logp_R + 0.1 * entropy_R)).sum()
    loss.backward()
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return loss.item(), torch.stack((logp_R, entropy_R)).detach(), grads


def share_of(rank, world, cases, splits):
    """Each case cut over the ranks; gradients are summands.

    If it ``splits``, recurrent layers pass states on, of sequences of any length.
    """
    with splitting_all(splits):
        return _share_of(rank, cases)


def _share_of(rank, cases):
    group, found = CommGroup(dist.group.WORLD, CPU, numerics=FAST), []
    for spec, rows, recompute, multiple, dtype in cases:
        decoder, part = (
            decoder_of(spec, recompute=recompute, dtype=dtype),
            shard_batch(
                rows,
                group,
                multiple=multiple,
                numerics=FAST,
                selections=build_selections(spec, rows.indexer_TLk),
            ),
        )
        assert len(part.tokens_T) % multiple == 0
        routing = None if part.replay_TLk is None else Routing(replay_TLk=part.replay_TLk)
        hidden_tD = decoder(part.tokens_T, part.positions_T, part.attn_backend, routing)
        counts = collect_counts(part.selections, CPU, group.sum)
        assert (counts is None) == (rows.indexer_TLk is None)
        assert counts is None or 0 < int(counts.mismatches) < int(counts.replayed)
        hidden_rD = index_rows(hidden_tD, part.at_r)
        output = HeadOutput(hidden_RD=hidden_rD, head_VD=decoder.head(), softcap=spec.logit_softcap, tokens=part.tokens)
        loss, read, grads = learnt(decoder, rows, output)
        summed = {name: group.sum(grad.clone()) for name, grad in grads.items()}
        joined_RD = part.tokens.join(hidden_rD.detach())
        found.append((loss, read, summed, joined_RD, len(part.tokens_T)))
    return [tuple(_bare(x) for x in each) for each in found] if rank < 2 else None


def kept_on_a_rank(rank, world, cases):
    """Bytes that autograd holds after a forward of this rank's part of each case, and its tokens; weights aside."""
    group, found = CommGroup(dist.group.WORLD, CPU, numerics=FAST), []
    for spec, rows, numerics in cases:
        decoder = decoder_of(spec, numerics=numerics)
        part = shard_batch(rows, group, numerics=numerics)
        own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
        held: dict[int, torch.Tensor] = {}

        def keep(tensor, own=own, held=held):
            if tensor.untyped_storage().data_ptr() not in own:
                held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder(part.tokens_T, part.positions_T, part.attn_backend, None)
        found.append((sum(tensor.untyped_storage().nbytes() for tensor in held.values()), len(part.tokens_T)))
    return found


def _bare(x):
    """Arrays travel between processes by value."""
    if isinstance(x, dict):
        return {name: value.numpy() for name, value in x.items()}
    return x.numpy() if isinstance(x, torch.Tensor) else x


def sharded(rank, world, folder, layouts, plan):
    """A step of a model that the ranks hold together, on one part of a batch or two."""
    found: list[Found] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, CPU)
        model = load_fsdp_model(Path(folder), spec_from_config(read_config(folder)), mesh, dtype=torch.float32)
        found.append(trained(model, plan[mesh.dp_group.dp_rank :: mesh.dp_group.dp_size], mesh.dp_group, True))
    return found if rank == 0 else None
