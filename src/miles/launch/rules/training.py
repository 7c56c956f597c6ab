"""Rules of training: batch sizes, learning-rate schedule, recomputation, trainer ranks and parallel dims."""

import math
from collections.abc import Iterator
from importlib.util import find_spec

from miles.backends.megatron.supported_models import (
    check_batch_invariant_support,
    check_megatron_support,
)
from miles.config.value_types import format_value
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.plan.hardware import choose_device, count_accelerators
from miles.launch.plan.lora import find_megatron_adapted_parts, packs_base, shares_reference
from miles.launch.plan.plan import count_samples_per_prompt
from miles.launch.plan.topology import (
    build_parallel_dims,
    get_parallel_sizes,
    get_world_size,
    is_distributed,
    is_remote,
)
from miles.launch.rules.flags import Rule, list_set_flags
from miles.launch.rules.paths import read_spec_or_none
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import DecoderSpec

_GPUS = "--actor-num-gpus-per-node"

# -- batches and optimizer ------------------------------------------------------------------


def check_global_batch_size(c: Config) -> Iterator[str]:
    prompts, per_prompt = c.rollout.rollout_batch_size, count_samples_per_prompt(c)
    size, steps = c.train.global_batch_size, c.train.num_steps_per_rollout
    total = prompts * per_prompt
    left = f"--rollout-batch-size {prompts} × --n-samples-per-prompt {per_prompt} = {total}"
    if size is not None and steps is not None and total != size * steps:
        right = f"--global-batch-size {size} × --num-steps-per-rollout {steps} = {size * steps}"
        fix = "remove one of the last two" if total % size == 0 or total % steps == 0 else "make both sides equal"
        yield f"{left}, but {right}; {fix}."
    elif size is not None and steps is None and total % size:
        yield f"{left} is not divisible by --global-batch-size {size}; use {_suggest_divisors(total, size)}."
    elif steps is not None and size is None and total % steps:
        yield f"{left} is not divisible by --num-steps-per-rollout {steps}; use {_suggest_divisors(total, steps)}."


def _suggest_divisors(total: int, size: int) -> str:
    """The divisors of ``total`` next to ``size``."""
    smaller = max(d for d in range(1, size) if total % d == 0)
    larger = next((d for d in range(size + 1, total + 1) if total % d == 0), None)
    return f"{smaller} or {larger}" if larger else f"{smaller}"


def check_learning_rate_schedule(c: Config) -> Iterator[str]:
    t = c.train
    if t.lr_warmup_iters and t.lr_warmup_fraction is not None:
        yield "--lr-warmup-iters and --lr-warmup-fraction both set the warm-up; keep one."
    if t.min_lr > t.lr:
        yield f"--min-lr {format_value(t.min_lr)} is above --lr {format_value(t.lr)}; lower --min-lr."
    if t.lr_decay_iters is not None and t.lr_warmup_iters > t.lr_decay_iters:
        yield (f"--lr-warmup-iters {t.lr_warmup_iters} is longer than --lr-decay-iters {t.lr_decay_iters}; shorten it.")


def check_recompute(c: Config) -> Iterator[str]:
    t, flags = c.train, c.megatron.megatron_flags
    if t.gradient_checkpointing and t.recompute_granularity == "selective":
        yield "--gradient-checkpointing means --recompute-granularity full, but selective is given as well; keep one."
    if t.train_backend != "megatron":
        return
    if t.recompute_granularity == "selective" and t.recompute_method == "block":
        yield (
            "--recompute-method block selects layers for --recompute-granularity full; Megatron recomputes all layers "
            "under selective; remove --recompute-method."
        )
    own = [
        flag for flag in ("--recompute-granularity", "--recompute-method", "--recompute-num-layers") if flag in flags
    ]
    if own and (t.gradient_checkpointing or t.recompute_granularity is not None):
        names = " and ".join(f"--megatron-{flag[2:]}" for flag in own)
        yield f"{names} and Miles' own recomputation flags both choose what is recomputed; remove one of them."


# -- ranks and parallel dims ----------------------------------------------------------------


def check_trainer_nodes(c: Config) -> Iterator[str]:
    nodes = c.cluster.actor_num_nodes
    if nodes > 1 and c.ray.runtime == "local":
        yield (
            f"--actor-num-nodes {nodes} needs several machines, but --runtime local is one; use --runtime ray, or "
            f"give all GPUs of this machine with {_GPUS}."
        )


def check_parallel_sizes(c: Config) -> Iterator[str]:
    world, sizes = get_world_size(c), get_parallel_sizes(c)
    unit = math.prod(sizes.values())
    if world % unit:
        product = " × ".join(f"{flag} {size}" for flag, size in sizes.items())
        needs = f"{product} = {unit}" if len(sizes) > 1 else product
        yield (
            f"{needs} needs a multiple of {unit} ranks, but {_GPUS} {c.cluster.actor_num_gpus_per_node} gives {world}; "
            f"use {-(-world // unit) * unit} GPUs, or smaller sizes."
        )


