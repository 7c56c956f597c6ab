"""Rules of user hooks: each has a valid import path, and something in this run calls it."""

from collections.abc import Iterator

from miles.algo.config import OFFLINE_LOSSES
from miles.config.schema import get_options
from miles.hooks.import_path import is_path
from miles.hooks.registry import DATA_SOURCE, HOOK_POINTS, MODEL_PROVIDER, ROLLOUT
from miles.launch.config import Config
from miles.launch.plan.topology import is_distributed
from miles.launch.rules.flags import Rule

_SFT_ROLLOUT = "miles.rollout.sft_rollout.generate_rollout"


def check_hook_paths(c: Config) -> Iterator[str]:
    options = get_options(Config)
    for point in {point.flag: point for point in HOOK_POINTS}.values():
        path = getattr(getattr(c, options[point.option].section), point.option)
        names = (*point.builtins, *point.runtime_names)
        if path is not None and path not in names and not is_path(path):
            builtins = f"; built in are {', '.join(names)}" if names else ""
            yield f"{point.flag} {path} is not an import path: write package.module:name, or file.py:name{builtins}."


def check_data_source(c: Config) -> Iterator[str]:
    if c.hooks.data_source_path is None:
        return
    if c.schedule.num_epoch is not None:
        yield f"{DATA_SOURCE.flag} has no end, so --num-epoch has no effect; use --num-rollout."
    if c.rollout.curriculum_path is not None:
        yield f"{DATA_SOURCE.flag} and --curriculum-path both choose the next prompt; keep one."


def check_model_provider(c: Config) -> Iterator[str]:
    if c.hooks.custom_model_provider_path is None:
        return
    if is_distributed(c) or c.cluster.rollout_num_gpus_per_engine > 1:
        yield f"{MODEL_PROVIDER.flag} builds a model for one GPU; remove it, or train and sample on one GPU each."
    if c.models.model_impl == "transformers":
        yield f"{MODEL_PROVIDER.flag} needs the native model; remove it, or --model-impl transformers."


def check_rollout_function(c: Config) -> Iterator[str]:
    path, loss = c.hooks.rollout_function_path, c.algo.loss_type
    if path == _SFT_ROLLOUT and loss not in OFFLINE_LOSSES:
        yield f"{ROLLOUT.flag} {_SFT_ROLLOUT} trains on replies of the data; use --loss-type sft_loss instead."
    elif path not in (None, _SFT_ROLLOUT) and loss in OFFLINE_LOSSES:
        yield f"--loss-type {loss} trains on {OFFLINE_LOSSES[loss]}, so {ROLLOUT.flag} has no effect; remove it."


HOOK_RULES: tuple[Rule, ...] = (check_data_source, check_model_provider, check_rollout_function)
