"""Rules about adapters: where they can be trained, and which."""

from collections.abc import Callable, Iterator
from pathlib import Path

from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.launch.lora import lora_of
from miles.models.foreign.spec import ForeignSpec


def adapters_have_knobs_only_where_they_are_trained(c: Config) -> Iterator[str]:
    if c.lora.asked:
        return
    given = {
        "--lora-alpha": c.lora.lora_alpha is not None,
        "--target-modules": c.lora.target_modules is not None,
        "--exclude-modules": c.lora.exclude_modules is not None,
    }
    for flag in (flag for flag, there in given.items() if there):
        yield f"{flag} is about adapters, and none are trained; add --lora-rank, or leave it out."


def adapters_are_part_of_the_weights(c: Config) -> Iterator[str]:
    if c.lora.lora_dropout:
        yield (
            f"--lora-dropout {c.lora.lora_dropout:g} cannot be had: adapters are added to the weights that engine and "
            "trainer compute with, and have no inputs of their own to leave out; use 0."
        )


def adapters_are_trained_by_the_embedded_trainer(c: Config) -> Iterator[str]:
    if not c.lora.asked:
        return
    p = c.parallel
    refused = {
        "--train-backend megatron": c.train.train_backend == "megatron",
        "--optimizer muon": c.train.optimizer == "muon",
        "--loss-type rm_loss": c.algo.loss_type == "rm_loss",
        "--model-impl transformers": c.models.model_impl == "transformers",
        "--tensor-model-parallel-size": p.tensor_model_parallel_size > 1,
        "--expert-model-parallel-size": p.expert_model_parallel_size > 1,
        "--fsdp-cpu-offload": p.fsdp_cpu_offload,
    }
    for flag in (flag for flag, there in refused.items() if there):
        yield f"--lora-rank trains adapters of layers that a rank of fsdp has whole, not with {flag}; leave one out."


def adapters_fit_the_model(c: Config) -> Iterator[str]:
    name = c.models.hf_checkpoint
    spec = None if name is None else spec_or_none(name, c.models.model_impl)
    if not c.lora.asked or spec is None or isinstance(spec, ForeignSpec):
        return
    path = c.lora.lora_adapter_path
    if path is not None and not Path(path).is_dir():
        yield f"--lora-adapter-path {path} is no folder; name one with adapter_config.json in it."
        return
    try:
        lora_of(c.lora, spec)
    except UsageError as error:
        yield from error.problems


def adapters_are_for_training(c: Config) -> Iterator[str]:
    if c.lora.asked:
        yield (
            "--lora-rank and --lora-adapter-path are for training; a checkpoint of such a run has its adapter in its "
            "weights: give that as --hf-checkpoint."
        )


def adapters_are_sampled_with_once_they_are_trained(c: Config) -> Iterator[str]:
    if c.lora.asked and c.observe.debug_rollout_only:
        yield "--debug-rollout-only trains nothing, so that no adapter is made or read; leave --lora-... out."


LORA: tuple[Callable[[Config], Iterator[str]], ...] = (
    adapters_have_knobs_only_where_they_are_trained,
    adapters_are_part_of_the_weights,
    adapters_are_trained_by_the_embedded_trainer,
    adapters_fit_the_model,
    adapters_are_sampled_with_once_they_are_trained,
)