def check_expert_parallel_size(c: Config) -> Iterator[str]:
    p = c.parallel
    world = get_world_size(c)
    unit = math.prod(get_parallel_sizes(c).values())
    if world % unit:
        return
    expert, shards = p.expert_model_parallel_size, world // unit * p.context_parallel_size
    expert_tensor = p.expert_tensor_parallel_size or p.tensor_model_parallel_size
    if c.train.train_backend == "megatron" and p.tensor_model_parallel_size % expert_tensor == 0:
        shards *= p.tensor_model_parallel_size // expert_tensor  # these tensor ranks may hold other experts
    if shards % expert:
        yield (
            f"--expert-model-parallel-size {expert} does not divide the {shards} ranks that shard parameters here; use "
            f"{_list_divisors(shards)}."
        )


def check_expert_tensor_parallel_size(c: Config) -> Iterator[str]:
    expert_tensor, tensor = c.parallel.expert_tensor_parallel_size, c.parallel.tensor_model_parallel_size
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if expert_tensor is None or expert_tensor == tensor:
        return
    has_experts = spec is None or spec.moe is not None
    if has_experts and c.train.train_backend == "fsdp":
        yield (
            f"--expert-tensor-parallel-size {expert_tensor} is not --tensor-model-parallel-size {tensor}, but "
            "--train-backend fsdp shards experts over the tensor ranks too; remove it."
        )
    elif tensor % expert_tensor:
        yield (
            f"--expert-tensor-parallel-size {expert_tensor} does not divide --tensor-model-parallel-size {tensor}; use "
            f"{_list_divisors(tensor)}."
        )


def check_cpu_offload(c: Config) -> Iterator[str]:
    shards = get_world_size(c) // max(1, c.parallel.tensor_model_parallel_size)
    if c.parallel.fsdp_cpu_offload and c.train.train_backend == "fsdp" and shards < 2:
        yield (
            f"--fsdp-cpu-offload needs parameters sharded over at least 2 ranks; use more GPUs with {_GPUS}, or "
            "offload only the optimizer with --optimizer-cpu-offload."
        )


def check_megatron(c: Config) -> Iterator[str]:
    if c.train.train_backend != "megatron":
        if c.megatron.megatron_flags:
            flag = f"--megatron-{c.megatron.megatron_flags[0][2:]}"
            yield f"{flag} needs --train-backend megatron; add that, or remove {flag}."
        return
    if "--use-distributed-optimizer" in c.megatron.megatron_flags:
        for flag in list_set_flags(c, "--optimizer", "--optimizer-state-dtype", "--optimizer-cpu-offload"):
            yield (
                f"{flag} does not work with --megatron-use-distributed-optimizer, which is Adam in float32 on the GPU; "
                "remove one of them."
            )


def check_ckpt_format(c: Config) -> Iterator[str]:
    if c.train.ckpt_format == "torch_dist" and c.train.train_backend != "megatron":
        yield "--ckpt-format torch_dist needs --train-backend megatron; add that, or use --ckpt-format hf."


def check_torch_dist_adapters(c: Config) -> Iterator[str]:
    if c.train.ckpt_format == "torch_dist" and packs_base(c):
        yield (
            "--ckpt-format torch_dist does not support adapters over a packed base (--train-precision); use "
            "--ckpt-format hf, or remove --train-precision."
        )


def check_megatron_package(c: Config) -> Iterator[str]:
    if c.train.train_backend == "megatron" and find_spec("megatron") is None:
        yield (
            "--train-backend megatron needs the package megatron-core, which is not installed; install it, or use fsdp."
        )


def check_model_fits_parallel_dims(c: Config) -> Iterator[str]:
    """Checks that depend on the model; the rules above check the rest."""
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if spec is None or not is_distributed(c):
        return
    if isinstance(spec, HfAdapterSpec):
        yield f"{_name_distributed_flag(c)} does not work with --model-impl transformers; remove one of them."
        return
    try:
        dims = build_parallel_dims(c)
    except UsageError:
        return
    is_megatron = c.train.train_backend == "megatron"
    if (problem := dims.find_model_problem(spec, slices_layer_inputs=is_megatron)) is not None:
        yield f"--hf-checkpoint does not fit the parallel sizes: {problem}"
        return
    adapted = find_megatron_adapted_parts(c, spec)
    if is_megatron and (problem := check_megatron_support(spec, dims, adapted)) is not None:
        yield f"--hf-checkpoint does not work with --train-backend megatron: {problem}"
    elif (
        is_megatron
        and c.models.parity == "exact"
        and (problem := check_batch_invariant_support(spec, dims)) is not None
    ):
        yield problem


def check_single_process_features(c: Config) -> Iterator[str]:
    if not is_distributed(c):
        return
    if c.train.critic_device != "auto":
        yield (
            f"--critic-device {c.train.critic_device} gives the critic one device, but with "
            f"{_name_distributed_flag(c)} it is sharded like the policy; remove it."
        )


