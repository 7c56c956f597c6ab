"""Time limit of a step (roofline): the least seconds of each part, from the model's spec and the peaks of the devices.

The plan computes it for responses of the greatest length. A run writes that to ``limits.json`` in its directory, and
the limit of the tokens that each step really had to ``timings.jsonl``. No torch.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from miles.algo.config import OFFLINE_LOSSES
from miles.algo.correction_schedule import uses_correction
from miles.cluster.device_peaks import DevicePeak, find_peak
from miles.launch.config import Config
from miles.launch.plan.hardware import read_accelerator_name
from miles.launch.plan.layout_memory import (
    estimate_rank_lora_memory,
    estimate_rank_memory,
    get_frozen_vision,
    get_megatron_flags,
    get_recompute_layers,
    get_recompute_mode,
)
from miles.launch.plan.lora import build_lora, is_unmerged
from miles.launch.plan.plan import Plan, count_samples_per_prompt
from miles.launch.plan.running_requests import count_running_requests
from miles.launch.plan.topology import count_engines, is_distributed, is_remote, shares_devices
from miles.launch.policies.config import get_main_config, get_policies
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.params import BYTES, packed_weight_bytes, weight_bytes
from miles.models.accounting.step_limit import (
    EngineSide,
    PartLimit,
    StepModel,
    StepWorkload,
    TrainSide,
    Work,
    limit_part,
)
from miles.models.spec import DecoderSpec
from miles.rollout.config import resolve_context_limit

LIMITS_FILE = "limits.json"
DATA_SHEET, MEASURED = "data sheet", "measured when the run started"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimit:
    """The peak of a run's devices, and where it is from; ``why`` where it is not known."""

    name: str
    source: str = ""
    peak: DevicePeak | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimit:
    """The least seconds of a step and its parts on a device, for a workload in words; ``why`` where there are none.

    ``overlaps`` says that engines generate during the whole step, ``concurrent`` that they have devices of their own.
    """

    device: DeviceLimit
    workload: str = ""
    parts: tuple[PartLimit, ...] = ()
    seconds: float | None = None
    overlaps: bool = False
    concurrent: bool = False
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """The content of ``limits.json``."""
        return asdict(self)


def estimate_step_limit(config: Config, plan: Plan, spec: DecoderSpec, device: DeviceLimit) -> StepLimit:
    """The limit of a step whose responses are as long as they may be, on this device."""
    workload, text = plan_workload(get_main_config(config), spec)
    model = build_step_model(config, plan, spec)
    if device.peak is None or workload is None or model is None:
        why = device.why if device.peak is None else text if workload is None else "the run has several policies"
        return StepLimit(device=device, why=why)
    parts = limit_parts(model, workload, device.peak)
    return StepLimit(
        device=device,
        workload=text,
        parts=parts,
        seconds=model.sum_limits(parts),
        overlaps=model.overlaps,
        concurrent=model.concurrent,
    )


def limit_parts(
    model: StepModel, workload: StepWorkload, peak: DevicePeak, *, tokens_per_step: float = 1.0
) -> tuple[PartLimit, ...]:
    """The least seconds of each part on devices with this peak."""
    return tuple(
        limit_part(part, flops=peak.flops, bandwidth=peak.bandwidth, link=peak.link)
        for part in model.list_parts(workload, tokens_per_step)
    )


def find_device_limit(config: Config, plan: Plan, gpu: str | None = None) -> DeviceLimit:
    """The peak of ``gpu``, else of the run's devices as it recorded them, else of this machine's accelerator."""
    given = config.observe.mfu_peak_tflops
    if gpu is None and (stored := read_device_limit(plan.run_dir)) is not None:
        return with_given_flops(stored, given)
    if plan.device == "cpu" and gpu is None:
        return DeviceLimit(
            name="cpu", why="the peak of a CPU is measured when a run starts; --gpu NAME plans for a GPU"
        )
    name = gpu or read_accelerator_name()
    if name is None:
        return DeviceLimit(name=plan.device, why="which GPU it is cannot be read here; --gpu NAME plans for one")
    return with_given_flops(describe_product(name), given)


def describe_product(name: str) -> DeviceLimit:
    """The peak of a product as its data sheet has it."""
    peak = find_peak(name)
    why = "" if peak is not None else f"the table of cluster/device_peaks.py has no {name}"
    return DeviceLimit(name=name, source=DATA_SHEET, peak=peak, why=why)


def with_given_flops(device: DeviceLimit, tflops: float | None) -> DeviceLimit:
    """The device with the FLOPs of --mfu-peak-tflops, where that is given."""
    if tflops is None or device.peak is None:
        return device
    return replace(device, peak=replace(device.peak, flops=tflops * 1e12), source="--mfu-peak-tflops")


