"""Rules of an engine that spans several devices: the ranks can share the model, and the devices are there."""

from collections.abc import Iterator

from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.launch.machine import accelerator_count, choose_device
from miles.launch.server_rules import flags_of_sglang_are_for_sglang, is_remote
from miles.models.shard import misfit

_FLAG = "--rollout-num-gpus-per-engine"


def an_engine_is_cut_where_the_model_can_be(c: Config) -> Iterator[str]:
    world = c.cluster.rollout_num_gpus_per_engine
    spec = spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if spec is not None and (problem := misfit(spec, world)) is not None:
        yield f"{_FLAG} {world} cannot share this model: {problem}; choose a number that does."


def there_is_one_engine(c: Config) -> Iterator[str]:
    total, each = c.cluster.rollout_num_gpus, c.cluster.rollout_num_gpus_per_engine
    if total is not None and total != each and not is_remote(c):
        yield (
            f"--rollout-num-gpus {total} with {_FLAG} {each} is not one engine, and this process has room for one; "
            "leave --rollout-num-gpus out, or say --rollout-backend served."
        )


def an_engine_spans_devices_that_are_there(c: Config) -> Iterator[str]:
    world, there = c.cluster.rollout_num_gpus_per_engine, accelerator_count()
    if world > 1 and there is not None and 0 < there < world and choose_device(c.cluster.device).name != "cpu":
        yield f"{_FLAG} {world} asks for {world} devices, and this machine shows {there}; ask for no more than that."


ENGINE = (
    an_engine_is_cut_where_the_model_can_be,
    there_is_one_engine,
    flags_of_sglang_are_for_sglang,
)
