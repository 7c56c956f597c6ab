"""Rules of draft training: which drafts a model can have, and which trainers can train them."""

from collections.abc import Iterator

from miles.core.errors import MilesError
from miles.launch.config import Config
from miles.launch.plan.drafts import drafts_with_mtp, get_sglang_algorithm
from miles.launch.rules.flags import Rule
from miles.launch.rules.paths import read_spec_or_none
from miles.models.checkpoint.safetensors_io import stored_tensors
from miles.models.draft.param_map import count_mtp_layers
from miles.models.draft.spec import find_mtp_layout
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import DecoderSpec, is_sparse


def check_draft_trainer(c: Config) -> Iterator[str]:
    """Who trains the draft of a policy, of which every rank has all."""
    if c.train.draft_train == "none":
        return
    flag = f"--draft-train {c.train.draft_train}"
    if c.hooks.custom_model_provider_path is not None:
        yield f"{flag} does not support --custom-model-provider-path, whose model is unknown; remove one of them."
    if c.algo.loss_type == "rm_loss":
        yield f"{flag} drafts the tokens of a policy, but --loss-type rm_loss trains a reward model; remove {flag}."


def check_sglang_draft(c: Config) -> Iterator[str]:
    """Stock SGLang takes MTP layers with the policy's tensors, and no other draft."""
    trained, algorithm = c.train.draft_train, get_sglang_algorithm(c)
    flag = f"--draft-train {trained}"
    if trained == "none" or algorithm is None or algorithm == "NGRAM":
        return
    if trained == "eagle3" or not drafts_with_mtp(c):
        yield (
            f"{flag}: SGLang would draft with {algorithm}, whose weights none of its endpoints updates without the "
            f"policy's; use --rollout-backend served with --speculative-algorithm {trained}, or remove {flag}."
        )
    elif c.sglang.update_weight_transport == "distributed":
        yield (
            f"{flag}: SGLang updates the policy but not its MTP layers over a process group; use "
            "--update-weight-transport tensor or disk."
        )


def check_draft_model(c: Config) -> Iterator[str]:
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if c.train.draft_train == "none" or spec is None:
        return
    flag = f"--draft-train {c.train.draft_train}"
    if isinstance(spec, HfAdapterSpec):
        yield f"{flag} needs the native decoder, but {spec.architecture} is computed by transformers; remove {flag}."
    elif c.train.draft_train == "mtp":
        yield from _check_mtp(c, spec)


def _check_mtp(c: Config, spec: DecoderSpec) -> Iterator[str]:
    folder, flag = c.models.hf_checkpoint, "--draft-train mtp"
    layout = find_mtp_layout(spec)
    if layout is None:
        yield f"{flag}: MTP layers of a {spec.family} model are not supported; use --draft-train eagle3."
        return
    try:
        stored = stored_tensors(folder or "")
    except MilesError:  # a plan may be made where the weights are not, and another rule says so
        return
    try:
        count = count_mtp_layers(spec, layout, stored)
    except MilesError as error:
        yield f"{flag}: {error}"
        return
    wanted = c.train.mtp_num_layers
    if not count:
        yield f"{flag}: {folder} has no MTP layers; use a checkpoint that has them, or --draft-train eagle3."
    elif wanted is not None and wanted != count:
        yield f"--mtp-num-layers is {wanted}, but {folder} has {count}; set it to {count}, or remove it."
    sparse = any(is_sparse(each.mixer) for each in spec.layers)
    if sparse and c.train.draft_train_steps > max(count, 1):
        yield (
            f"{flag}: a layer with sparse attention is trained one step deep; use --draft-train-steps {max(count, 1)}."
        )


DRAFT_RULES: tuple[Rule, ...] = (check_draft_trainer, check_sglang_draft, check_draft_model)