def read_device_limit(run_dir: Path) -> DeviceLimit | None:
    """The device of ``limits.json``; None where there is no such file, or no peak in it."""
    try:
        found = json.loads((run_dir / LIMITS_FILE).read_text(encoding="utf-8"))["device"]
        return DeviceLimit(**found | {"peak": DevicePeak(**found["peak"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def plan_workload(config: Config, spec: DecoderSpec) -> tuple[StepWorkload | None, str]:
    """The tokens of a step as far as options bound them, in words too; None with the reason where they do not."""
    r = config.rollout
    prompts, each = r.rollout_batch_size, count_samples_per_prompt(config)
    longest = resolve_context_limit(r, spec.max_positions)
    if config.algo.loss_type in OFFLINE_LOSSES:
        if r.rollout_max_context_len is None:
            return None, "how long the samples are is not known before the run; --rollout-max-context-len bounds them"
        pairs = 1 if config.algo.loss_type == "sft_loss" else 2
        workload = StepWorkload(sequences=(longest,) * (prompts * pairs))
        return workload, f"{prompts * pairs:,} samples of {longest:,} tokens"
    prompt = min(r.rollout_max_prompt_len or 0, longest)
    response = min(r.rollout_max_response_len, longest - prompt)
    known = f"of {prompt:,} tokens" if prompt else "without their tokens (--rollout-max-prompt-len is not given)"
    workload = StepWorkload.repeat(prompts=prompts, samples=each, prompt=prompt, response=response)
    return workload, f"{prompts:,} prompts {known}, {prompts * each:,} responses of {response:,} tokens, all at once"


def build_step_model(config: Config, plan: Plan, spec: DecoderSpec) -> StepModel | None:
    """The work of the main policy's steps; None with several policies, whose tokens are not kept apart."""
    if len(get_policies(config)) > 1:
        return None
    config = get_main_config(config)
    trains, samples = (
        not config.observe.debug_rollout_only,
        plan.samples and config.algo.loss_type not in OFFLINE_LOSSES,
    )
    rollout = _build_engine_side(config, plan, spec) if samples else None
    publish, unknown = _estimate_publication(config, plan, spec) if trains and rollout is not None else (None, "")
    return StepModel(
        rollout=rollout,
        train=_build_train_side(config, plan, spec) if trains else None,
        publish=publish,
        publish_unknown=unknown,
        overlaps=config.schedule.max_weight_staleness > 0,
        shares_devices=not is_remote(config) or shares_devices(config),
    )


def _build_engine_side(config: Config, plan: Plan, spec: DecoderSpec) -> EngineSide:
    each, models = config.cluster.rollout_num_gpus_per_engine, config.models
    return EngineSide(
        spec=replace(spec, quantization=models.rollout_quantization(each)),
        dtype=_get_rollout_dtype(config, plan),
        numerics=models.numerics,
        engines=_count_engines(config),
        devices_each=each,
        max_running=None
        if config.sglang.rollout_backend == "sglang"
        else count_running_requests(config, plan.device, spec),
    )


def _get_rollout_dtype(config: Config, plan: Plan) -> str:
    return plan.dtype if config.models.rollout_dtype == "auto" else config.models.rollout_dtype


def _count_engines(config: Config) -> int:
    if not is_remote(config):
        return 1
    return len(config.sglang.rollout_external_engine_addrs) or count_engines(config)


def _build_train_side(config: Config, plan: Plan, spec: DecoderSpec) -> TrainSide:
    impl, train = config.models.model_impl, config.train
    folders = (plan.reference, *plan.teachers.values())
    frozen = [read_spec_or_none(str(folder), impl) for folder in folders if folder is not None]
    recompute, first = get_recompute_mode(train), get_recompute_layers(train)
    layers = 1.0 if first is None else min(1.0, first / max(1, spec.num_layers))
    return TrainSide(
        spec=spec,
        dtype=plan.dtype,
        devices=plan.layout.world,
        backward=1.0 if config.lora.is_enabled else 2.0,
        recompute=layers if recompute == "full" else 0.0,
        old_logprobs=needs_old_logprobs(config, plan),
        critic=None if plan.critic is None else read_spec_or_none(str(plan.critic), impl),
        frozen=tuple(spec for spec in frozen if spec is not None),
        frozen_inside="train/returns" if config.algo.kl_coef and not config.algo.use_kl_loss else "train/optimize",
        updates=plan.num_steps_per_rollout,
        optimizer_bytes=_estimate_optimizer_traffic(config, plan, spec),
    )


def needs_old_logprobs(config: Config, plan: Plan) -> bool:
    """Whether the trainer computes log-probs before the first update of a step; else it has them from elsewhere."""
    algo = config.algo
    if algo.loss_type in OFFLINE_LOSSES:
        return False
    corrected = algo.loss_type == "policy_loss" and uses_correction(algo)
    from_engine = algo.use_rollout_logprobs
    if from_engine is None:
        from_engine = not corrected and config.schedule.max_weight_staleness > 0
    if from_engine:
        return False
    whole = corrected and ((algo.use_tis and algo.tis_mode == "auto") or algo.tis_batch_normalize)
    return plan.num_steps_per_rollout > 1 or whole or algo.kl_coef > 0


def _estimate_optimizer_traffic(config: Config, plan: Plan, spec: DecoderSpec) -> float | None:
    """Bytes of an update on the fullest rank: gradients are read, states read and written, weights written.

    Weights without separate float32 masters are read too. None where states are in host memory.
    """
    train, layout = config.train, plan.layout
    if plan.device != "cpu" and (train.optimizer_cpu_offload or config.parallel.fsdp_cpu_offload):
        return None
    megatron = get_megatron_flags(config, plan.device)
    if (lora := build_lora(config.lora, spec)) is not None:
        memory = estimate_rank_lora_memory(
            spec, layout, plan.dtype, lora, moments=train.optimizer_state_dtype, megatron=megatron
        )
        return float(memory.gradients + 2 * memory.optimizer + 2 * memory.adapters)
    memory = estimate_rank_memory(
        spec,
        layout,
        plan.dtype,
        moments=train.optimizer_state_dtype,
        optimizer=train.optimizer,
        frozen_vision=get_frozen_vision(train),
        megatron=megatron,
    )
    are_masters = plan.dtype == "float32" or (megatron is None and layout.shard_group_size * layout.replicate > 1)
    return float(memory.gradients + 2 * memory.optimizer + memory.weights * (2 if are_masters else 1))


def _estimate_publication(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[Work | None, str]:
    """What an engine's device reads, writes and receives at a weight update, or why no bandwidth is known."""
    engine = _build_engine_side(config, plan, spec)
    lora = build_lora(config.lora, spec)
    if lora is not None and is_unmerged(config):
        sent = written = float(lora.num_parameters * BYTES[engine.dtype])
    else:
        sent, written = float(weight_bytes(spec, plan.dtype)), float(packed_weight_bytes(engine.spec, engine.dtype))
    world = plan.layout.world
    if plan.transport == "shared":
        return Work(), ""
    if plan.transport == "copy":
        return Work(bytes=sent + written), ""
    if plan.transport == "gathered":
        return Work(bytes=written, link_bytes=sent * (world - 1) / world if is_distributed(config) else 0.0), ""
    transport = config.sglang.update_weight_transport
    if transport == "auto":
        own = config.sglang.rollout_backend != "sglang" and shares_devices(config) and plan.device != "cpu"
        transport = "ipc" if own else "tensor"
    if transport == "ipc":
        return Work(bytes=(sent + written) / engine.devices_each), ""
    if transport == "distributed":
        return Work(bytes=written / engine.devices_each, link_bytes=written / engine.devices_each), ""
    return None, f"weights go by --update-weight-transport {transport}, whose bandwidth is not known"


def format_step_limit(limit: StepLimit) -> list[str]:
    """The lines of ``miles plan``."""
    if limit.seconds is None:
        return [f"no limit known: {limit.why or 'no part has one'}"]
    peak = limit.device.peak
    assert peak is not None, "there are seconds"
    link = "" if peak.link is None else f", {peak.link / 1e9:,.0f} GB/s between devices"
    rows = [_format_part(part) for part in limit.parts]
    how = "the planes overlap on devices of their own" if limit.concurrent else "one part after the other"
    return [
        f"{limit.workload}",
        f"{limit.device.name}: {peak.flops / 1e12:,.4g} TFLOP/s, {peak.bandwidth / 1e9:,.4g} GB/s of memory{link} "
        f"({limit.device.source})",
        *rows,
        f"{'step'.ljust(22)} {format_seconds(limit.seconds).rjust(10)}  at least, {how}",
    ]


def _format_part(part: PartLimit) -> str:
    title = part.name.ljust(22)
    if part.seconds is None:
        return f"{title} {'unknown'.rjust(10)}  {part.why}"
    return f"{title} {format_seconds(part.seconds).rjust(10)}  {_describe_bound(part)}"


def _describe_bound(part: PartLimit) -> str:
    texts = {
        "compute": f"compute: {_format_amount(part.flops, 'FLOP')} per device",
        "memory": f"memory: {_format_amount(part.bytes, 'B')} per device",
        "link": f"link: {_format_amount(part.link_bytes, 'B')} per device",
    }
    return "nothing moves" if part.main_bound is None else texts[part.main_bound]


def _format_amount(amount: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if amount < 1000:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:,.4g} E{unit}"


def format_seconds(seconds: float) -> str:
    """Seconds with a unit.

    >>> format_seconds(0.0042), format_seconds(12.34), format_seconds(300)
    ('4.2 ms', '12.3 s', '5.0 min')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def list_timings(limits: Iterable[PartLimit]) -> dict[str, float]:
    """The limits as they are in ``timings.jsonl``."""
    return {f"limit/{limit.name}/{bound}": seconds for limit in limits for bound, seconds in limit.by_bound.items()}
