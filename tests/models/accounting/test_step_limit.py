"""The limit of a step is what torch counts and what a step-by-step simulation reads, divided by the peaks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles.kernels.numerics import FAST
from miles.models.accounting.params import forward_flops_per_token, kv_bytes_per_token, weight_bytes
from miles.models.accounting.step_limit import (
    EngineSide,
    PartWork,
    StepModel,
    StepWorkload,
    TrainSide,
    Work,
    limit_part,
)
from miles.models.families import spec_from_config

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
)
SPEC = spec_from_config(CONFIG.to_dict())
KV = kv_bytes_per_token(SPEC, "bfloat16", FAST)


def engine(**changes) -> EngineSide:
    return EngineSide(**{"spec": SPEC, "dtype": "bfloat16", "numerics": FAST, **changes})


def total(pieces) -> Work:
    pieces = tuple(pieces)
    return Work(sum(p.flops for p in pieces), sum(p.bytes for p in pieces))


def train_parts(workload: StepWorkload, **changes) -> dict[str, Work]:
    side = TrainSide(spec=SPEC, dtype="bfloat16", **changes)
    return {part.name: total(part.pieces) for part in side.list_parts(workload)}


@pytest.mark.parametrize("recomputed", [False, True])
def test_training_is_the_flops_that_torch_counts_with_those_computed_again(recomputed: bool):
    model, length, samples = Qwen3ForCausalLM(CONFIG).train(), 16, 4
    if recomputed:
        model.gradient_checkpointing_enable()
    # Whole layers are counted; torch may leave out the last matmul of each, which no gradient needs.
    with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 256, (samples, length)), use_cache=False).logits.sum().backward()
    workload = StepWorkload(sequences=(length,) * samples)
    found = train_parts(workload, devices=2, recompute=float(recomputed))["train/forward_backward"]
    # torch counts the attention of masked tokens too, 2% here
    assert found.flops * 2 == pytest.approx(counter.get_total_flops(), rel=0.04)


@given(
    groups=st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(0, 20), min_size=1, max_size=4)), min_size=1, max_size=5
    ),
    engines=st.integers(1, 3),
)
def test_decoding_reads_what_a_step_by_step_simulation_reads(groups, engines: int):
    """Each step reads the weights, a running response's own tokens, and the prompt of each group that has one."""
    workload = StepWorkload(
        prompts=tuple(prompt for prompt, _ in groups), responses=tuple(tuple(lengths) for _, lengths in groups)
    )
    weights, read, flops = weight_bytes(SPEC, "bfloat16"), 0.0, 0.0
    for t in range(max(max(lengths) for _, lengths in groups)):
        running = [(prompt, sum(length > t for length in lengths)) for prompt, lengths in groups]
        rows = sum(count for _, count in running)
        shared = sum(prompt for prompt, count in running if count)
        read += weights + (rows * t + shared) * KV / engines
        flops += rows * forward_flops_per_token(SPEC, t + shared / rows) / engines
    found = total(engine(engines=engines).decode(workload))
    assert found.bytes == pytest.approx(read) and found.flops == pytest.approx(flops)


def test_more_responses_than_may_run_take_as_many_more_steps():
    workload = StepWorkload.repeat(prompts=8, samples=1, prompt=0, response=10)
    weights = weight_bytes(SPEC, "bfloat16")
    all_at_once = total(engine().decode(workload))
    assert all_at_once.bytes == pytest.approx(10 * weights + 8 * sum(range(10)) * KV)
    in_turns = total(engine(max_running=2).decode(workload))
    assert in_turns.bytes - all_at_once.bytes == pytest.approx(30 * weights, rel=0.01)  # 80 tokens, 2 a step
    assert in_turns.flops == pytest.approx(all_at_once.flops, rel=0.01)
    sharded = total(engine(max_running=2, devices_each=2).decode(workload))
    assert sharded.bytes == pytest.approx(in_turns.bytes / 2)


