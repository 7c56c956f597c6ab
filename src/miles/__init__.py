"""Miles: post-train language models with reinforcement learning.

As a library: ``miles.train`` runs a training, ``miles.open`` opens a policy for a loop of your own (docs/library.md).
The command line starts at launch/main.py.
"""

from miles.core.lazy_exports import build_getattr, read_package_version

__version__ = read_package_version()
__exports__ = {
    "Engine": "miles.api.policy:EngineHandle",
    "MilesError": "miles.core.errors:MilesError",
    "Policy": "miles.api.policy:Policy",
    "PolicySample": "miles.api.samples:PolicySample",
    "Prompt": "miles.core.types:Prompt",
    "Reward": "miles.core.types:Reward",
    "TrainResult": "miles.api.result:TrainResult",
    "Trainer": "miles.api.policy:TrainerHandle",
    "UsageError": "miles.core.errors:UsageError",
    "open": "miles.api.policy:open_policy",
    "open_async": "miles.api.policy:open_policy_async",
    "train": "miles.train",
    "train_async": "miles.api.train:train_async",
}
__all__ = [*__exports__]
__getattr__ = build_getattr(__name__, __exports__)
