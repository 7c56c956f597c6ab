"""Rules of runs whose devices move between the planes, and the splits such a run may come to. No torch."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

from miles.algo.config import GIVEN
from miles.launch.config import Config
from miles.launch.layout_rules import LAYOUT, world_of
from miles.launch.server_rules import engine_count, is_remote
from miles.schedule.elastic import Bounds, Split


def split_of(c: Config) -> Split:
    """How many ranks train and engines sample as the flags have it."""
    return Split(world_of(c), engine_count(c))


def bounds_of(c: Config) -> Bounds:
    e = c.bounds
    unit = c.cluster.rollout_num_gpus_per_engine
    return Bounds(min_ranks=e.elastic_min_ranks, min_engines=e.elastic_min_engines, unit=unit)


def with_split(c: Config, split: Split) -> Config:
    """The same run with so many of each."""
    devices = split.engines * c.cluster.rollout_num_gpus_per_engine
    cluster = replace(c.cluster, actor_num_gpus_per_node=split.ranks, rollout_num_gpus=devices)
    return replace(c, cluster=cluster, sglang=replace(c.sglang, rollout_num_engines=None))


def splits_of(c: Config) -> list[Split]:
    """Those that devices may come to, from most ranks to most engines; none where the start is beyond bounds."""
    start, bounds = split_of(c), bounds_of(c)
    if not bounds.hold(start):
        return []
    fewer, more = start.engines - bounds.min_engines, (start.ranks - bounds.min_ranks) // bounds.unit
    return [bounds.toward_rollout(start, count) for count in range(-fewer, more + 1)]


def last_split(config: Config, run: Path) -> Config:
    """The config of a run that is continued, with the split its devices came to, where that is within bounds now."""
    log = run / "logs" / "sessions.jsonl"
    if not config.bounds.elastic or not log.is_file():
        return config
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if '"DevicesMoved"' in line]
    if not rows:
        return config
    split = Split(rows[-1]["ranks"], rows[-1]["engines"])
    return with_split(config, split) if split in splits_of(config) else config


def bounds_are_for_devices_that_move(c: Config) -> Iterator[str]:
    e = c.bounds
    idle = {
        "--elastic-min-engines": e.elastic_min_engines != 1,
        "--elastic-min-ranks": e.elastic_min_ranks != 1,
        "--elastic-patience": e.elastic_patience != 3,
    }
    for flag in (flag for flag, given in idle.items() if given and not e.elastic):
        yield f"{flag} means nothing without --elastic; add that, or leave it out."


def devices_move_between_planes_that_overlap(c: Config) -> Iterator[str]:
    if not c.bounds.elastic:
        return
    if c.schedule.colocate:
        yield "--elastic moves devices between the planes, and with --colocate both have all of them; leave one out."
    elif c.schedule.max_weight_staleness == 0:
        yield (
            "--elastic goes by how long each plane waits for the other, and with --max-weight-staleness 0 they take "
            "turns; let them overlap with --max-weight-staleness 1 or more."
        )
    if c.cluster.rollout_num_gpus is None:
        yield "--elastic moves devices between the planes: say with --rollout-num-gpus how many are rollout's at first."


def engines_that_come_and_go_are_servers_of_the_run(c: Config) -> Iterator[str]:
    if not c.bounds.elastic:
        return
    if c.algo.loss_type in GIVEN or c.observe.debug_rollout_only or c.observe.load_debug_rollout_data is not None:
        yield "--elastic is for runs that sample and train, and this one does one of the two; leave it out."
    elif c.sglang.rollout_external_engine_addrs:
        yield "--elastic starts and ends engines, and --rollout-external-engine-addrs run already; leave one out."
    elif not is_remote(c):
        yield "--elastic starts and ends engines, but one is in the trainer's process; use --rollout-backend served."
    if c.sglang.update_weight_transport == "distributed":
        yield (
            "--update-weight-transport distributed sends weights over a group that --elastic breaks when ranks change; "
            "use auto, tensor, delta or disk."
        )


def ranks_that_come_and_go_are_of_one_trainer(c: Config) -> Iterator[str]:
    if not c.bounds.elastic:
        return
    if c.ray.runtime == "ray" and c.cluster.actor_num_nodes > 1:
        yield (
            f"--elastic takes and gives ranks one after the other, and --actor-num-nodes {c.cluster.actor_num_nodes} "
            "has as many on each node; say with --actor-num-gpus-per-node alone how many there are."
        )
    if c.train.train_backend != "fsdp":
        yield f"--elastic changes the ranks of --train-backend fsdp, and not of {c.train.train_backend}; leave it out."
    if c.cast.policies:
        yield "--elastic divides devices between one policy's trainer and engines, and --policies names several."
    if c.train.async_save:
        yield "--async-save leaves files to ranks that --elastic may end; leave one of the two out."


def a_split_is_within_its_bounds(c: Config) -> Iterator[str]:
    e = c.bounds
    if not e.elastic or c.cluster.rollout_num_gpus is None:
        return
    start = split_of(c)
    if start.engines < e.elastic_min_engines:
        yield f"The run starts with {start.engines} engines, fewer than --elastic-min-engines {e.elastic_min_engines}."
    if start.ranks < e.elastic_min_ranks:
        yield f"The run starts with {start.ranks} ranks, fewer than --elastic-min-ranks {e.elastic_min_ranks}."
    wanted = c.sglang.rollout_num_engines
    if wanted is not None and wanted * c.cluster.rollout_num_gpus_per_engine != c.cluster.rollout_num_gpus:
        yield f"--elastic deals out all of --rollout-num-gpus; leave out --rollout-num-engines {wanted}."
    elif len(splits_of(c)) == 1:
        yield "--elastic has nothing to move within its bounds; lower --elastic-min-ranks or --elastic-min-engines."


def every_split_can_be_laid_out(c: Config) -> Iterator[str]:
    """What is wrong with the layout of the start is said by the rules of layouts."""
    if not c.bounds.elastic or c.cluster.rollout_num_gpus is None:
        return
    for split in splits_of(c):
        seen = cast(Config, _Over(c, cluster=_Over(c.cluster, actor_num_gpus_per_node=split.ranks)))
        wrong = next((s for rule in LAYOUT for s in rule(seen)), None)
        if wrong is not None and split != split_of(c):
            yield f"--elastic may come to {split.ranks} ranks, and then: {wrong}"
            return


class _Over:
    """What a rule sees of ``inner``, but for some of it: a rule may see a config of which a part could not be read."""

    def __init__(self, inner: object, **own: object) -> None:
        self._inner, self._own = inner, own

    def __getattr__(self, name: str) -> object:
        return self._own[name] if name in self._own else getattr(self._inner, name)


ELASTIC = (
    bounds_are_for_devices_that_move,
    devices_move_between_planes_that_overlap,
    engines_that_come_and_go_are_servers_of_the_run,
    ranks_that_come_and_go_are_of_one_trainer,
    a_split_is_within_its_bounds,
    every_split_can_be_laid_out,
)
