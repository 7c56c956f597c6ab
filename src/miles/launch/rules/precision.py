"""Rules of low precision: the formats of engine and trainer, and the backends that have them."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from miles.backends.megatron.module_choice import can_use_transformer_engine
from miles.backends.remote.sglang_fp8 import SGLANG_FORMATS, find_shape_problem
from miles.backends.remote.sglang_lora import find_target_problem
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.plan.lora import build_lora, is_unmerged, packs_base
from miles.launch.rules.flags import Rule
from miles.launch.rules.paths import read_spec_or_none
from miles.models.config import ModelConfig
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.parallel.quantized_shards import find_divided_block
from miles.models.parallel.tp_sharding import compute_tp_shards
from miles.models.quantization import MEGATRON_RECIPES, plan_quantization
from miles.precision.formats import FORMATS


def name_precision(m: ModelConfig) -> str:
    """The flag that quantizes, with its value."""
    if m.train_precision != "auto":
        return f"--train-precision {m.train_precision}"
    return f"--rollout-precision {m.rollout_precision}"


def check_formats(c: Config) -> Iterator[str]:
    m = c.models
    if m.train_precision != "auto" and m.rollout_precision not in ("auto", m.train_precision):
        yield (
            f"--rollout-precision {m.rollout_precision} would sample from other weights than --train-precision "
            f"{m.train_precision} trains; remove --rollout-precision."
        )
    if m.fp8_format is None:
        return
    if m.train_precision == "auto" or not FORMATS[m.train_precision].quantizes_activations:
        yield (
            f"--fp8-format {m.fp8_format} is about training in FP8; add --train-precision fp8 (Megatron's blockwise "
            "recipe), or remove it."
        )


def find_quantization_problems(m: ModelConfig) -> Iterator[str]:
    """Why the model cannot be quantized as the options say."""
    spec = read_spec_or_none(m.hf_checkpoint, m.model_impl)
    if m.rollout_format is None or spec is None:
        return
    if isinstance(spec, HfAdapterSpec):
        yield f"{name_precision(m)} needs the native model; remove it, or --model-impl transformers."
        return
    try:
        plan = plan_quantization(replace(spec, quantization=m.rollout_quantization(1)))
    except UsageError as error:
        yield f"{name_precision(m)} does not fit this model: {error}"
        return
    if not plan:
        yield (
            f"{name_precision(m)} quantizes no weight of this model; remove --quantize-experts-only, or lower "
            "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16."
        )


def check_quantized_model(c: Config) -> Iterator[str]:
    yield from find_quantization_problems(c.models)


def check_quantized_shards(c: Config) -> Iterator[str]:
    m, ranks = c.models, c.parallel.tensor_model_parallel_size
    spec = read_spec_or_none(m.hf_checkpoint, m.model_impl)
    if m.train_precision == "auto" or _uses_transformer_engine(c) or isinstance(spec, HfAdapterSpec | None):
        return
    try:
        problem = find_divided_block(replace(spec, quantization=m.train_quantization()), ranks)
    except UsageError:  # another rule says why the model cannot be quantized or sharded so
        return
    if problem is not None:
        yield f"{problem}, so --tensor-model-parallel-size {ranks} does not work with {name_precision(m)}; lower it."


def check_quantized_engine_ranks(c: Config) -> Iterator[str]:
    m, ranks = c.models, c.cluster.rollout_num_gpus_per_engine
    spec = read_spec_or_none(m.hf_checkpoint, m.model_impl)
    is_sglang = c.sglang.rollout_backend == "sglang"  # which has a rule of its own
    if m.rollout_format is None or ranks == 1 or is_sglang or isinstance(spec, HfAdapterSpec | None):
        return
    quantized = replace(spec, quantization=m.rollout_quantization(ranks))
    try:
        plan_quantization(quantized)
    except UsageError:  # another rule says why the model cannot be quantized
        return
    try:
        compute_tp_shards(quantized)
    except UsageError as error:
        yield f"{name_precision(m)} does not work with --rollout-num-gpus-per-engine {ranks}: {error}"


def _uses_transformer_engine(c: Config) -> bool:
    """Whether --train-precision is Transformer Engine's; a packed base under adapters is ours with every trainer."""
    is_quantized = c.models.train_precision != "auto"
    return is_quantized and c.train.train_backend == "megatron" and not packs_base(c)


def check_quantized_backends(c: Config) -> Iterator[str]:
    m = c.models
    if _uses_transformer_engine(c):
        if m.train_precision not in MEGATRON_RECIPES:
            yield (
                f"--train-precision {m.train_precision} is not one of Transformer Engine's; use "
                f"{', '.join(MEGATRON_RECIPES)}, or --train-backend fsdp."
            )
        elif m.quantize_experts_only:
            yield "--quantize-experts-only does not work with --train-backend megatron; remove one of them."
        spec = read_spec_or_none(m.hf_checkpoint, m.model_impl)
        if spec is not None and not isinstance(spec, HfAdapterSpec) and not can_use_transformer_engine(spec):
            yield (
                f"--train-precision {m.train_precision} with --train-backend megatron is Transformer Engine's, which "
                f"has no form of all layers of {spec.family}; use --train-backend fsdp."
            )


