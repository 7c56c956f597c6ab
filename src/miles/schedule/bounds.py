"""Knobs of elasticity: whether devices move between the planes, how far, and how soon."""

from dataclasses import dataclass

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """Devices go to the plane that is waited for."""

    elastic: bool = knob(False, "Move devices between trainer and engines, to whichever of them is waited for.")
    elastic_min_engines: int = knob(1, "The fewest engines that --elastic leaves.", unit="engines")
    elastic_min_ranks: int = knob(1, "The fewest ranks that --elastic leaves the trainer.", unit="ranks")
    elastic_patience: int = knob(
        3, "How many versions in a row one plane must wait for the other before a device moves.", unit="versions"
    )
