"""Knobs of what happens when a process of the run dies or hangs."""

from dataclasses import dataclass

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """How often what died is started again, and how long silence may last."""

    max_restarts: int = knob(
        0,
        "How many times without a new checkpoint in between a run that crashed, was killed or hangs is started again; "
        "0 leaves it ended.",
        unit="times",
    )
    trainer_max_restarts: int = knob(
        5,
        "How many times without a new checkpoint in between the ranks of the trainer are started again, inside the "
        "run, when one of them dies or hangs.",
        unit="times",
    )
    heartbeat_timeout: float = knob(
        60.0,
        "How long a rank of the trainer, or with --max-restarts the run itself, may give no sign of life before it is "
        "taken for frozen and ended; 0 waits for ever.",
        unit="s",
    )
    slow_rank_factor: float = knob(
        1.5,
        "How many times the median of the others a rank of the trainer, or an engine behind HTTP, takes for a token "
        "when it is named as slow, once it has done so several times in a row; 0 names nobody.",
    )