def check_sglang(c: Config) -> Iterator[str]:
    m, ranks = c.models, c.cluster.rollout_num_gpus_per_engine
    if m.rollout_format is None or c.sglang.rollout_backend != "sglang":
        return
    if m.rollout_format not in SGLANG_FORMATS:
        yield (
            f"{name_precision(m)} does not work with SGLang, which takes weight updates in "
            f"{' and '.join(SGLANG_FORMATS)} only; use one of these, or --rollout-backend served."
        )
        return
    if "float32" in (m.rollout_dtype, m.dtype if m.rollout_dtype == "auto" else ""):
        yield (
            f"{name_precision(m)} needs bfloat16 in SGLang, which has no FP8 in float32; use --rollout-dtype bfloat16."
        )
    if c.sglang.check_weight_update_equal and m.kv_cache_dtype != "auto":
        yield (
            f"--check-weight-update-equal would overwrite the scales of SGLang's FP8 KV cache, which no update sends; "
            f"remove it, or --kv-cache-dtype {m.kv_cache_dtype}."
        )
    spec = read_spec_or_none(m.hf_checkpoint, m.model_impl)
    if isinstance(spec, HfAdapterSpec | None):
        return
    try:
        problem = find_shape_problem(replace(spec, quantization=m.rollout_quantization(1)), ranks)
    except UsageError:  # another rule says why the model cannot be quantized so
        return
    if problem is not None:
        yield f"{name_precision(m)} does not work with SGLang: {problem}; use --rollout-backend served."


def check_export(c: Config) -> Iterator[str]:
    if c.schedule.save_hf_precision == "wide":
        return
    if c.schedule.save_hf is None or c.models.rollout_format is None:
        yield (
            "--save-hf-precision rollout quantizes what --save-hf writes, as --rollout-precision or --train-precision "
            "say; add what is missing, or remove it."
        )


def check_unmerged(c: Config) -> Iterator[str]:
    if not is_unmerged(c) or packs_base(c):
        return
    if c.models.rollout_format is not None:
        yield (
            f"--no-lora-merge needs the same base in trainer and engine, but {name_precision(c.models)} is for the "
            "engine's alone; use --train-precision, or remove one of them."
        )


def check_sglang_adapters(c: Config) -> Iterator[str]:
    """Adapters beside the weights of stock SGLang are sent in requests, of projections that it takes adapters of."""
    if not is_unmerged(c) or c.sglang.rollout_backend != "sglang":
        return
    flag = "--no-lora-merge" if not packs_base(c) else name_precision(c.models)
    if c.sglang.update_weight_transport not in ("auto", "tensor"):
        yield (
            f"{flag} sends SGLang adapters in requests, which --update-weight-transport "
            f"{c.sglang.update_weight_transport} does not; remove it."
        )
    if c.sglang.check_weight_update_equal:
        yield (
            f"--check-weight-update-equal would overwrite the base of SGLang, of which {flag} sends adapters only; "
            "remove it."
        )
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if spec is None:
        return
    try:
        lora = build_lora(c.lora, spec)
    except UsageError:  # another rule says why
        return
    problem = None if lora is None else find_target_problem(spec, lora.targets)
    if problem is not None:
        yield (
            f"{flag} sends adapters to SGLang, but {problem}; choose other --target-modules, use --rollout-backend "
            f"served, or remove {flag}."
        )


def check_packed_base(c: Config) -> Iterator[str]:
    if not packs_base(c):
        return
    precision = name_precision(c.models)
    if c.models.fp8_format is not None:
        yield (
            f"--fp8-format {c.models.fp8_format} does not work with --lora-rank: the base of {precision} is frozen, "
            "and adapters have their gradients in --dtype; remove it."
        )
    if c.schedule.save_hf_precision == "rollout":
        yield (
            "--save-hf-precision rollout would round the adapters away that are trained beside a packed base; remove "
            "it, and serve the base with --lora-adapter-path."
        )


def check_transformer_engine(c: Config) -> Iterator[str]:
    m = c.models
    if not _uses_transformer_engine(c):
        return
    if find_spec("transformer_engine") is None:
        yield (
            f"--train-precision {m.train_precision} with --train-backend megatron needs Transformer Engine, which is "
            "not installed; install it, or use --train-backend fsdp."
        )


PRECISION_RULES: tuple[Rule, ...] = (
    check_formats,
    check_quantized_model,
    check_quantized_shards,
    check_quantized_engine_ranks,
    check_quantized_backends,
    check_sglang,
    check_export,
    check_unmerged,
    check_sglang_adapters,
    check_packed_base,
)