def test_accepted_drafts_save_reads_of_the_weights_and_no_flops():
    workload = StepWorkload.repeat(prompts=4, samples=2, prompt=6, response=12)
    one, three = (total(engine().decode(workload, accepted)) for accepted in (1.0, 3.0))
    assert three.bytes == pytest.approx(one.bytes / 3) and three.flops == pytest.approx(one.flops)


def test_a_prompt_is_computed_once_for_its_group_with_the_logits_of_its_last_token():
    workload = StepWorkload.repeat(prompts=3, samples=8, prompt=10, response=5)
    with FlopCounterMode(display=False) as counter:
        Qwen3ForCausalLM(CONFIG)(torch.randint(0, 256, (3, 10)), logits_to_keep=1)
    assert engine().prefill(workload).flops == pytest.approx(counter.get_total_flops(), rel=0.03)
    inserted = StepWorkload(prompts=(10,) * 3, responses=((5,),) * 3, inserted=30)
    assert engine().prefill(inserted).flops > 1.9 * engine().prefill(workload).flops


def test_few_rows_of_a_mixture_read_few_experts():
    moe = CONFIG.to_dict() | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    side = engine(spec=spec_from_config(moe))
    experts = 3 * 16 * 3 * 128 * 64 * 2
    dense = weight_bytes(side.spec, "bfloat16") - experts
    assert side.weight_bytes_per_step(1) == pytest.approx(dense + experts * 2 / 16)
    assert side.weight_bytes_per_step(1000) == pytest.approx(dense + experts)


def test_a_step_has_the_parts_of_its_options():
    workload = StepWorkload.repeat(prompts=2, samples=2, prompt=4, response=4)
    plain = train_parts(workload, optimizer_bytes=7.0, updates=3)
    assert set(plain) == {"train/forward_backward", "train/optimizer"} and plain["train/optimizer"].bytes == 21.0
    full = train_parts(workload, old_logprobs=True, critic=SPEC, frozen=(SPEC, SPEC), backward=1.0)
    forward = full["train/old_logprobs"].flops
    assert full["train/values"].flops == forward and full["train/reference"].flops == 2 * forward
    assert full["train/forward_backward"].flops == full["train/critic"].flops == 2 * forward
    assert plain["train/forward_backward"].flops == 3 * forward


def test_a_part_is_as_long_as_what_bounds_each_of_its_pieces():
    def limit(*pieces: Work, link: float | None = 1.0):
        return limit_part(PartWork(name="a", inside="b", pieces=pieces), flops=10.0, bandwidth=2.0, link=link)

    found = limit(Work(100.0, 2.0), Work(10.0, 8.0), Work(link_bytes=3.0))
    assert found.seconds == 10.0 + 4.0 + 3.0 and found.main_bound == "compute"
    assert found.by_bound == {"compute": 10.0, "memory": 4.0, "link": 3.0}
    assert limit(Work()).seconds == 0.0 and limit(Work()).main_bound is None
    unknown = limit(Work(link_bytes=3.0), link=None)
    assert unknown.seconds is None and "link is not known" in unknown.why


def test_planes_that_overlap_on_their_own_devices_take_as_long_as_the_slower_one():
    workload = StepWorkload.repeat(prompts=2, samples=2, prompt=4, response=64)
    seconds = {}
    for overlaps, shares in ((False, True), (True, True), (True, False)):
        model = StepModel(
            rollout=engine(),
            train=TrainSide(spec=SPEC, dtype="bfloat16"),
            publish=Work(bytes=5.0),
            overlaps=overlaps,
            shares_devices=shares,
        )
        parts = [limit_part(part, flops=1e9, bandwidth=1e6, link=None) for part in model.list_parts(workload)]
        rollout = sum(part.seconds for part in parts if part.name.startswith("rollout/"))
        seconds[overlaps, shares] = model.sum_limits(parts)
    assert seconds[False, True] == seconds[True, True] == sum(part.seconds for part in parts)
    assert seconds[True, False] == max(rollout, seconds[False, True] - rollout)
