"""Draft models of a run, read without torch: the one that is trained, and the one that engines draft with."""

from miles.backends.native.config import HEAD_ALGORITHMS
from miles.backends.remote.sglang_flags import get_flag_value
from miles.core.errors import MilesError
from miles.launch.config import Config
from miles.launch.rules.paths import read_spec_or_none
from miles.models.checkpoint.safetensors_io import read_config, stored_tensors
from miles.models.draft.param_map import count_mtp_layers, read_eagle_spec
from miles.models.draft.spec import DraftSpec, build_eagle_spec, build_mtp_spec, find_mtp_layout
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import DecoderSpec


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
