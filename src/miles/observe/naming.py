"""Where a user wants a step's groups written, or has them: a file's name with a blank for the step."""

from pathlib import Path

STEP = "rollout_id"


def named(word: str, step: int) -> Path:
    """The file that ``word`` names for a step; a ValueError where it has other blanks than the step's.

    >>> named("dumps/{rollout_id:03d}.parquet", 7).name
    '007.parquet'
    """
    try:
        return Path(word.format(**{STEP: step}))
    except (KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{error} is not known") from error
