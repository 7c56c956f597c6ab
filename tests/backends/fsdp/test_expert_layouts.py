"""Whole models with experts over every layout of ranks: loss and every gradient are those of one process."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.pool import ranks
from torch import Tensor

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.decoder import Decoder
from miles.models.residual_spec import HyperConnectionSpec
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec, RopeSpec
from miles.train.batch_tensors import MicroBatch
from miles.train.logprobs import HeadOutput, compute_logprobs
from miles.train.model_protocols import TrainModel

CPU = torch.device("cpu")
VOCAB, WIDTH = 37, 16
LENGTHS = ((7, 12), (5, 9), (3, 8), (11, 4))  # of the sequences each of four ranks reads where all read others
ROPE = RopeSpec(theta=10000.0)
GROUPED = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, rope=ROPE, qk_norm="head")
LATENT = MlaSpec(
    num_heads=4,
    query_rank=6,
    kv_rank=8,
    nope_dim=4,
    rope_dim=4,
    value_dim=4,
    rope=RopeSpec(theta=10000.0, dim=4, interleaved=True),
    scale=0.35,
)
SUNK = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rope=ROPE,
    qk_norm="none",
    qkv_bias=True,
    output_bias=True,
    window=6,
    sinks=True,
)

QWEN = LayerSpec(mixer=GROUPED, ffn=MoeSpec(num_experts=8, experts_per_token=3, size=6, norm_topk_prob=True))
DEEPSEEK = LayerSpec(
    mixer=LATENT,
    ffn=MoeSpec(
        num_experts=8,
        experts_per_token=3,
        size=6,
        norm_topk_prob=True,
        score="sigmoid",
        correction=True,
        groups=4,
        kept_groups=2,
        group_top=2,
        scale=1.7,
        shared=MlpSpec(size=10),
    ),
)
OSS = LayerSpec(
    mixer=SUNK,
    ffn=MoeSpec(
        num_experts=8,
        experts_per_token=2,
        size=6,
        norm_topk_prob=True,
        router_bias=True,
        expert_bias=True,
        interleaved=True,
        activation="swiglu_clamped",
    ),
)
# Six experts of three ranks' worth; what they give is normalised, so that they run again before their backward is due.
ODD = LayerSpec(
    mixer=GROUPED,
    ffn=MoeSpec(num_experts=6, experts_per_token=2, size=6, norm_topk_prob=False, gated=False, activation="relu2"),
    post_norms=True,
)
DENSE = LayerSpec(mixer=LATENT, ffn=MlpSpec(size=12))
# Backward needs what joins the streams first, so that these experts run again before their backward is due, too.
HYPER = replace(QWEN, hyper=HyperConnectionSpec(streams=2, iterations=3, eps=1e-6))
MODELS = {
    "qwen3 moe": (QWEN, QWEN),
    "deepseek v3": (DENSE, DEEPSEEK),
    "gpt-oss": (OSS, OSS),
    "odd": (ODD, DENSE, ODD),
    "hyper": (HYPER, HYPER),
}


def spec_of(model: str) -> DecoderSpec:
    return DecoderSpec(
        family="test",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        norm_eps=1e-6,
        layers=MODELS[model],
        tie_embeddings=model == "gpt-oss",
        max_positions=64,
        eos_token_ids=(),
    )


def filled(spec: DecoderSpec) -> Decoder:
    decoder = Decoder(spec, device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)
    return decoder


def rows_of(spec: DecoderSpec, part: int, parts: int, replay: bool) -> MicroBatch:
    """A part of the batch: the sequences of several of the four ranks where there are fewer parts."""
    lengths = tuple(n for each in LENGTHS[part * 4 // parts : (part + 1) * 4 // parts] for n in each)
    first = sum(n for each in LENGTHS[: part * 4 // parts] for n in each)
    count, everything = sum(lengths), sum(n for each in LENGTHS for n in each)
    generator = torch.Generator().manual_seed(1)
    own = slice(first, first + count)
    tokens_T = torch.randint(0, VOCAB, (everything,), generator=generator)[own]
    target_T = torch.randint(0, VOCAB, (everything,), generator=generator)[own]
    weight_T = torch.randn(everything, generator=generator)[own]
    replay_TLk = None
    if replay:
        assert spec.moe is not None
        marks_TLE = torch.rand(everything, len(spec.moe_layers), spec.moe.num_experts, generator=generator)
        replay_TLk = marks_TLE.argsort(-1)[..., : spec.moe.experts_per_token]
        replay_TLk[::3] = -1
        replay_TLk = replay_TLk[own]
    sample_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    zero_T = torch.zeros(count)
    return MicroBatch(
        lengths=lengths,
        tokens_T=tokens_T,
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        before_R=torch.arange(count),
        target_R=target_T,
        engine_logp_R=zero_T,
        advantage_R=zero_T,
        oldest_R=zero_T.int(),
        weight_R=weight_T,
        mean_R=zero_T,
        sample_R=sample_T,
        trained_B=torch.tensor(lengths),
        replay_TLk=replay_TLk,
    )


def losses(model: TrainModel, plan: list[MicroBatch]) -> Tensor:
    """The sum of all losses, differentiated."""

    def judge(number: int, output: HeadOutput) -> tuple[Tensor, dict[str, Tensor]]:
        logp_R, entropy_R = compute_logprobs(output, plan[number].target_R)
        loss = (plan[number].weight_R * (logp_R + 0.1 * entropy_R)).sum()
        return loss, {"loss": loss.detach()}

    return torch.stack([kept["loss"] for kept in model.forward_backward(plan, judge)]).sum()


@dataclass(frozen=True, slots=True)
class Outcome:
    loss: float
    norm: float
    grads: dict[str, Any]


def alone(model: str, replay: bool) -> Outcome:
    spec = spec_of(model)
    whole = LocalModel(filled(spec))
    loss = losses(whole, [rows_of(spec, 0, 1, replay)])
    grads = {name: p.grad for name, p in whole.parameters().items() if p.grad is not None}
    return Outcome(loss.item(), whole.norm(grads).item(), grads)


def together(rank: int, world: int, model: str, cases: list[tuple[ParallelDims, dict[str, Any]]]) -> list[Outcome]:
    out: list[Outcome] = []
    spec = spec_of(model)
    whole = dict(filled(spec).named_parameters())
    for layout, how in cases:
        mesh = FsdpMesh(layout, CPU)
        dtype = how.get("dtype", torch.float32)
        shared = FsdpModel(spec, mesh, dtype=dtype, recompute=how.get("recompute", "none"))
        with torch.no_grad():
            for name, parameter in shared.parameters().items():
                parameter.copy_(shared.shard(name, whole[name].detach()))
        shared.after_update()
        dp_group = mesh.dp_group
        # Two micro-batches where there are few parts, so that gradients add up over them too.
        split = 2 if dp_group.dp_size < 4 else 1
        plan = [
            rows_of(spec, split * dp_group.dp_rank + i, split * dp_group.dp_size, "replay" in how) for i in range(split)
        ]
        loss = dp_group.sum(losses(shared, plan))
        shared.finalize_grads()
        grads = {name: p.grad for name, p in shared.parameters().items() if p.grad is not None}
        norm = shared.norm(grads).item()
        out.append(Outcome(loss.item(), norm, {name: shared.gather(name, g).numpy() for name, g in grads.items()}))
    return out


def close(ours: Outcome, wanted: Outcome, case: object, bound: float = 1e-5) -> None:
    assert abs(ours.loss - wanted.loss) <= bound * abs(wanted.loss), case
    assert abs(ours.norm - wanted.norm) <= bound * wanted.norm, case
    assert ours.grads.keys() == wanted.grads.keys(), case
    for name, grad in wanted.grads.items():
        apart = (torch.from_numpy(ours.grads[name]) - grad).norm() / grad.norm()
        assert apart <= bound, f"{name} is {apart} off under {case}"


FOUR: list[tuple[ParallelDims, dict[str, Any]]] = [
    (ParallelDims(world=4, shard=4, expert=4), {}),
    (ParallelDims(world=4, shard=4, expert=2), {}),
    (ParallelDims(world=4, shard=4, expert=2), {"recompute": "full", "replay": True}),
    (ParallelDims(world=4, shard=4, expert=2), {"recompute": "selective"}),
    (ParallelDims(world=4, replicate=2, shard=2, expert=2), {}),
    (ParallelDims(world=4, shard=2, tensor=2, expert=2), {}),
    (ParallelDims(world=4, shard=2, tensor=2, expert=2, sequence=True), {"recompute": "full", "replay": True}),
    (ParallelDims(world=4, shard=2, context=2, expert=2), {"replay": True}),
    (ParallelDims(world=4, shard=2, context=2, expert=4), {}),
    (ParallelDims(world=4, context=2, tensor=2, expert=2), {}),
]


@pytest.mark.parametrize("model", MODELS)
def test_any_layout_of_experts_has_the_loss_and_gradients_of_one_process(model):
    reported = {replay: alone(model, replay) for replay in (False, True)}
    cases = [case for case in FOUR if case[0].find_model_problem(spec_of(model)) is None]
    assert cases
    for result in ranks(4, together, model, cases)[:1]:
        for ours, (layout, how) in zip(result, cases, strict=True):
            close(ours, reported[how.get("replay", False)], (layout, how))


def test_experts_computed_in_low_precision_are_held_and_added_up_in_float32():
    case = (ParallelDims(world=4, shard=4, expert=2), {"replay": True, "dtype": torch.bfloat16})
    wanted = alone("qwen3 moe", True)
    (ours,) = ranks(4, together, "qwen3 moe", [case])[0]
    assert all(grad.dtype == "float32" for grad in ours.grads.values())
    close(ours, wanted, case, 0.1)