def check_in_process(c: Config) -> Iterator[str]:
    """A policy that a program opens for a loop of its own is one policy in one process."""
    if is_distributed(c):
        flag = _name_distributed_flag(c)
        yield f"A policy is opened in one process on one device; remove {flag}, or use miles train."
    if is_remote(c):
        yield "A policy is opened with an engine in its own process; use --rollout-backend native, or miles train."
    if c.algo.loss_type == "rm_loss":
        yield "--loss-type rm_loss has a trainer of its own; use miles train."
    for name in list_set_flags(c, "--policies", "--num-critic-only-steps"):
        yield f"{name} is for the loop of miles train; remove it, or use miles train."
    t, length = c.train, c.schedule.num_rollout or c.train.lr_decay_iters
    for name in list_set_flags(c, "--lr-decay-style", "--lr-warmup-fraction") if length is None else ():
        value = t.lr_decay_style if name == "--lr-decay-style" else format_value(t.lr_warmup_fraction)
        yield f"{name} {value} needs the number of optimizer steps; give --lr-decay-iters or --num-rollout."


def check_trainer_gpus(c: Config) -> Iterator[str]:
    world, available = c.cluster.actor_num_gpus_per_node, count_accelerators()
    on_gpu = choose_device(c.cluster.device).name != "cpu"
    if world > 1 and available is not None and 0 < available < world and on_gpu:
        yield f"{_GPUS} {world} exceeds the {available} GPUs of this machine; lower it."


def _name_distributed_flag(c: Config) -> str:
    world = get_world_size(c)
    return f"{_GPUS} {world}" if world > 1 else f"--train-backend {c.train.train_backend}"


def _list_divisors(number: int) -> str:
    divisors = [str(d) for d in range(1, number + 1) if number % d == 0]
    return divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"


PARALLEL_RULES: tuple[Rule, ...] = (
    check_trainer_nodes,
    check_parallel_sizes,
    check_expert_parallel_size,
    check_expert_tensor_parallel_size,
    check_cpu_offload,
    check_megatron,
    check_ckpt_format,
    check_torch_dist_adapters,
    check_model_fits_parallel_dims,
    check_single_process_features,
)


def check_reference_updates(c: Config) -> Iterator[str]:
    every, s = c.train.ref_update_interval, c.schedule
    flag = "--ref-update-interval"
    if every is None:
        return
    if not c.algo.use_kl_loss and not c.algo.kl_coef and c.algo.loss_type != "dpo_loss":
        yield f"{flag} changes the reference of the KL; add --use-kl-loss or --kl-coef, or remove it."
    if c.lora.is_enabled and not shares_reference(c):
        yield f"{flag} with --lora-rank updates adapters over one base, but --ref-load is another; remove one of them."
    if s.save_interval is None or every % s.save_interval:
        yield (
            f"{flag} {every} needs a checkpoint of every step it takes the reference from, to continue a run; give a "
            "--save-interval that divides it."
        )
    elif s.keep_checkpoints is not None and s.keep_checkpoints <= every // s.save_interval:
        yield (
            f"{flag} {every} needs the checkpoints of its last {every} steps; raise --keep-checkpoints to "
            f"{every // s.save_interval + 1}."
        )


def check_vision_options(c: Config) -> Iterator[str]:
    t = c.train
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    given = {
        "--freeze-vision-tower": t.freeze_vision_tower,
        "--freeze-vision-projector": t.freeze_vision_projector,
        "--vision-lr": t.vision_lr is not None,
        "--max-patches-per-gpu": t.max_patches_per_gpu is not None,
    }
    flags = [flag for flag, used in given.items() if used]
    if spec is not None and spec.vision is None:
        for flag in flags:
            yield f"{flag} has no effect, because the model has no vision tower; remove it."
    elif isinstance(spec, HfAdapterSpec):
        for flag in flags[:-1] if t.max_patches_per_gpu is not None else flags:
            yield f"{flag} needs the native model, but {spec.architecture} is computed by transformers; remove it."
    elif c.lora.is_enabled:
        for flag in flags[:-1] if t.max_patches_per_gpu is not None else flags:
            yield f"{flag} has no effect with LoRA, which trains the adapters of --target-modules only; remove it."
    elif t.freeze_vision_tower and t.freeze_vision_projector and t.vision_lr is not None:
        yield "--vision-lr has no effect with --freeze-vision-tower and --freeze-vision-projector; remove it."
    if c.parallel.context_parallel_size > 1 and c.rollout.multimodal_keys and _attends_in_both_directions(spec):
        yield (
            f"--context-parallel-size {c.parallel.context_parallel_size} cannot be used with --multimodal-keys and a "
            "model in which the tokens of an image attend to each other in both directions; set it to 1."
        )
    if t.max_patches_per_gpu is not None and t.micro_batch_size is not None and not t.use_dynamic_batch_size:
        yield "--max-patches-per-gpu has no effect with --micro-batch-size; remove one of them."


def _attends_in_both_directions(spec: DecoderSpec | None) -> bool:
    return spec is not None and spec.vision is not None and spec.vision.bidirectional_spans


TRAINING_MACHINE_RULES: tuple[Rule, ...] = (check_trainer_gpus, check_megatron_package)
TRAINING_RULES: tuple[Rule, ...] = (
    check_reference_updates,
    check_global_batch_size,
    check_learning_rate_schedule,
    check_recompute,
    check_vision_options,
    *PARALLEL_RULES,
)
