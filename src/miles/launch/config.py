"""Root configs of the commands: one field per section, each the config of a package.

Only this layer can import them, so no package below depends on the whole config.
"""

from dataclasses import dataclass
from typing import Literal

from miles.algo.config import AlgoConfig
from miles.backends.megatron.config import MegatronConfig
from miles.backends.native.config import NativeConfig
from miles.backends.native.lora_config import LoraServingConfig
from miles.backends.native.server.config import ServeConfig
from miles.backends.remote.config import SglangConfig
from miles.backends.service.config import ServiceConfig
from miles.cluster.config import ClusterConfig, FaultConfig, RayConfig
from miles.cluster.router.config import RouterConfig
from miles.config.option import option, passthrough
from miles.hooks.config import HooksConfig
from miles.launch.hub.config import HubConfig
from miles.models.config import ModelConfig
from miles.models.lora.config import LoraConfig
from miles.models.media_config import MediaConfig
from miles.observe.config import ObserveConfig
from miles.rollout.config import RolloutConfig
from miles.rollout.multi_agent.config import MultiAgentConfig
from miles.rollout.session.config import AgentConfig
from miles.rollout.tools.config import ToolsConfig
from miles.schedule.config import AsyncRolloutConfig, ElasticConfig, ScheduleConfig
from miles.train.config import ParallelConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """Flags of upstream's launch lines that change no option here; they are given without a prefix."""

    upstream_flags: tuple[str, ...] = passthrough(
        "upstream", "Flags that restate the checkpoint or have no effect here, as miles plan lists them."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The config of ``miles train``, frozen; what follows from it is a Plan."""

    models: ModelConfig
    media: MediaConfig
    rollout: RolloutConfig
    tools: ToolsConfig
    agents: AgentConfig
    multi_agent: MultiAgentConfig
    algo: AlgoConfig
    train: TrainConfig
    lora: LoraConfig
    parallel: ParallelConfig
    megatron: MegatronConfig
    schedule: ScheduleConfig
    async_rollout: AsyncRolloutConfig
    elastic: ElasticConfig
    native: NativeConfig
    sglang: SglangConfig
    cluster: ClusterConfig
    ray: RayConfig
    fault_tolerance: FaultConfig
    observe: ObserveConfig
    hooks: HooksConfig
    hub: HubConfig
    upstream: UpstreamConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Demo: model, seed, device and length."""

    moe: bool = option(False, "Use a small mixture-of-experts model, with routing replay on.")
    seed: int = option(0, "Seed of the model, the data and every sampled token.", ge=-(2**63), le=2**63 - 1)
    parity: Literal["fast", "exact"] = option("fast", "Numerics of engine and trainer, as in miles train.")
    steps: int | None = option(
        None, "Training steps, instead of a number that is known to be enough.", unit="steps", ge=1
    )
    plain: bool = option(False, "Print plain lines, for logs, instead of the live view.")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Device to run on.")
    num_threads: int | None = option(None, "CPU threads per operation, instead of one.", unit="threads", ge=1)
    save: str | None = option(None, "Directory of the runs, instead of runs/demo or runs/demo-moe.", path=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Root config of ``miles demo``."""

    demo: DemoOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Doctor: optional checks."""

    kernels: bool = option(
        False,
        "Compile the Triton kernels for this accelerator, which takes a while the first time, and compare each "
        "with plain torch.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRoot:
    """Root config of ``miles doctor``."""

    doctor: DoctorOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Replay: what is compared, and with which tolerance."""

    sample: int | None = option(
        None,
        "Compare only this trajectory of the step, counted from 0, and print the one sampled now.",
        unit="N",
        ge=0,
    )
    tolerance: float = option(
        0.0, "Largest difference of a log-prob, metric or weight that counts as equal; 0 compares bit for bit.", ge=0
    )
    color: bool = option(True, "Colour tokens by their log-probs where the output is a terminal and NO_COLOR is unset.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRoot:
    """Root config of ``miles replay``."""

    replay: ReplayOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """Show: which trajectories are printed; by default the best and the worst of the last step."""

    step: int | None = option(None, "Step whose trajectories are shown; the last one by default.", unit="N", ge=1)
    sample: int | None = option(None, "Show this trajectory of the step, counted from 0.", unit="N", ge=0)
    best: bool = option(False, "Show the trajectory of the step with the highest reward.")
    worst: bool = option(False, "Show the trajectory of the step with the lowest reward.")
    group: bool = option(False, "Show all trajectories of the same prompt.")
    color: bool = option(True, "Colour tokens by their log-probs where the output is a terminal and NO_COLOR is unset.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRoot:
    """Root config of ``miles show``."""

    show: ShowOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """View: where the dashboard listens."""

    host: str = option(
        "127.0.0.1", "Address to listen on; on any other than loopback a token is needed, which is printed."
    )
    port: int = option(8050, "Port to listen on; 0 picks a free one, which is printed.", ge=0, le=65535)
    api_key_file: str | None = option(
        None, "File with the token that a browser must send, instead of a new one; MILES_API_KEY works too.", path=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRoot:
    """Root config of ``miles view``."""

    view: ViewOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Report: where the file goes, and how much of the rollouts is in it."""

    output: str | None = option(
        None, "HTML file to write, also as -o; by default the first run's name with .html.", path=True
    )
    max_trajectories: int = option(
        60, "Trajectories to put in, spread over the first, middle and last step; 0 leaves them out.", unit="N", ge=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRoot:
    """Root config of ``miles report``."""

    report: ReportOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleOptions:
    """Bundle: where the archive goes, and what is in it."""

    output: str | None = option(None, "Archive to write; by default the run's name with -bundle.tar.gz.", path=True)
    rollouts: bool = option(False, "Also pack the rollouts: prompts, responses and rewards of every step.")
    max_file_bytes: int = option(8 << 20, "Pack at most the last so many bytes of each log file.", unit="B", ge=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRoot:
    """Root config of ``miles bundle``."""

    bundle: BundleOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Convert: the precision or format that is written, and what stays in a wide dtype."""

    format: str | None = option(
        None,
        "What to write, as in docs/convert.md: a precision, fp8, int4, nvfp4, ..., or bfloat16, float32, float16; or "
        "torch_dist, a distributed checkpoint of Megatron.",
    )
    keep: tuple[str, ...] = option(
        (), "Modules to leave in the wide dtype, by name, part of a name or pattern, as in o_proj or model.layers.0.*."
    )
    adapter: tuple[str, ...] = option(
        (), "Folders of PEFT adapters to merge into the weights, one after the other; --format must be a wide dtype."
    )
    origin_hf_dir: str | None = option(
        None,
        "Hugging Face folder with the config and tokenizer of IN, if that is a torch_dist checkpoint that has none.",
        path=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRoot:
    """Root config of ``miles convert``."""

    convert: ConvertOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesOptions:
    """Engines: which ones join or leave a live run."""

    add: tuple[str, ...] = option((), "Add these running servers, as in http://host:30000.")
    add_servers: int | None = option(None, "Start this many more servers of the run's own kind.", unit="N", ge=1)
    remove: tuple[str, ...] = option((), "Remove these engines, by address or name; their requests continue elsewhere.")
    timeout: float = option(600.0, "How long to wait for the run.", unit="s", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesRoot:
    """Root config of ``miles engines``."""

    engines: EnginesOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksOptions:
    """Stacks: how the stacks of a live run are read."""

    method: Literal["auto", "py-spy", "signal"] = option(
        "auto", "Who reads them: py-spy, the processes on a signal, or py-spy where it is installed and allowed."
    )
    native: bool = option(False, "Also show frames of C, C++ and Cython (py-spy).")
    locals: bool = option(False, "Also show local variables (py-spy).")


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksRoot:
    """Root config of ``miles stacks``."""

    stacks: StacksOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOptions:
    """Parity: which two backends are compared on which tokens, and with which tolerance."""

    a: str = option(
        "native", "First backend: native, sglang, transformers, fsdp, megatron, or the URL of an SGLang server."
    )
    b: str = option("fsdp", "Second backend, likewise.")
    other: str | None = option(
        None, "Another checkpoint of the same shape for --b, instead of MODEL.", path=True, hub="model"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "Precision of both, as in miles train.")
    parity: Literal["fast", "exact"] = option("fast", "Numerics of engine and trainer, as in miles train.")
    exact: bool = option(False, "Any different bit counts as a difference.")
    tolerance: float | None = option(
        None,
        "Relative difference of an operation's values (of log-probs: in nats) above which backends differ; 1e-4 in "
        "float32 and 5e-2 in bfloat16 by default.",
        ge=0,
    )
    tokens: tuple[int, ...] = option((), "Token ids to read.", unit="N", ge=0)
    prompt_file: str | None = option(None, "A file of text to read, instead of random tokens.", path=True)
    step: int | None = option(None, "Read a trajectory of this step of the run MODEL.", unit="N", ge=1)
    sample: int | None = option(None, "Which trajectory of --step is read, counted from 0.", unit="N", ge=0)
    length: int = option(48, "Length of the longest of three random sequences.", unit="tokens", ge=2)
    seed: int = option(0, "Seed of random tokens.", ge=-(2**63), le=2**63 - 1)
    prefill_chunk: int = option(7, "Prefill chunk size of the native engine.", unit="tokens", ge=1)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Device to run on.")
    trust_remote_code: bool = option(False, "Allow transformers to run Python code of the checkpoint.")
    sglang_python: str | None = option(None, "Python interpreter with sglang installed; this one by default.")
    sglang_flags: tuple[str, ...] = passthrough("sglang", "Flags of SGLang's own server.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRoot:
    """Root config of ``miles parity``."""

    parity: ParityOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipesOptions:
    """Recipes: which of them are listed."""

    family: str | None = option(None, "Only recipes whose family contains this, such as qwen3 or glm.")
    hardware: str | None = option(None, "Only recipes for hardware that contains this, such as 1x24GB or 8xH100.")
    task: str | None = option(None, "Only recipes whose task contains this, such as GRPO, tools, adapters or FP8.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipesRoot:
    """Root config of ``miles recipes``."""

    recipes: RecipesOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """Init: where the copy of a recipe goes."""

    output: str | None = option(None, "File to write; by default the recipe's own name in this folder.", path=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRoot:
    """Root config of ``miles init``."""

    init: InitOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Compare: which reference curve runs are held to, or what becomes one."""

    reference: str | None = option(None, "Recipe, or file of a curve, that the runs are compared with.")
    write_reference: str | None = option(
        None, "Write the curve of these runs, which differ by their seeds only, to this JSON file instead.", path=True
    )
    metrics: tuple[str, ...] = option(
        ("reward", "entropy", "response_length"), "Metrics of a curve that is written, as in metrics.jsonl."
    )
    window: int = option(10, "Steps whose mean is one point of a curve that is written.", unit="steps", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRoot:
    """Root config of ``miles compare``."""

    compare: CompareOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptOptions:
    """Adopt: the hardware and task of the recipe that is written, and how parity is measured."""

    hardware: str = option("8xH100", "Hardware to plan for, by a name that miles recipes lists.")
    task: str = option("math_grpo", "Task of the recipe: a file of recipes/tasks, such as gsm8k_grpo, code or sft.")
    output: str | None = option(None, "Recipe to write; by default the model's name with .toml.", path=True)
    weights: Literal["auto", "real", "random", "none"] = option(
        "auto",
        "What parity is measured on: the checkpoint's weights, random ones of a small model with the same config, or "
        "nothing; auto takes the real ones where they are here and fit into free memory twice.",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Device on which parity is measured.")
    trust_remote_code: bool = option(False, "Allow transformers to run Python code of the checkpoint.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRoot:
    """Root config of ``miles adopt``."""

    adopt: AdoptOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRoot:
    """Root config of ``miles serve``: server, model, engine, adapters beside the weights, training."""

    serve: ServeConfig
    models: ModelConfig
    media: MediaConfig
    native: NativeConfig
    lora: LoraConfig
    lora_serving: LoraServingConfig
    service: ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRoot:
    """Root config of ``miles route``."""

    route: RouterConfig
