"""Prompts of a run: training data and held-out sets, filtered by length, and the source that orders them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import replace

from miles.algo.config import PREFERENCE_LOSSES
from miles.core.protocols import ImageTokenizer, Journal, Source, Tokenizer
from miles.core.types import Prompt
from miles.hooks import registry
from miles.hooks.load import check_object
from miles.launch.build.hooks import load_hook
from miles.launch.config import Config
from miles.rollout.custom import CustomSource
from miles.rollout.data.curriculum import CurriculumJournal, CurriculumSource
from miles.rollout.data.dataset import Dataset, DatasetSource, PromptCheck, check_prompts, read_dataset
from miles.rollout.data.media import MediaReader
from miles.rollout.data.mixture import MixturePart, MixtureSource, build_source, check_parts, read_parts
from miles.rollout.data.prompt_template import PromptTemplate, apply_prompt_template
from miles.rollout.data.schema import PreferenceColumns
from miles.rollout.eval_options import get_metadata_overrides, list_set_options
from miles.rollout.offline.preference import PreferenceRollout
from miles.rollout.offline.sft import SFTRollout
from miles.rollout.sampling import resolve_eval_prompt_limit

AnySource = DatasetSource | MixtureSource | CurriculumSource | CustomSource


def build_media_reader(tokenizer: Tokenizer) -> MediaReader | None:
    """What reads the images of data; None for a checkpoint that reads text only."""
    return MediaReader(store=tokenizer.media) if isinstance(tokenizer, ImageTokenizer) else None


def read_training_parts(
    config: Config,
    tokenizer: Tokenizer,
    render: Callable[[Prompt], Sized],
    limit: int | None,
    check: PromptCheck,
) -> tuple[MixturePart, ...]:
    """Every entry of ``--prompt-data``, without the prompts that ``render`` to more than ``limit`` tokens."""
    r = config.rollout
    parts = read_parts(
        r.prompt_data,
        input_key=r.input_key,
        label_key=r.label_key,
        metadata_key=r.metadata_key,
        tool_key=r.tool_key,
        skip_bad_rows=r.skip_bad_rows,
        pair=PreferenceColumns(chosen=r.chosen_key, rejected=r.rejected_key)
        if config.algo.loss_type in PREFERENCE_LOSSES
        else None,
        media_keys=get_media_columns(config),
        media=build_media_reader(tokenizer),
    )
    template = build_prompt_template(config)
    parts = tuple(replace(part, dataset=apply_prompt_template(part.dataset, template)) for part in parts)
    return check_parts(parts, render, limit=limit, check=check)


def get_media_columns(config: Config) -> dict[str, str]:
    """The columns of images and videos."""
    return {kind: str(column) for kind, column in config.rollout.multimodal_keys.items()}


def build_prompt_template(config: Config) -> PromptTemplate:
    """The system message and the text around each question."""
    return PromptTemplate(system=config.rollout.system_prompt, text=config.rollout.prompt_template)


def build_offline_rollout(
    config: Config, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
) -> SFTRollout | PreferenceRollout:
    """The rollout that returns the replies of the data, for SFT and preference losses."""
    r, paired = config.rollout, config.algo.loss_type in PREFERENCE_LOSSES
    sft = SFTRollout(
        tokenizer,
        eos_token_ids=eos_token_ids,
        chat=r.apply_chat_template,
        template=r.apply_chat_template_kwargs,
        loss_mask_type="last" if paired else r.loss_mask_type,
    )
    return PreferenceRollout(sft, chat=r.apply_chat_template) if paired else sft


def build_prompt_check(config: Config, *, context: int | None, renders: bool) -> PromptCheck:
    """How prompts are checked; ``renders`` says whether they are generated from as they are rendered."""
    r = config.rollout
    return PromptCheck(context=context, max_rows=r.check_rows if renders else 0, skip_bad=r.skip_bad_rows)


def get_set_config(config: Config, name: str) -> Config:
    """The config of one held-out set, with its own options."""
    return replace(config, rollout=replace(config.rollout, **list_set_options(config.rollout, name)))


def read_held_out_set(
    name: str,
    path: str,
    config: Config,
    tokenizer: Tokenizer,
    render: Callable[[Prompt], Sized],
    check: PromptCheck,
) -> Dataset:
    """One set of ``--eval-prompt-data``, without the prompts that are too long or cannot be used."""
    r = get_set_config(config, name).rollout
    limit = resolve_eval_prompt_limit(r)
    overrides = get_metadata_overrides(r, name)
    dataset = read_dataset(
        path,
        input_key=r.eval_input_key or r.input_key,
        label_key=r.eval_label_key or r.label_key,
        metadata_key=r.metadata_key,
        tool_key=r.eval_tool_key or r.tool_key,
        skip_bad_rows=r.skip_bad_rows,
        media_keys=get_media_columns(config),
        media=build_media_reader(tokenizer),
    )
    if overrides:
        prompts = tuple(replace(prompt, metadata={**prompt.metadata, **overrides}) for prompt in dataset.prompts)
        dataset = replace(dataset, prompts=prompts)
    dataset = apply_prompt_template(dataset, build_prompt_template(config))
    checked = check_prompts(dataset, render, limit=limit, check=check)
    return replace(checked, prompts=tuple(p for p in checked.prompts if p.id not in checked.bad_ids))


def build_prompt_source(config: Config, parts: Sequence[MixturePart]) -> AnySource:
    """In their order, shuffled, mixed by weight, or as the curriculum says; or the user's source."""
    r = config.rollout
    if config.hooks.data_source_path is not None:
        make = load_hook(config, registry.DATA_SOURCE)
        prompts = [prompt for part in parts for prompt in part.dataset.prompts]
        source = make(prompts)
        check_object(source, Source, f"{registry.DATA_SOURCE.flag} {config.hooks.data_source_path}")
        return CustomSource(source, prompts)
    if r.curriculum_path is None:
        return build_source(parts, shuffle=r.rollout_shuffle, seed=r.rollout_seed)
    curriculum = load_hook(config, registry.CURRICULUM, upstream=False)
    return CurriculumSource(parts, curriculum, shuffle=r.rollout_shuffle, seed=r.rollout_seed)


def wrap_journal(source: Source, journal: Journal) -> Journal:
    """The journal, which also reports events to a curriculum source."""
    return CurriculumJournal(journal, source) if isinstance(source, CurriculumSource) else journal


def list_data_notes(parts: Sequence[MixturePart]) -> tuple[str, ...]:
    """What a user should know about how the data was read."""
    return tuple(part.dataset.note for part in parts if part.dataset.note)
