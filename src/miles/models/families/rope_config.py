"""RoPE parameters of Hugging Face configs: read into a RopeSpec and written back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeGuard

from miles.models.spec import RopeSpec

# The required parameters of each rope type.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


class RopeConfigReader:
    """Reads one group of RoPE parameters; ``report`` receives every problem.

    >>> RopeConfigReader({"rope_type": "linear", "factor": 2}, report=print).read(1e4, dim=8, longest=64).factor
    2.0
    """

    def __init__(self, given: Mapping[str, Any], *, report: Callable[[str], None]) -> None:
        self.given = given
        self._report = report

    def read(self, theta: float, *, dim: int, longest: int, aliases: Mapping[str, str] | None = None) -> RopeSpec:
        """Read the RoPE of ``dim`` channels of a model for ``longest`` positions; ``aliases`` translates rope types.

        Missing parameters take transformers' defaults; the original context length defaults to ``longest``.
        """
        theta = self._number("rope_theta", theta, above=1.0)
        named: str = self.given.get("rope_type", self.given.get("type", "default"))
        kind = (aliases or {}).get(named, named)
        if kind not in _NEEDED:
            self._report(f"asks for rope type {named!r}, but only {', '.join(_NEEDED)} are implemented")
            return RopeSpec(theta=theta)
        if missing := [name for name in _NEEDED[kind] if self.given.get(name) is None]:
            self._report(f"lacks {', '.join(missing)}, which rope type {named} needs")
            return RopeSpec(theta=theta)
        match kind:
            case "linear":
                return RopeSpec(theta=theta, kind="linear", factor=self._number("factor"))
            case "dynamic":
                factor = self._number("factor")
                return RopeSpec(theta=theta, kind="dynamic", factor=factor, original_max_positions=longest)
            case "llama3":
                return RopeSpec(
                    theta=theta,
                    kind="llama3",
                    factor=self._number("factor"),
                    low_freq_factor=self._number("low_freq_factor"),
                    high_freq_factor=self._number("high_freq_factor"),
                    original_max_positions=self._original(longest),
                )
            case "yarn":
                return self._yarn(theta, longest)
            case "longrope":
                return self._longrope(theta, dim, longest)
            case _:
                return RopeSpec(theta=theta)

    def mrope_section(self, default: tuple[int, int, int], dim: int) -> tuple[int, int, int]:
        """Read how many of the pairs of ``dim`` channels each axis of multimodal RoPE rotates."""
        value = self.given.get("mrope_section") or default
        sound = isinstance(value, list | tuple) and len(value) == 3 and all(type(n) is int and n >= 0 for n in value)
        if not sound or sum(value) != dim // 2:
            self._report(f"has mrope_section {value!r}, which must be three integers that add up to {dim // 2}")
            return dim // 2, 0, 0
        time, height, width = value
        return time, height, width

    def _yarn(self, theta: float, longest: int) -> RopeSpec:
        factor = self._number("factor")
        truncate = self.given.get("truncate", True)
        if not isinstance(truncate, bool):
            self._report(f"has truncate {truncate!r}, which must be true or false")
        mscale, all_dim = self._number("mscale", 0.0, least=0.0), self._number("mscale_all_dim", 0.0, least=0.0)
        scale = yarn_mscale(factor)
        if mscale and all_dim:
            scale = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        return RopeSpec(
            theta=theta,
            kind="yarn",
            factor=factor,
            scale=self._number("attention_factor", scale, least=0.0),
            beta_fast=self._number("beta_fast", 32.0),
            beta_slow=self._number("beta_slow", 1.0),
            truncate=bool(truncate),
            original_max_positions=self._original(longest),
        )

    def _longrope(self, theta: float, dim: int, longest: int) -> RopeSpec:
        original = self._original(longest)
        factor = self._number("factor", longest / original)
        scale = 1.0
        if factor > 1.0:
            scale = math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeSpec(
            theta=theta,
            kind="longrope",
            factor=factor,
            scale=self._number("attention_factor", scale, least=0.0),
            short_factors=self._factors("short_factor", dim),
            long_factors=self._factors("long_factor", dim),
            original_max_positions=original,
        )

    def _number(
        self, name: str, default: float | None = None, *, above: float = 0.0, least: float | None = None
    ) -> float:
        """Read a parameter larger than ``above`` (or at least ``least``); null counts as missing."""
        value: Any = self.given.get(name)
        if value is None and default is not None:
            return default
        if _is_number(value) and (value > above if least is None else value >= least):
            return float(value)
        bound = f"above {above:g}" if least is None else f"of at least {least:g}"
        self._report(f"has {name} {value!r}, which must be a number {bound}")
        return above + 1.0 if default is None else default

    def _original(self, longest: int) -> int:
        value = self.given.get("original_max_position_embeddings", longest)
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            self._report(f"has original_max_position_embeddings {value!r}, which must be an integer above 1")
            return 2
        return value

    def _factors(self, name: Literal["short_factor", "long_factor"], dim: int) -> tuple[float, ...]:
        """Read a list with one number above 0 for each pair of channels."""
        value = self.given[name]
        sound = isinstance(value, list | tuple) and len(value) == dim // 2
        if not sound or not all(_is_number(x) and x > 0 for x in value):
            self._report(f"has a {name} that is not {dim // 2} numbers above 0, one for each pair of channels")
            return (1.0,) * (dim // 2)
        return tuple(float(x) for x in value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Compute the YaRN attention factor of a context extended by ``factor``."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def write_rope_config(rope: RopeSpec) -> dict[str, Any]:
    """Write the group of parameters that is read into ``rope``."""
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        out["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        out["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind in ("yarn", "longrope"):
        out["attention_factor"] = rope.scale
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.kind == "longrope":
        out |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    if rope.mrope_section is not None:
        out["mrope_section"] = list(rope.mrope_section)
    if rope.mrope_interleaved:
        out["mrope_interleaved"] = True
    return out
