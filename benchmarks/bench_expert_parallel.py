"""Cost of expert parallelism over two ranks: step time against all experts on each rank, and bytes exchanged.

Both ranks process their own tokens, forward and backward, alternately with all experts and with half of them, so a rank
has the same matmul work in both. A ratio above 1 is the exchange: sorting twice and moving rows four times, over
loopback sockets; below 1, each rank's experts have more rows at once and fewer gradients to write. CPU time says the
same where the machine is busy with other things.

The limit for bytes is a token sent once to each other rank that has any of its experts, and one row back. A row per
expert choice is sent instead, because a token's choices are then summed in the same order for any number of ranks.

    PYTHONPATH=src python benchmarks/bench_expert_parallel.py [--tokens 1024] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

from miles.backends.fsdp import expert_parallel
from miles.backends.fsdp.device_mesh import CommGroup, FsdpMesh
from miles.cluster.parallel_dims import ParallelDims
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.checkpoint.hf import init_random
from miles.models.decoder import Decoder, Routing
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec, RopeSpec

WORLD = 2
MOE = MoeSpec(num_experts=32, experts_per_token=4, size=384, norm_topk_prob=True)
ATTENTION = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=64, rope=RopeSpec(theta=1e6), qk_norm="head")
SPEC = DecoderSpec(
    family="bench",
    vocab_size=1024,
    hidden_size=512,
    norm_eps=1e-6,
    layers=(LayerSpec(mixer=ATTENTION, ffn=MOE),) * 2,
    tie_embeddings=True,
    max_positions=4096,
    eos_token_ids=(),
)


class ByteCountingGroup:
    """A group that counts the bytes that leave this rank."""

    def __init__(self, group: CommGroup) -> None:
        self.group, self.rank, self.world, self.bytes = group, group.rank, group.world, 0

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        away = sum(sent) - sent[self.rank]
        self.bytes += away * x[:1].numel() * x.element_size() if len(x) else 0
        return self.group.all_to_all(x, sent, received)


def step(decoder: Decoder, tokens_T: Tensor, lengths: Sequence[int], routing: Routing | None = None) -> None:
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    hidden_TD = decoder(tokens_T, positions_T, VarlenAttentionBackend(lengths, "cpu"), routing)
    hidden_TD.square().sum().backward()
    decoder.zero_grad()


def least(recorded: Sequence[Tensor], rank: int) -> int:
    """Rows that must leave a rank in one direction: a token once for each other rank with any of its experts."""
    each, rows = MOE.num_experts // WORLD, 0
    for experts_Tk in recorded:
        owner_Tk = experts_Tk // each
        rows += sum(int((owner_Tk == other).any(-1).sum()) for other in range(WORLD) if other != rank)
    return rows


def run(rank: int, store: str, tokens: int, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = FsdpMesh(ParallelDims(world=WORLD, shard=WORLD, expert=WORLD), torch.device("cpu"))
    whole = init_random(SPEC, seed=0, device="cpu", dtype=torch.float32)
    cut = init_random(SPEC, seed=0, device="cpu", dtype=torch.float32)
    group = ByteCountingGroup(mesh.ep_group)
    expert_parallel.shard_experts(cut, group)
    lengths = [tokens // 4] * 4
    tokens_T = torch.randint(0, SPEC.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(rank))
    routing = Routing(record=True)
    step(whole, tokens_T, lengths, routing)
    step(cut, tokens_T, lengths)
    moved, group.bytes = group.bytes, 0
    walls: dict[str, list[float]] = {"whole": [], "cut": []}
    works: dict[str, list[float]] = {"whole": [], "cut": []}
    for _ in range(rounds):
        for name, decoder in (("whole", whole), ("cut", cut)):
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            step(decoder, tokens_T, lengths)
            walls[name].append(time.perf_counter() - start)
            works[name].append(time.process_time() - busy)
    row = SPEC.hidden_size * 4
    limit = torch.tensor([moved, 4 * row * least(routing.recorded, rank)])
    dist.all_reduce(limit)
    if rank == 0:
        print(f"{tokens} tokens a rank, {MOE.num_experts} experts, {MOE.experts_per_token} a token, {WORLD} ranks")
        for what, seconds in (("wall", walls), ("processor", works)):
            whole_s, cut_s = (statistics.median(seconds[name]) for name in ("whole", "cut"))
            ratios = sorted(b / a for a, b in zip(seconds["whole"], seconds["cut"], strict=True))
            print(f"{what:10} all experts on each rank {whole_s:.3f} s, half of them {cut_s:.3f} s a step; ", end="")
            print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"moved      {limit[0] / 2**20:.1f} MiB a step by all ranks, {limit[0] / limit[1]:.2f} of the least")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        multiprocessing.spawn(run, (store, args.tokens, args.rounds), nprocs=WORLD)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    main()
