"""Plan of a run: sizes, steps, device, dtype and folders, derived from the config. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from miles.algo.config import CRITIC_ESTIMATORS, DEFAULT_TEACHER, OFFLINE_LOSSES, uses_distillation
from miles.cluster.hub_client import get_model_name
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.hub.resolve import PendingDownload
from miles.launch.plan.hardware import choose_device
from miles.launch.plan.lora import packs_base
from miles.launch.plan.topology import build_parallel_dims, is_distributed, is_remote
from miles.launch.policies.config import get_main_config
from miles.launch.rules.paths import count_prompts
from miles.models.accounting.params import BYTES
from miles.models.checkpoint.safetensors_io import config_dtype, read_config
from miles.precision.formats import FORMATS
from miles.rollout.data.paths import parse_named_paths

RUNS = Path("runs")

# Mean |Δ log-prob| that rounding does not explain: of equal weights, and of an engine's weights of so many bits.
_TOLERANCE = 0.01
_ROUNDED_TOLERANCES = {8: 0.05, 4: 0.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run derives from its config.

    ``steps`` counts epochs by the rows of the files, also those dropped later as too long; it is 0 for commands that do
    not train. ``reference`` is the folder of the reference model, None without a KL term or DPO; ``critic`` the folder
    the critic starts from, None without one; only it is trained in the first ``critic_only_steps``. ``teachers`` are
    folders by name, ``teacher_urls`` the URLs of served ones. ``samples`` says whether the run needs an engine.
    ``layout`` are the parallel dims of the trainer. ``policy`` is the name of a policy other than the main one, and its
    servers are ``engine_offset`` devices further than those of a run with that policy alone. ``downloads`` are weights
    on the hub that are not in the cache.
    """

    run_dir: Path
    device: str
    device_why: str
    dtype: str
    steps: int
    samples_per_step: int
    global_batch_size: int
    num_steps_per_rollout: int
    tickets: int
    lease: Literal["colocated", "disjoint"]
    transport: Literal["shared", "copy", "gathered", "served"]
    layout: ParallelDims
    reference: Path | None
    critic: Path | None
    critic_only_steps: int
    teachers: Mapping[str, Path]
    teacher_urls: Mapping[str, str]
    samples: bool
    eval_sets: Mapping[str, str]
    downloads: tuple[PendingDownload, ...] = ()
    policy: str | None = None
    num_policies: int = 1
    engine_offset: int = 0

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in the whole run."""
        return max(0, self.steps - self.critic_only_steps) * self.num_steps_per_rollout


def build_plan(config: Config) -> Plan:
    """The plan of a config that has passed the rules; with several policies, the main one's."""
    config = get_main_config(config)
    device = choose_device(config.cluster.device)
    samples = config.rollout.rollout_batch_size * count_samples_per_prompt(config)
    size, count = config.train.global_batch_size, config.train.num_steps_per_rollout
    if size is None:
        size = samples // (count or 1)
    overlap, layout = config.schedule.max_weight_staleness > 0, build_parallel_dims(config)
    trains = not config.observe.debug_rollout_only
    needs_reference = config.algo.use_kl_loss or config.algo.kl_coef > 0 or config.algo.loss_type == "dpo_loss"
    reference = (config.train.ref_load or config.models.hf_checkpoint) if needs_reference and trains else None
    return Plan(
        run_dir=choose_run_dir(config),
        device=device.name,
        device_why=device.why,
        dtype=_choose_dtype(config, device.name),
        steps=_count_steps(config),
        samples_per_step=samples,
        global_batch_size=size,
        num_steps_per_rollout=count or samples // size,
        tickets=(config.schedule.max_weight_staleness + 1) * config.rollout.rollout_batch_size,
        lease="disjoint" if overlap else "colocated",
        transport=_choose_transport(config, copies=(overlap and trains) or _has_rollout_dtype(config)),
        layout=layout,
        reference=None if reference is None else Path(reference),
        critic=_find_critic(config) if trains else None,
        critic_only_steps=config.train.num_critic_only_steps,
        teachers=parse_teacher_folders(config) if uses_distillation(config.algo) and trains else {},
        teacher_urls=parse_teacher_urls(config) if uses_distillation(config.algo) and _needs_engine(config) else {},
        samples=_needs_engine(config),
        eval_sets=parse_named_paths(config.rollout.eval_prompt_data),
    )


def scale_batches(plan: Plan, config: Config, times: int) -> Plan:
    """The plan of a policy whose steps have ``times`` the samples: those of several roles, or of several steps."""
    if config.train.global_batch_size is not None:
        return replace(plan, num_steps_per_rollout=plan.num_steps_per_rollout * times)
    return replace(plan, global_batch_size=plan.global_batch_size * times)


