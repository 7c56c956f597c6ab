from miles.api.result import TrainResult as TrainResult
from miles.api.samples import PolicySample as PolicySample
from miles.api.train import train as train
from miles.api.train import train_async as train_async
from miles.core.errors import MilesError as MilesError
from miles.core.errors import UsageError as UsageError
from miles.core.types import Prompt as Prompt
from miles.core.types import Reward as Reward

__version__: str
