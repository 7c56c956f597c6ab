"""Rules about how weights are updated, and what a backward pass computes again."""

from collections.abc import Callable, Iterator

from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.models.foreign.spec import ForeignSpec
from miles.models.sharing import misfit


def muon_knows_the_matrices_of_a_model(c: Config) -> Iterator[str]:
    if c.train.optimizer == "muon" and c.models.model_impl == "transformers":
        yield (
            "--optimizer muon updates matrices, and which those are is known of our own decoders alone; "
            "use --model-impl native, or --optimizer adam."
        )


def a_prompt_is_read_once_where_the_model_can(c: Config) -> Iterator[str]:
    if not c.train.share_prefix or not c.models.hf_checkpoint:
        return
    if c.train.train_backend == "megatron":
        yield "--share-prefix is for --train-backend fsdp; leave it out."
    spec = spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if isinstance(spec, ForeignSpec):
        yield "--share-prefix needs a model of our own; leave --model-impl transformers out."
    elif spec is not None and (problem := misfit(spec)) is not None:
        yield f"--share-prefix cannot be had of {c.models.hf_checkpoint}: {problem}; leave it out."


def a_layer_is_recomputed_in_one_way(c: Config) -> Iterator[str]:
    if c.train.gradient_checkpointing and c.train.recompute_granularity == "selective":
        yield "--gradient-checkpointing is --recompute-granularity full, and selective is given as well; keep one."


def layers_are_counted_where_some_are_recomputed(c: Config) -> Iterator[str]:
    t = c.train
    block = t.recompute_method == "block"
    if block and t.recompute_granularity is None and not t.gradient_checkpointing:
        yield "--recompute-method block says which layers are recomputed, and none are; add --recompute-granularity."
    if not block and t.recompute_num_layers != 1:
        yield (
            f"--recompute-num-layers {t.recompute_num_layers} is for --recompute-method block; "
            "under uniform every layer is recomputed by itself, which is 1."
        )


UPDATES: tuple[Callable[[Config], Iterator[str]], ...] = (
    muon_knows_the_matrices_of_a_model,
    a_prompt_is_read_once_where_the_model_can,
    a_layer_is_recomputed_in_one_way,
    layers_are_counted_where_some_are_recomputed,
)
