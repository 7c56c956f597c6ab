"""The whole config: one field a room. Importable from this floor only, so no room below can hold it."""

from dataclasses import dataclass
from typing import Literal

from miles.algo.config import AlgoConfig
from miles.backends.megatron.config import MegatronConfig
from miles.backends.native.config import NativeConfig
from miles.backends.native.server.config import ServeConfig
from miles.cluster.config import ClusterConfig
from miles.cluster.route.config import RouteConfig
from miles.config.knob import knob
from miles.models.config import ModelConfig
from miles.observe.config import ObserveConfig
from miles.rollout.config import RolloutConfig
from miles.rollout.session.config import AgentConfig
from miles.rollout.tools.config import ToolsConfig
from miles.schedule.config import ScheduleConfig
from miles.train.config import TrainConfig
from miles.train.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the user said, never written to; what follows from it is a Plan."""

    models: ModelConfig
    rollout: RolloutConfig
    tools: ToolsConfig
    agents: AgentConfig
    algo: AlgoConfig
    train: TrainConfig
    parallel: ParallelConfig
    megatron: MegatronConfig
    schedule: ScheduleConfig
    native: NativeConfig
    cluster: ClusterConfig
    observe: ObserveConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """How the demo runs."""

    moe: bool = knob(False, "Use a small mixture-of-experts model, with routing replay on.")
    seed: int = knob(0, "Seed of the model, the data and every sampled token.")
    steps: int | None = knob(None, "Training steps, instead of the number that is known to be enough.", unit="steps")
    plain: bool = knob(False, "Print plain lines, for logs, instead of the live view.")
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "What to compute on.")
    num_threads: int | None = knob(None, "CPU threads for one operation, instead of one.", unit="threads")
    save: str | None = knob(None, "The run's directory, instead of runs/demo or runs/demo-moe.", path=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The root of the demo's own options."""

    demo: DemoOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRoot:
    """The root of the server's own options: how it answers, with which model, on what kind of engine."""

    serve: ServeConfig
    models: ModelConfig
    native: NativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRoot:
    """The root of the router's own options."""

    route: RouteConfig
