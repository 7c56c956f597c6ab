"""Draft models of a run, read without torch: the one that is trained, and the one that engines draft with."""

from dataclasses import replace
from typing import NamedTuple

from miles.backends.native.config import HEAD_ALGORITHMS, NativeConfig
from miles.backends.remote.sglang_flags import get_flag_value
from miles.core.errors import MilesError
from miles.launch.config import Config, ServeRoot
from miles.launch.plan.hardware import choose_device
from miles.launch.rules.paths import read_spec_or_none
from miles.models.checkpoint.safetensors_io import read_config, stored_tensors
from miles.models.draft.param_map import count_mtp_layers, read_eagle_spec
from miles.models.draft.spec import DraftSpec, build_eagle_spec, build_mtp_spec, find_mtp_layout
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import DecoderSpec


class SpeculationChoice(NamedTuple):
    """What engines draft with (a value of --speculative-algorithm), and why where that follows from ``auto``."""

    algorithm: str
    reason: str = ""

    def apply(self, native: NativeConfig) -> NativeConfig:
        return replace(native, speculative_algorithm=self.algorithm)

    def describe(self) -> str:
        """A line for the user; empty if the user has chosen."""
        if not self.reason:
            return ""
        drafts = "no drafts" if self.algorithm == "none" else "n-gram drafts where they pay"
        return f"Speculative decoding: {drafts}, because {self.reason} (--speculative-algorithm auto)."


def choose_speculation(config: Config) -> SpeculationChoice:
    """What the engines of a run draft with.

    ``auto`` is n-gram drafts where the numbers of the run can be repeated as exactly as without them.
    """
    native, spec = config.native, read_spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
    if native.speculative_algorithm != "auto":
        return SpeculationChoice(native.speculative_algorithm)
    if config.sglang.rollout_backend == "sglang":
        return SpeculationChoice("none", "SGLang has its own, by --sglang-speculative-algorithm")
    if (refused := _refuse_drafts(spec)) is not None:
        return refused
    if config.models.parity == "exact":
        return _EXACT
    if not _waits_for_its_rollouts(config):
        return SpeculationChoice("ngram", "an asynchronous run is not repeated to the bit anyway")
    if not is_repeatable(config):
        return SpeculationChoice(
            "ngram", "on a GPU, gradients without --parity exact are not repeated to the bit anyway"
        )
    return SpeculationChoice(
        "none", "a resumed run would not repeat the last bits of its log-probs; --parity exact makes it"
    )


def choose_served_speculation(config: ServeRoot) -> SpeculationChoice:
    """What the engine of ``miles serve`` drafts with: ``auto`` is n-gram drafts where they change no bit."""
    native, spec = config.native, read_spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
    if native.speculative_algorithm != "auto":
        return SpeculationChoice(native.speculative_algorithm)
    if config.service.train:
        return SpeculationChoice("none", "the training service does without")
    if (refused := _refuse_drafts(spec)) is not None:
        return refused
    if config.models.parity == "exact":
        return _EXACT
    return SpeculationChoice("none", "a seed would not repeat the last bits of log-probs; --parity exact makes it")


_EXACT = SpeculationChoice("ngram", "with --parity exact they change no bit")


def _refuse_drafts(spec: DecoderSpec | None) -> SpeculationChoice | None:
    if spec is None:
        return SpeculationChoice("none", "the model is not known here")
    if spec.recurrent:
        return SpeculationChoice("none", "the model has recurrent layers, whose drafts need memory and no CUDA graphs")
    return None


def is_repeatable(config: Config) -> bool:
    """Whether the events of a run without drafts depend only on its seed.

    Each step waits for its own rollouts, and the sums of its backward pass have a fixed order: those of torch's flash
    attention on a GPU have none.
    """
    ordered = config.models.parity == "exact" or choose_device(config.cluster.device).name == "cpu"
    return _waits_for_its_rollouts(config) and ordered


def _waits_for_its_rollouts(config: Config) -> bool:
    return config.schedule.max_weight_staleness == 0 and config.async_rollout.over_sampling_batch_size is None


def read_trained_draft(config: Config, policy: DecoderSpec) -> DraftSpec | None:
    """The draft of --draft-train; None if there is none, or the rules refuse it."""
    return _read_head(config, policy, config.train.draft_train, config.train.draft_load)


def read_engine_draft(config: Config, policy: DecoderSpec) -> DraftSpec | DecoderSpec | None:
    """What engines draft with beside the policy: a head, or a smaller model; None if it is neither."""
    algorithm, folder = config.native.speculative_algorithm, config.native.speculative_draft_model_path
    if algorithm == "draft-model":
        return read_spec_or_none(folder, "native")
    if algorithm not in HEAD_ALGORITHMS:
        return None
    return _read_head(config, policy, algorithm, folder or config.train.draft_load)


def get_sglang_algorithm(config: Config) -> str | None:
    """What stock SGLang drafts with, by its own name; None if it does not, or is not the backend."""
    if config.sglang.rollout_backend != "sglang":
        return None
    algorithm = get_flag_value(config.sglang.sglang_flags, "speculative-algorithm")
    return None if algorithm is None else algorithm.upper()


def drafts_with_mtp(config: Config) -> bool:
    """Whether stock SGLang drafts with the MTP layers of the policy's checkpoint."""
    own = get_flag_value(config.sglang.sglang_flags, "speculative-draft-model-path")
    return get_sglang_algorithm(config) in ("EAGLE", "NEXTN") and own in (None, config.models.hf_checkpoint)


def _read_head(config: Config, policy: DecoderSpec, kind: str, folder: str | None) -> DraftSpec | None:
    if isinstance(policy, HfAdapterSpec):
        return None
    try:
        if kind == "mtp" and (layout := find_mtp_layout(policy)) is not None:
            # A plan may be made where the weights are not: then one layer is assumed.
            count = config.train.mtp_num_layers or _count_stored(config, policy) or 1
            return build_mtp_spec(policy, layout, count)
        if kind == "eagle3" and folder is not None:
            return read_eagle_spec(read_config(folder), policy, folder)
    except MilesError:
        return None
    return build_eagle_spec(policy) if kind == "eagle3" else None


def _count_stored(config: Config, policy: DecoderSpec) -> int:
    layout = find_mtp_layout(policy)
    assert layout is not None
    try:
        return count_mtp_layers(policy, layout, stored_tensors(config.models.hf_checkpoint or ""))
    except MilesError:
        return 0