def choose_parity_tolerance(config: Config) -> float:
    """The difference of log-probs that turns the parity light red.

    It is larger where only the engine's weights are rounded, and where SGLang rounds the inputs of its GEMMs: weights
    are the trainer's then, but a difference in the last bit of an input may move it to the next FP8 value.
    """
    m, given = config.models, config.schedule.parity_tolerance
    if given is not None:
        return given
    if m.rollout_format is None or (m.train_precision != "auto" and config.sglang.rollout_backend != "sglang"):
        return _TOLERANCE
    return _ROUNDED_TOLERANCES[FORMATS[m.rollout_format].bits]


def count_samples_per_prompt(config: Config) -> int:
    """Trajectories per prompt; losses on given replies have one."""
    return 1 if config.algo.loss_type in OFFLINE_LOSSES else config.rollout.n_samples_per_prompt


def parse_teacher_folders(config: Config) -> dict[str, Path]:
    """The folders of the teachers by name, the default one first."""
    default, pairs = config.train.opd_teacher_load, config.train.opd_teachers
    if len(pairs) % 2:
        raise UsageError(f"--opd-teachers takes pairs of a name and a folder, but was given: {' '.join(pairs)}.")
    found = {} if default is None else {DEFAULT_TEACHER: Path(default)}
    for name, folder in zip(pairs[::2], pairs[1::2], strict=True):
        if name in found:
            fix = "remove --opd-teacher-load, or this one" if name == DEFAULT_TEACHER else "give each its own name"
            raise UsageError(f"--opd-teachers names the teacher {name} twice; {fix}.")
        found[name] = Path(folder)
    return found


def parse_teacher_urls(config: Config) -> dict[str, str]:
    """The URLs of served teachers by name; one without a name is ``default``."""
    found: dict[str, str] = {}
    for entry in config.rollout.opd_teacher_urls:
        unnamed = entry.startswith(("http://", "https://"))
        name, _, url = (DEFAULT_TEACHER, "", entry) if unnamed else entry.partition("=")
        if not name or not url:
            raise UsageError(
                f"--opd-teacher-urls takes a URL such as http://host:30000, or one with a name such as "
                f"math=http://host:30000, not {entry}."
            )
        if name in found:
            raise UsageError(f"--opd-teacher-urls names the teacher {name} twice; give each its own name.")
        found[name] = url
    return found


def _find_critic(config: Config) -> Path | None:
    start = config.train.critic_load or config.models.hf_checkpoint
    wanted = config.algo.advantage_estimator in CRITIC_ESTIMATORS and config.algo.loss_type not in OFFLINE_LOSSES
    return Path(start) if wanted and start is not None else None


def _count_steps(config: Config) -> int:
    s, r = config.schedule, config.rollout
    if s.num_rollout is not None:
        return s.num_rollout
    if s.num_epoch is None or not r.prompt_data:
        return 0
    return s.num_epoch * count_prompts(r.prompt_data) // r.rollout_batch_size


def choose_run_dir(config: Config) -> Path:
    """The run directory: --save, or one named after the checkpoint."""
    if config.schedule.save is not None:
        return Path(config.schedule.save)
    loss = config.algo.loss_type
    kind = loss.removesuffix("_loss") if loss in OFFLINE_LOSSES else config.algo.advantage_estimator
    name = get_model_name(config.models.hf_checkpoint or "model")
    return RUNS / f"{name}-{kind}"


def _needs_engine(config: Config) -> bool:
    """Whether an engine has anything to do."""
    asked = config.algo.loss_type not in OFFLINE_LOSSES or bool(config.rollout.eval_prompt_data)
    return asked and config.observe.load_debug_rollout_data is None


def _choose_transport(config: Config, *, copies: bool) -> Literal["shared", "copy", "gathered", "served"]:
    """How weights go from the trainer to the engine."""
    if is_remote(config):
        return "served"
    return "gathered" if is_distributed(config) else "copy" if copies else "shared"


def _has_rollout_dtype(config: Config) -> bool:
    """Whether the engine has another dtype, or weights that the trainer does not have quantized, and hence its own."""
    models = config.models
    quantized = models.rollout_format is not None and not packs_base(config)
    return models.rollout_dtype not in ("auto", models.dtype) or quantized


def _choose_dtype(config: Config, device: str) -> str:
    if config.models.dtype != "auto":
        return config.models.dtype
    if device == "cpu" or config.models.hf_checkpoint is None:
        return "float32"
    own = config_dtype(read_config(config.models.hf_checkpoint)) or "float32"
    if own not in BYTES:
        raise UsageError(f"--hf-checkpoint {config.models.hf_checkpoint} is in {own}; choose a --dtype for it.")
    return own
