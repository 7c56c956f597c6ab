"""Who makes an engine's steps: a runner alone, or one that leads the ranks it shares the model with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles.backends.native.capacity import kv_tokens
from miles.backends.native.config import NativeConfig
from miles.backends.native.runner import Runner
from miles.cluster.platform import Platform
from miles.kernels.arithmetic import exact
from miles.models.door import Model
from miles.models.spec import DecoderSpec


def runner_of(
    spec: DecoderSpec,
    config: NativeConfig,
    platform: Platform,
    *,
    dtype: torch.dtype,
    model: Model | None,
    devices: Sequence[torch.device],
    name: str,
) -> tuple[Runner, int]:
    """The runner of the engine ``name``, and the pages of its cache; with several ``devices`` a rank on each."""
    size, seats, record = config.engine_page_size, config.engine_max_running, config.engine_record_routing

    def pages(of: DecoderSpec, on: Platform) -> int:
        return kv_tokens(of, config, on, dtype) // size

    if len(devices) > 1:
        from miles.backends.native.parallel import Work, lead

        how = "exact" if exact() else "fast"
        work = Work(spec=spec, page_size=size, seats=seats, record_routing=record, dtype=dtype, arithmetic=how)
        leader = lead(name, work, devices, pages=pages)
        return leader, leader.pages
    total = pages(spec, platform)
    runner = Runner(
        spec,
        pages=total,
        page_size=size,
        seats=seats,
        record_routing=record,
        device=platform.device,
        dtype=dtype,
        model=model,
        graphs=config.engine_graphs,
    )
    return runner, total
