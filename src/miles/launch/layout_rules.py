"""Rules of a trainer that spans several devices: the layout fits the ranks, the model fits the layout."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from miles.algo.config import GIVEN, WITH_CRITIC
from miles.cluster.layout import Layout
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.launch.machine import accelerator_count, choose_device
from miles.models.foreign.spec import ForeignSpec

_DEVICES = "--actor-num-gpus-per-node"


def world_of(c: Config) -> int:
    """How many ranks train."""
    return c.cluster.actor_num_nodes * c.cluster.actor_num_gpus_per_node


def with_ranks(c: Config, ranks: int) -> Config:
    """The same run with so many ranks that train, on this machine."""
    return replace(c, cluster=replace(c.cluster, actor_num_gpus_per_node=ranks))


def is_team(c: Config) -> bool:
    """Do ranks hold the models together? One alone that stays alone does under fsdp, whole and in this process."""
    if c.observe.debug_rollout_only:
        return False
    return world_of(c) > 1 or c.train.train_backend != "fsdp" or c.bounds.elastic


def layout_of(c: Config) -> Layout:
    """How they share model and batch; refuses (UsageError) sizes that do not go together."""
    p, world = c.parallel, world_of(c)
    taken = _taken(c)
    return Layout(
        world=world,
        replicate=p.data_parallel_replicate_size,
        shard=max(1, world // taken),
        context=p.context_parallel_size,
        tensor=p.tensor_model_parallel_size,
        expert=p.expert_model_parallel_size,
        pipeline=p.pipeline_model_parallel_size,
        expert_tensor=p.expert_tensor_parallel_size,
        sequence=p.sequence_parallel,
    )


def _sizes(c: Config) -> dict[str, int]:
    p = c.parallel
    sizes = {
        "--tensor-model-parallel-size": p.tensor_model_parallel_size,
        "--context-parallel-size": p.context_parallel_size,
        "--pipeline-model-parallel-size": p.pipeline_model_parallel_size,
        "--data-parallel-replicate-size": p.data_parallel_replicate_size,
    }
    return {flag: size for flag, size in sizes.items() if size > 1}


def _taken(c: Config) -> int:
    """The ranks that are taken up by what was asked for; the others come in multiples of these."""
    made = 1
    for size in _sizes(c).values():
        made *= size
    return made


def _asked(c: Config) -> str:
    """The flags that take up ranks, and what they come to."""
    sizes = _sizes(c)
    product = " × ".join(f"{flag} {size}" for flag, size in sizes.items())
    return f"{product} = {_taken(c)}" if len(sizes) > 1 else product


def _asking(c: Config) -> str:
    """What asks for a team."""
    return f"{_DEVICES} {world_of(c)}" if world_of(c) > 1 else f"--train-backend {c.train.train_backend}"


def a_trainer_is_on_one_machine(c: Config) -> Iterator[str]:
    nodes = c.cluster.actor_num_nodes
    if nodes > 1 and c.ray.runtime == "local":
        yield (
            f"--actor-num-nodes {nodes} asks for several machines, and --runtime local is one; say --runtime ray, or "
            f"give {_DEVICES} all devices of this machine, and make room with --gradient-checkpointing or a lower "
            "--max-tokens-per-gpu."
        )


def parallel_sizes_fill_the_ranks(c: Config) -> Iterator[str]:
    world, taken = world_of(c), _taken(c)
    if world % taken:
        yield (
            f"{_asked(c)} needs a multiple of {taken} ranks, and {_DEVICES} {c.cluster.actor_num_gpus_per_node} gives "
            f"{world}; ask for {-(-world // taken) * taken} devices, or for less."
        )


def experts_are_dealt_out_among_ranks_that_cut_parameters(c: Config) -> Iterator[str]:
    p, world, taken = c.parallel, world_of(c), _taken(c)
    if world % taken:
        return
    expert, pieces = p.expert_model_parallel_size, world // taken * p.context_parallel_size
    own = p.expert_tensor_parallel_size or p.tensor_model_parallel_size
    if c.train.train_backend == "megatron" and p.tensor_model_parallel_size % own == 0:
        pieces *= p.tensor_model_parallel_size // own  # tensor ranks that do not cut an expert may have other experts
    if pieces % expert:
        yield (
            f"--expert-model-parallel-size {expert} does not divide the {pieces} ranks over which parameters are cut "
            f"here; choose {_divisors(pieces)}."
        )


def an_expert_is_cut_as_the_backend_can(c: Config) -> Iterator[str]:
    own, tensor = c.parallel.expert_tensor_parallel_size, c.parallel.tensor_model_parallel_size
    if own is None or own == tensor:
        return
    if c.train.train_backend == "fsdp":
        yield (
            f"--expert-tensor-parallel-size {own} is not --tensor-model-parallel-size {tensor}, and --train-backend "
            "fsdp cuts experts over the tensor ranks as it does all else; leave it out."
        )
    elif tensor % own:
        yield (
            f"--expert-tensor-parallel-size {own} does not divide --tensor-model-parallel-size {tensor}; "
            f"choose {_divisors(tensor)}."
        )


def a_pipeline_is_megatrons(c: Config) -> Iterator[str]:
    stages = c.parallel.pipeline_model_parallel_size
    if stages > 1 and c.train.train_backend == "fsdp":
        yield (
            f"--pipeline-model-parallel-size {stages} is not for --train-backend fsdp, which has every layer on every "
            "rank; leave it out, and parameters are cut over these ranks instead."
        )


def parameters_on_the_host_are_cut_over_ranks(c: Config) -> Iterator[str]:
    if not c.parallel.fsdp_cpu_offload:
        return
    if c.train.train_backend != "fsdp":
        yield "--fsdp-cpu-offload is for --train-backend fsdp; leave it out."
    elif world_of(c) // max(1, c.parallel.tensor_model_parallel_size) < 2:
        yield (
            "--fsdp-cpu-offload brings layers to the device as ranks gather them, and here no two ranks share one; ask "
            f"for more with {_DEVICES}, or keep the optimizer alone on the host with --optimizer-cpu-offload."
        )


def megatron_is_there_and_trains_a_policy(c: Config) -> Iterator[str]:
    if c.train.train_backend != "megatron":
        if c.megatron.megatron_flags:
            yield f"--megatron-{c.megatron.megatron_flags[0][2:]} is for --train-backend megatron; leave it out."
        return
    if find_spec("megatron") is None:
        yield "--train-backend megatron needs the package megatron-core, which is not there; install it, or use fsdp."
    if c.algo.advantage_estimator in WITH_CRITIC and c.algo.loss_type not in GIVEN:
        yield (
            f"--advantage-estimator {c.algo.advantage_estimator} has a critic, and --train-backend megatron holds "
            "none; use fsdp."
        )
    if c.train.opd_teacher_load or c.train.opd_teachers:
        yield (
            "--opd-teacher-load and --opd-teachers are read beside the policy, which --train-backend megatron cannot; "
            "serve the teacher elsewhere, or use fsdp."
        )
    if c.parallel.data_parallel_replicate_size > 1:
        yield (
            "--data-parallel-replicate-size is for --train-backend fsdp: megatron has a copy of its parameters in "
            "every part of the batch; leave it out."
        )


def tokens_are_cut_over_several_tensor_ranks(c: Config) -> Iterator[str]:
    if c.parallel.sequence_parallel and c.parallel.tensor_model_parallel_size == 1:
        yield (
            "--sequence-parallel cuts tokens over the tensor ranks, and there is one; leave it out, or give "
            "--tensor-model-parallel-size."
        )


def a_model_can_be_laid_out(c: Config) -> Iterator[str]:
    """What does not depend on the model is said by the rules above."""
    spec = spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if spec is None or not is_team(c):
        return
    if isinstance(spec, ForeignSpec):
        yield (
            f"{_asking(c)} cannot train a module of transformers' own, which one process holds, by fsdp; leave it out."
        )
        return
    if c.parallel.sequence_parallel and c.parallel.tensor_model_parallel_size == 1:
        return
    try:
        problem = layout_of(c).misfit(spec)
    except UsageError:
        return
    if problem is not None:
        yield f"--hf-checkpoint cannot be trained so: {problem}"


def several_ranks_train_a_policy(c: Config) -> Iterator[str]:
    if not is_team(c):
        return
    if c.algo.loss_type == "rm_loss":
        yield f"--loss-type rm_loss trains on one device, by fsdp; leave {_asking(c)} out."
    if c.train.critic_device != "auto":
        yield (
            f"--critic-device {c.train.critic_device} gives the critic one device, and with {_asking(c)} it is cut "
            "over the ranks as the policy is; leave it out."
        )


def a_trainer_spans_devices_that_are_there(c: Config) -> Iterator[str]:
    world, there = c.cluster.actor_num_gpus_per_node, accelerator_count()
    if world > 1 and there is not None and 0 < there < world and choose_device(c.cluster.device).name != "cpu":
        yield f"{_DEVICES} {world} asks for {world} devices, and this machine shows {there}; ask for no more than that."


def _divisors(number: int) -> str:
    found = [str(d) for d in range(1, number + 1) if number % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


LAYOUT = (
    a_trainer_is_on_one_machine,
    parallel_sizes_fill_the_ranks,
    experts_are_dealt_out_among_ranks_that_cut_parameters,
    an_expert_is_cut_as_the_backend_can,
    a_pipeline_is_megatrons,
    parameters_on_the_host_are_cut_over_ranks,
    megatron_is_there_and_trains_a_policy,
    tokens_are_cut_over_several_tensor_ranks,
    a_model_can_be_laid_out,
    several_ranks_train_a_policy,
)
