"""Maximum number of running requests of the run's embedded engine, where --engine-max-running is not given."""

from __future__ import annotations

from miles.backends.native.config import DEFAULT_MAX_RUNNING
from miles.launch.config import Config
from miles.models.spec import DecoderSpec

# Beyond this a decode step of a GPU takes nearly twice as long for twice the requests.
_MAX_AUTO = 512


def count_running_requests(config: Config, device: str, spec: DecoderSpec) -> int:
    """How many requests an engine runs at once: as given, else on a GPU all trajectories that are in flight, up to 512.

    Requests of recurrent models have a state each, for which memory is set aside; engines in other processes have a
    command line of their own.
    """
    given = config.native.engine_max_running
    if given is not None:
        return given
    if device == "cpu" or spec.recurrent or config.sglang.rollout_backend != "native":
        return DEFAULT_MAX_RUNNING
    rollout = config.rollout
    prompts = (config.schedule.max_weight_staleness + 1) * rollout.rollout_batch_size
    trajectories = max(prompts, config.async_rollout.over_sampling_batch_size or 0) * rollout.n_samples_per_prompt
    return min(max(trajectories, DEFAULT_MAX_RUNNING), _MAX_AUTO)
