"""Rules of models: checkpoints, precision, batch-invariant parity, LoRA adapters, and models of transformers."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from miles.algo.config import OFFLINE_LOSSES
from miles.core.errors import MilesError, UsageError
from miles.launch.config import Config
from miles.launch.plan.hardware import choose_device
from miles.launch.plan.lora import build_lora, is_unmerged, packs_base
from miles.launch.rules.flags import Rule
from miles.launch.rules.paths import find_checkpoint_problem, read_spec_or_none
from miles.models import capabilities
from miles.models.capabilities import check_batch_invariance
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.lora.targets import LoraSpec
from miles.models.resolve import resolve_spec

HUB_TOKEN = "HF_TOKEN"

# -- checkpoints and devices ----------------------------------------------------------------


def check_checkpoint(c: Config) -> Iterator[str]:
    name = c.models.hf_checkpoint
    if name is None:
        yield "--hf-checkpoint is missing: name the folder of the model to start from."
    elif problem := find_checkpoint_problem(Path(name)):
        yield f"--hf-checkpoint {name} {problem}"
    else:
        try:
            resolve_spec(name, c.models.model_impl)
        except MilesError as error:
            yield f"--hf-checkpoint {name} cannot be used: {error}"


def check_reference_checkpoint(c: Config) -> Iterator[str]:
    name = c.train.ref_load
    if name is not None and (problem := find_checkpoint_problem(Path(name))):
        yield f"--ref-load {name} {problem}"


def check_push_to_hub(c: Config) -> Iterator[str]:
    repo, h = c.hub.push_to_hub, c.hub
    if repo is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        yield f"--push-to-hub {repo} is not a repository; write ORG/NAME."
    if repo is None and (h.hub_private or h.hub_revision):
        yield "--hub-private and --hub-revision are about --push-to-hub; add it, or remove them."
    if repo is not None and c.observe.debug_rollout_only:
        yield "--push-to-hub uploads weights, and --debug-rollout-only trains none; remove one of them."


def check_save_remote(c: Config) -> Iterator[str]:
    if c.hub.save_remote is not None and "://" not in c.hub.save_remote:
        yield f"--save-remote {c.hub.save_remote} is not a URL: write s3://bucket/run, or use --save for a folder."


def check_hub_token(c: Config) -> Iterator[str]:
    if c.hub.push_to_hub is not None and not os.environ.get(HUB_TOKEN):
        yield f"--push-to-hub needs a token that may write to {c.hub.push_to_hub}: set {HUB_TOKEN} in the environment."


def check_accelerator(c: Config) -> Iterator[str]:
    if c.cluster.device == "cuda" and (found := choose_device("auto")).name == "cpu":
        yield f"--device cuda is not available: {found.why}; use --device cpu, or see miles doctor."


def check_transformers_models(c: Config) -> Iterator[str]:
    if c.models.model_impl != "transformers":
        return
    if c.models.rollout_dtype != "auto":
        yield (
            f"--rollout-dtype {c.models.rollout_dtype} needs the native model; remove it, or --model-impl transformers."
        )
    if c.models.kv_cache_dtype != "auto":
        yield (
            f"--kv-cache-dtype {c.models.kv_cache_dtype} needs the native model; remove it, or "
            "--model-impl transformers."
        )
    if c.train.optimizer == "muon" and not c.lora.is_enabled:
        yield "--optimizer muon needs the native model; use --optimizer adam, or remove --model-impl transformers."


def check_prefix_sharing(c: Config) -> Iterator[str]:
    if not c.train.share_prefix or not c.models.hf_checkpoint:
        return
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if isinstance(spec, HfAdapterSpec):
        yield "--share-prefix needs the native model; remove it, or --model-impl transformers."
    elif spec is not None and (problem := capabilities.check_prefix_sharing(spec)) is not None:
        yield f"--share-prefix does not work with {c.models.hf_checkpoint}: {problem}; remove it."


# -- parity exact ---------------------------------------------------------------------------


def check_exact_model(c: Config) -> Iterator[str]:
    if c.models.parity != "exact":
        return
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if spec is not None and (problem := check_batch_invariance(spec)) is not None:
        yield f"--parity exact does not work with this model: {problem}; remove it."


def check_exact_side_models(c: Config) -> Iterator[str]:
    if c.models.parity != "exact":
        return
    folders = [("--critic-load", c.train.critic_load), ("--opd-teacher-load", c.train.opd_teacher_load)]
    folders += [("--opd-teachers", folder) for folder in c.train.opd_teachers[1::2]]
    for flag, folder in folders:
        spec = read_spec_or_none(folder, c.models.model_impl)
        if spec is not None and (problem := check_batch_invariance(spec)) is not None:
            yield f"--parity exact does not work with {flag} {folder}: {problem}; remove it, or name another model."


def check_exact_setup(c: Config) -> Iterator[str]:
    m, backend = c.models, c.train.train_backend
    if m.parity != "exact":
        return
    if m.rollout_dtype not in ("auto", m.dtype):
        yield (
            f"--parity exact needs one precision, but --rollout-dtype {m.rollout_dtype} is not --dtype {m.dtype}; "
            "remove --rollout-dtype."
        )
    if m.rollout_format is not None and m.train_precision == "auto":
        yield (
            f"--parity exact needs one precision, but --rollout-precision {m.rollout_precision} quantizes only the "
            f"engine; use --train-precision {m.rollout_precision}."
        )
    if backend == "megatron" and m.train_precision != "auto" and not packs_base(c):
        yield (
            f"--parity exact with --train-backend megatron does not support --train-precision {m.train_precision}, "
            "which is Transformer Engine's; remove it, or use fsdp."
        )
    if c.sglang.rollout_backend == "sglang":
        yield "--parity exact does not work with SGLang, which has its own kernels; use --rollout-backend served."
    engine, trainer = c.cluster.rollout_num_gpus_per_engine, c.parallel.tensor_model_parallel_size
    if c.algo.loss_type not in OFFLINE_LOSSES and engine != trainer:
        yield (
            "--parity exact needs the same tensor-parallel size in engine and trainer, but "
            f"--rollout-num-gpus-per-engine {engine} is not --tensor-model-parallel-size {trainer}; make them equal."
        )


# -- LoRA -----------------------------------------------------------------------------------


def check_lora_setup(c: Config) -> Iterator[str]:
    if not c.lora.is_enabled:
        if not c.lora.lora_merge:
            yield "--no-lora-merge needs --lora-rank; add that, or remove --no-lora-merge."
        return
    yield from _check_versions(c)
    if c.parallel.fsdp_cpu_offload:
        yield "--lora-rank does not work with --fsdp-cpu-offload; remove one of them."
    if c.observe.debug_rollout_only:
        yield "--debug-rollout-only trains nothing, so --lora-rank and --lora-adapter-path have no effect; remove them."


def _check_versions(c: Config) -> Iterator[str]:
    flag = f"--lora-versions {c.lora.lora_versions}"
    if not c.lora.lora_versions:
        return
    if c.lora.lora_versions == 1:
        yield f"{flag} leaves no version for requests in flight while a new one is published; use 2 or more, or 0."
    if not is_unmerged(c):
        yield f"{flag} needs adapters that are applied beside the weights; add --no-lora-merge, or remove it."
    if c.sglang.rollout_backend == "sglang":
        yield f"{flag} is for engines of ours; SGLang holds each version by name anyway, so remove it."
    if c.models.model_impl == "transformers":
        yield f"{flag} needs the native model; remove it, or --model-impl transformers."
    if c.train.draft_train != "none":
        yield f"{flag} publishes adapters alone, but --draft-train changes weights too; remove one of them."
    if c.sglang.update_weight_transport not in ("auto", "tensor"):
        yield (
            f"{flag} sends adapters in requests, which --update-weight-transport "
            f"{c.sglang.update_weight_transport} does not; remove it."
        )
    if c.sglang.check_weight_update_equal:
        yield f"--check-weight-update-equal would overwrite the base, of which {flag} sends adapters only; remove it."


def check_lora_fits_model(c: Config) -> Iterator[str]:
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if not c.lora.is_enabled or spec is None:
        return
    path = c.lora.lora_adapter_path
    if path is not None and not Path(path).is_dir():
        yield f"--lora-adapter-path {path} is not a folder; name one with adapter_config.json in it."
        return
    try:
        lora = build_lora(c.lora, spec)
    except UsageError as error:
        yield from error.problems
        return
    assert lora is not None
    yield from _check_lora_targets(c, lora)
    head = next((target for target in lora.targets if target.is_head), None)
    if head is not None:
        yield from _check_lora_head(c, lora, head.module, is_tied=spec.tie_embeddings)


def _check_lora_head(c: Config, lora: LoraSpec, module: str, *, is_tied: bool) -> Iterator[str]:
    adapter = f"--target-modules {module}"
    if is_tied:
        yield (
            f"{adapter} would change the embedding too: this model has one tensor for both (tie_word_embeddings), and "
            "checkpoints of a run have adapters merged; leave it out, or train it with miles serve --train."
        )
    flags = {"--use-dora": lora.use_dora, "--lora-dropout": bool(lora.dropout)}
    flags["--loss-type rm_loss"] = c.algo.loss_type == "rm_loss"
    flags["--draft-train with --no-lora-merge"] = is_unmerged(c) and c.train.draft_train != "none"
    for flag in (flag for flag, is_set in flags.items() if is_set):
        yield f"{adapter}, an adapter of the output layer, does not work with {flag}; remove one of them."


def _check_lora_targets(c: Config, lora: LoraSpec) -> Iterator[str]:
    if lora.use_dora:
        yield from _check_dora(c)
    if lora.dropout and is_unmerged(c):
        yield "--lora-dropout does not work with --train-precision or --no-lora-merge; remove one of them."
    if is_unmerged(c) and c.algo.loss_type == "rm_loss":
        yield "--loss-type rm_loss with --lora-rank does not support --train-precision or --no-lora-merge; remove them."


def _check_dora(c: Config) -> Iterator[str]:
    if is_unmerged(c) or c.lora.lora_dropout:
        yield "DoRA does not work with --train-precision, --no-lora-merge or --lora-dropout; remove one of them."


def check_no_lora(c: Config) -> Iterator[str]:
    if c.lora.is_enabled:
        yield (
            "--lora-rank and --lora-adapter-path are for training; a checkpoint of such a run has the adapter merged "
            "into its weights, so give that as --hf-checkpoint."
        )


MODEL_RULES: tuple[Rule, ...] = (
    check_reference_checkpoint,
    check_transformers_models,
    check_prefix_sharing,
    check_exact_model,
    check_exact_side_models,
    check_exact_setup,
    check_lora_setup,
    check_lora_fits_model,
)
