"""What a context rank of a test does; imports little, as every borrowed process does so anew."""

from pathlib import Path

import torch
from tests.backends.fsdp.parted import Found, trained
from torch import distributed as dist

from miles.backends.fsdp.context import cut
from miles.backends.fsdp.mesh import Mesh, Ring
from miles.backends.fsdp.sharded import open_sharded
from miles.kernels.segments_rows import pick
from miles.models.decoder import Decoder, Routing
from miles.models.families import spec_of
from miles.models.hub import read_config
from miles.train.logits import Output, logprobs

CPU = torch.device("cpu")


def decoder_of(spec, *, again=False):
    """Weights far from tame, so that mistakes show; the same in every process."""
    decoder = Decoder(spec, device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
    decoder.checkpoint_layers = again
    return decoder


def learnt(decoder, rows, output):
    """The loss, and every gradient of it."""
    logp_R, entropy_R = logprobs(output, rows.target_R, chunk=16)
    loss = (rows.weight_R * (rows.advantage_R * logp_R + 0.1 * entropy_R)).sum()
    loss.backward()
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return loss.item(), torch.stack((logp_R, entropy_R)).detach(), grads


def share_of(rank, world, cases):
    """Each case cut over the ranks; gradients are summands."""
    ring, found = Ring(dist.group.WORLD, CPU), []
    for spec, rows, again, multiple in cases:
        decoder, part = decoder_of(spec, again=again), cut(rows, ring, multiple=multiple)
        assert len(part.tokens_t) % multiple == 0
        routing = None if part.replay_tLk is None else Routing(replay_TLk=part.replay_tLk)
        hidden_tD = decoder(part.tokens_t, part.positions_t, part.attend, routing)
        hidden_rD = pick(hidden_tD, part.before_r)
        output = Output(hidden_RD=hidden_rD, head_VD=decoder.head(), softcap=spec.logit_softcap, tokens=part.tokens)
        loss, read, grads = learnt(decoder, rows, output)
        summed = {name: ring.sum(grad.clone()) for name, grad in grads.items()}
        joined_RD = part.tokens.join(hidden_rD.detach())
        found.append((loss, read, summed, joined_RD, len(part.tokens_t)))
    return [tuple(_bare(x) for x in each) for each in found] if rank < 2 else None


def _bare(x):
    """Arrays travel between processes by value."""
    if isinstance(x, dict):
        return {name: value.numpy() for name, value in x.items()}
    return x.numpy() if isinstance(x, torch.Tensor) else x


def sharded(rank, world, folder, layouts, plan):
    """A step of a model that the ranks hold together, on one part of a batch or two."""
    found: list[Found] = []
    for layout in layouts:
        mesh = Mesh(layout, CPU)
        model = open_sharded(Path(folder), spec_of(read_config(folder)), mesh, dtype=torch.float32)
        found.append(trained(model, plan[mesh.peers.part :: mesh.peers.parts], mesh.peers, True))
    return found if rank == 0 else None
