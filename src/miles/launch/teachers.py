"""Teachers before a run starts: do they read the policy's tokens, and has every prompt one?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from miles.algo.distill import teacher_of
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.models.tokenizer import HubTokenizer, load_tokenizer
from miles.rollout.mixture import Part


def check_teachers(
    config: Config, teachers: Mapping[str, Path], tokenizer: HubTokenizer, parts: Sequence[Part]
) -> None:
    """Raise where a teacher has another tokenizer than the policy's, or a prompt names no teacher that there is."""
    if not teachers:
        return
    ours = tokenizer.vocabulary()
    for folder in teachers.values():
        theirs = load_tokenizer(folder, config.models.trust_remote_code).vocabulary()
        differ = sorted(ours.items() - theirs.items(), key=lambda pair: pair[1])
        if differ:
            word, number = differ[0]
            raise UsageError(
                f"the teacher in {folder} has another tokenizer than --hf-checkpoint: the policy's token {number} is "
                f"{word!r}, and the teacher does not know it by that number; choose a teacher of the same vocabulary."
            )
    if config.train.opd_teachers:
        for prompt in (prompt for part in parts for prompt in part.dataset.prompts):
            teacher_of(prompt, tuple(teachers), config.algo.opd_teacher_key)
