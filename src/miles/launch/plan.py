"""What follows from a config: sizes, steps, device, precision, folders. Frozen, and found without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles.algo.config import DEFAULT_TEACHER, GIVEN, WITH_CRITIC, distils
from miles.cluster.layout import Layout
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.found import prompts_in
from miles.launch.layout_rules import is_team, layout_of
from miles.launch.machine import choose_device
from miles.launch.members import main_config
from miles.launch.server_rules import is_remote
from miles.models.files import dtype_of, read_config
from miles.models.footprint import BYTES
from miles.rollout.files import named_paths

RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a run needs that the user did not say outright.

    ``steps`` counts epochs by the rows of the file, also those that will be dropped as too long; it
    is 0 for commands that train nothing. ``reference`` is the folder of the reference model, None
    when neither a KL term nor DPO asks for one, and ``critic`` what the critic starts from,
    None where there is none; in the first ``critic_only_steps`` it learns alone.
    ``teachers`` are the folders of the teachers by their names, ``teacher_urls`` the addresses of those elsewhere.
    ``samples`` says whether the run needs an engine. ``layout`` is how the ranks that train share model and batch.
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
    layout: Layout
    reference: Path | None
    critic: Path | None
    critic_only_steps: int
    teachers: Mapping[str, Path]
    teacher_urls: Mapping[str, str]
    samples: bool
    eval_sets: Mapping[str, str]

    @property
    def optimizer_steps(self) -> int:
        """Updates of the weights in the whole run."""
        return max(0, self.steps - self.critic_only_steps) * self.num_steps_per_rollout


def plan_of(config: Config) -> Plan:
    """The plan of a config that breaks no rule; of several policies, the main one's."""
    config = main_config(config)
    device = choose_device(config.cluster.device)
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    size, count = config.train.global_batch_size, config.train.num_steps_per_rollout
    if size is None:
        size = samples // (count or 1)
    overlap, layout = config.schedule.max_weight_staleness > 0, layout_of(config)
    trains = not config.observe.debug_rollout_only
    compares = config.algo.use_kl_loss or config.algo.kl_coef > 0 or config.algo.loss_type == "dpo_loss"
    reference = (config.train.ref_load or config.models.hf_checkpoint) if compares and trains else None
    return Plan(
        run_dir=_run_dir(config),
        device=device.name,
        device_why=device.why,
        dtype=_dtype(config, device.name),
        steps=_steps(config),
        samples_per_step=samples,
        global_batch_size=size,
        num_steps_per_rollout=count or samples // size,
        tickets=(config.schedule.max_weight_staleness + 1) * config.rollout.rollout_batch_size,
        lease="disjoint" if overlap else "colocated",
        transport=_transport(config, copies=(overlap and trains) or _apart(config)),
        layout=layout,
        reference=None if reference is None else Path(reference),
        critic=_critic(config) if trains else None,
        critic_only_steps=config.train.num_critic_only_steps,
        teachers=teacher_folders(config) if distils(config.algo) and trains else {},
        teacher_urls=teacher_addresses(config) if distils(config.algo) and _samples(config) else {},
        samples=_samples(config),
        eval_sets=named_paths(config.rollout.eval_prompt_data),
    )


def teacher_folders(config: Config) -> dict[str, Path]:
    """The folders of the teachers by their names, that of prompts that name none first."""
    alone, pairs = config.train.opd_teacher_load, config.train.opd_teachers
    if len(pairs) % 2:
        raise UsageError(
            f"--opd-teachers takes pairs of a name and a folder, and these do not pair up: {' '.join(pairs)}."
        )
    found = {} if alone is None else {DEFAULT_TEACHER: Path(alone)}
    for name, folder in zip(pairs[::2], pairs[1::2], strict=True):
        if name in found:
            mend = "leave out --opd-teacher-load, or this" if name == DEFAULT_TEACHER else "give each its own name"
            raise UsageError(f"--opd-teachers names the teacher {name} when there is one already; {mend}.")
        found[name] = Path(folder)
    return found


def teacher_addresses(config: Config) -> dict[str, str]:
    """The addresses of teachers that are served by their names, that of prompts that name none under ``default``."""
    found: dict[str, str] = {}
    for entry in config.rollout.opd_teacher_urls:
        alone = entry.startswith(("http://", "https://"))
        name, _, url = (DEFAULT_TEACHER, "", entry) if alone else entry.partition("=")
        if not name or not url:
            raise UsageError(
                f"--opd-teacher-urls takes an address such as http://host:30000, or one with a name as in math=http://"
                f"host:30000, and not {entry}."
            )
        if name in found:
            raise UsageError(f"--opd-teacher-urls names the teacher {name} twice; give each its own name.")
        found[name] = url
    return found


def _critic(config: Config) -> Path | None:
    start = config.train.critic_load or config.models.hf_checkpoint
    wanted = config.algo.advantage_estimator in WITH_CRITIC and config.algo.loss_type not in GIVEN
    return Path(start) if wanted and start is not None else None


def _steps(config: Config) -> int:
    s, r = config.schedule, config.rollout
    if s.num_rollout is not None:
        return s.num_rollout
    if s.num_epoch is None or not r.prompt_data:
        return 0
    return s.num_epoch * prompts_in(r.prompt_data) // r.rollout_batch_size


def _run_dir(config: Config) -> Path:
    if config.schedule.save is not None:
        return Path(config.schedule.save)
    loss = config.algo.loss_type
    kind = loss.removesuffix("_loss") if loss in GIVEN else config.algo.advantage_estimator
    name = Path(config.models.hf_checkpoint or "model").resolve().name
    return RUNS / f"{name}-{kind}"


def _samples(config: Config) -> bool:
    """Is there anything for an engine to do?"""
    asked = config.algo.loss_type not in GIVEN or bool(config.rollout.eval_prompt_data)
    return asked and config.observe.load_debug_rollout_data is None


def _transport(config: Config, *, copies: bool) -> Literal["shared", "copy", "gathered", "served"]:
    """How weights get from the trainer to the engine."""
    if is_remote(config):
        return "served"
    return "gathered" if is_team(config) else "copy" if copies else "shared"


def _apart(config: Config) -> bool:
    """Does the engine sample in a precision of its own, from weights of its own?"""
    return config.models.rollout_dtype not in ("auto", config.models.dtype)


def _dtype(config: Config, device: str) -> str:
    if config.models.dtype != "auto":
        return config.models.dtype
    if device == "cpu" or config.models.hf_checkpoint is None:
        return "float32"
    own = dtype_of(read_config(config.models.hf_checkpoint)) or "float32"
    if own not in BYTES:
        raise UsageError(f"--hf-checkpoint {config.models.hf_checkpoint} is in {own}; choose a --dtype to hold it in.")
    return own
