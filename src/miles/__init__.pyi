from miles.api.policy import EngineHandle as Engine
from miles.api.policy import Policy as Policy
from miles.api.policy import TrainerHandle as Trainer
from miles.api.policy import open_policy as open
from miles.api.policy import open_policy_async as open_async
from miles.api.result import TrainResult as TrainResult
from miles.api.samples import PolicySample as PolicySample
from miles.api.train import train as train
from miles.api.train import train_async as train_async
from miles.core.errors import MilesError as MilesError
from miles.core.errors import UsageError as UsageError
from miles.core.types import Prompt as Prompt
from miles.core.types import Reward as Reward

__version__: str
__all__ = [
    "Engine",
    "MilesError",
    "Policy",
    "PolicySample",
    "Prompt",
    "Reward",
    "TrainResult",
    "Trainer",
    "UsageError",
    "open",
    "open_async",
    "train",
    "train_async",
]
