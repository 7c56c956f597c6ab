"""The whole config: one field a room. Importable from this floor only, so no room below can hold it."""

from dataclasses import dataclass
from typing import Literal

from miles.algo.config import AlgoConfig
from miles.backends.megatron.config import MegatronConfig
from miles.backends.native.config import NativeConfig
from miles.backends.native.server.config import ServeConfig
from miles.backends.sglang.config import SglangConfig
from miles.cluster.config import ClusterConfig
from miles.cluster.faults import FaultConfig
from miles.cluster.ray.config import RayConfig
from miles.cluster.route.config import RouteConfig
from miles.config.knob import knob, mail
from miles.models.config import ModelConfig
from miles.models.lora_config import LoraConfig
from miles.observe.config import ObserveConfig
from miles.plug.config import PlugConfig
from miles.rollout.cast.config import CastConfig
from miles.rollout.config import RolloutConfig
from miles.rollout.session.config import AgentConfig
from miles.rollout.tools.config import ToolsConfig
from miles.schedule.bounds import ElasticConfig
from miles.schedule.config import ScheduleConfig
from miles.schedule.tempo import TempoConfig
from miles.train.config import TrainConfig
from miles.train.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the user said, never written to; what follows from it is a Plan."""

    models: ModelConfig
    rollout: RolloutConfig
    tools: ToolsConfig
    agents: AgentConfig
    cast: CastConfig
    algo: AlgoConfig
    train: TrainConfig
    lora: LoraConfig
    parallel: ParallelConfig
    megatron: MegatronConfig
    schedule: ScheduleConfig
    tempo: TempoConfig
    bounds: ElasticConfig
    native: NativeConfig
    sglang: SglangConfig
    cluster: ClusterConfig
    ray: RayConfig
    faults: FaultConfig
    observe: ObserveConfig
    plug: PlugConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """How the demo runs."""

    moe: bool = knob(False, "Use a small mixture-of-experts model, with routing replay on.")
    seed: int = knob(0, "Seed of the model, the data and every sampled token.")
    parity: Literal["fast", "exact"] = knob("fast", "The arithmetic of engine and trainer, as in miles train.")
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
class DoctorOptions:
    """What is tried beyond what is looked at."""

    kernels: bool = knob(
        False,
        "Compile the engine's device code for this accelerator, which takes a while the first time, and hold each "
        "kernel against plain torch on it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRoot:
    """The root of the doctor's own options."""

    doctor: DoctorOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What of a step is made again, and what counts as equal."""

    sample: int | None = knob(
        None, "Compare only this trajectory of the step, counted from 0, and print it as it is sampled now.", unit="N"
    )
    tolerance: float = knob(
        0.0, "Largest difference of a log-prob, a metric or a weight that counts as none; 0 compares to the bit."
    )
    color: bool = knob(True, "Colour tokens by their log-probs where the output is a terminal and NO_COLOR is unset.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRoot:
    """The root of replay's own options."""

    replay: ReplayOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """Which trajectories are printed: the best and the worst of the last step, unless told otherwise."""

    step: int | None = knob(None, "Step whose trajectories are shown; without it the last that was made.", unit="N")
    sample: int | None = knob(None, "Show this trajectory of the step, counted from 0.", unit="N")
    best: bool = knob(False, "Show the trajectory of the step that earned most.")
    worst: bool = knob(False, "Show the trajectory of the step that earned least.")
    group: bool = knob(False, "Show all attempts at the prompt of what is shown.")
    color: bool = knob(True, "Colour tokens by their log-probs where the output is a terminal and NO_COLOR is unset.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRoot:
    """The root of show's own options."""

    show: ShowOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesOptions:
    """Who is to join a run that goes on, and who to leave it."""

    add: tuple[str, ...] = knob((), "Have these servers, which run already, join, as in http://host:30000.")
    add_servers: int | None = knob(None, "Start so many more servers of the run's own kind.", unit="N")
    remove: tuple[str, ...] = knob((), "Have these engines, by address or name, give their requests back and leave.")
    timeout: float = knob(600.0, "How long to wait until the run has done it.", unit="s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesRoot:
    """The root of the options of ``miles engines``."""

    engines: EnginesOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOptions:
    """Which two programs read which tokens, and what counts as agreement."""

    a: str = knob(
        "native", "One program: native, sglang, transformers, fsdp, megatron, or the address of an SGLang server."
    )
    b: str = knob("fsdp", "The program it is held against; likewise.")
    other: str | None = knob(None, "Another checkpoint of the same shape for --b to read, instead of MODEL.", path=True)
    dtype: Literal["auto", "float32", "bfloat16"] = knob("auto", "The precision both compute in, as in miles train.")
    parity: Literal["fast", "exact"] = knob("fast", "The arithmetic of engine and trainer, as in miles train.")
    exact: bool = knob(False, "Any bit counts as a difference.")
    tolerance: float | None = knob(
        None,
        "Difference, as a share of an operation's values (of log-probs: in nats), above which two programs part; "
        "without it 1e-4 in float32 and 5e-2 in bfloat16.",
    )
    tokens: tuple[int, ...] = knob((), "The tokens that are read.", unit="N")
    prompt_file: str | None = knob(None, "A file of text to read, instead of random tokens.", path=True)
    step: int | None = knob(None, "MODEL is a run: read a trajectory of this step of it.", unit="N")
    sample: int | None = knob(None, "Which trajectory of --step is read, counted from 0.", unit="N")
    length: int = knob(48, "How many random tokens the longest of three sequences has.", unit="tokens")
    seed: int = knob(0, "Seed of random tokens.")
    prefill_chunk: int = knob(7, "Tokens that native computes in one step of its engine.", unit="tokens")
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "What to compute on.")
    trust_remote_code: bool = knob(False, "Let transformers run Python code that a checkpoint came with.")
    sglang_python: str | None = knob(None, "The interpreter that has sglang installed; without it this one.")
    sglang_flags: tuple[str, ...] = mail("sglang", "Flags of SGLang's own server, which sglang is started with.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRoot:
    """The root of parity's own options."""

    compared: ParityOptions


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
