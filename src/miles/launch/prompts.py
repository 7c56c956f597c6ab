"""The prompts of a run: read, made to fit, and put in the order the flags ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

from miles.algo.config import PAIRED
from miles.core.protocols import Journal, Source, Tokenizer
from miles.core.types import Prompt
from miles.launch.config import Config
from miles.launch.hooks import own
from miles.plug import points
from miles.plug.load import check_object
from miles.rollout.curriculum import CurriculumSource, Overheard
from miles.rollout.mixture import MixedSource, Part, fit_parts, read_parts, source_of
from miles.rollout.own import OwnSource
from miles.rollout.preference import Preferred
from miles.rollout.rows import Pair
from miles.rollout.source import Dataset, FileSource, read_dataset
from miles.rollout.supervise import Supervised

AnySource = FileSource | MixedSource | CurriculumSource | OwnSource


def training_parts(config: Config, render: Callable[[Prompt], Sized], limit: int | None) -> tuple[Part, ...]:
    """Every entry of ``--prompt-data``, without the prompts that ``render`` to more than ``limit`` tokens."""
    r = config.rollout
    parts = read_parts(
        r.prompt_data,
        input_key=r.input_key,
        label_key=r.label_key,
        metadata_key=r.metadata_key,
        skip_bad_rows=r.skip_bad_rows,
        pair=Pair(chosen=r.chosen_key, rejected=r.rejected_key) if config.algo.loss_type in PAIRED else None,
    )
    return fit_parts(parts, render, limit)


def replies_of(config: Config, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Supervised | Preferred:
    """The replies of the data, where they are what is learned."""
    r, paired = config.rollout, config.algo.loss_type in PAIRED
    shown = Supervised(
        tokenizer,
        eos_token_ids=eos_token_ids,
        chat=r.apply_chat_template,
        template=r.apply_chat_template_kwargs,
        learned="last" if paired else r.loss_mask_type,
    )
    return Preferred(shown, chat=r.apply_chat_template) if paired else shown


def held_out_set(path: str, config: Config) -> Dataset:
    """One set of ``--eval-prompt-data``."""
    r = config.rollout
    return read_dataset(
        path,
        input_key=r.eval_input_key or r.input_key,
        label_key=r.eval_label_key or r.label_key,
        metadata_key=r.metadata_key,
        skip_bad_rows=r.skip_bad_rows,
    )


def source_for(config: Config, parts: Sequence[Part]) -> AnySource:
    """In their order, shuffled, mixed by weight, or as the curriculum says; or the user's own."""
    r = config.rollout
    if config.plug.data_source_path is not None:
        make = own(config, points.DATA_SOURCE)
        prompts = [prompt for part in parts for prompt in part.dataset.prompts]
        made = make(prompts)
        check_object(made, Source, f"{points.DATA_SOURCE.flag} {config.plug.data_source_path}")
        return OwnSource(made, prompts)
    if r.curriculum_path is None:
        return source_of(parts, shuffle=r.rollout_shuffle, seed=r.rollout_seed)
    curriculum = points.CURRICULUM.load(r.curriculum_path)
    return CurriculumSource(parts, curriculum, shuffle=r.rollout_shuffle, seed=r.rollout_seed)


def journal_for(source: Source, journal: Journal) -> Journal:
    """The journal, overheard by a source that goes by what happens."""
    return Overheard(journal, source) if isinstance(source, CurriculumSource) else journal


def notes_of(parts: Sequence[Part]) -> tuple[str, ...]:
    """What a user should know of how the parts were read."""
    return tuple(part.dataset.note for part in parts if part.dataset.note)
