"""How a mixture of experts lies in a checkpoint: an expert a tensor, or all of them stacked."""

from __future__ import annotations

from miles.models.layouts import mlp
from miles.models.pieces import Parts, Piece, Place, joined
from miles.models.spec import MoeSpec


def parts(spec: MoeSpec, width: int, at: Place) -> Parts:
    """``gate_up`` [E, 2I, D] (``up`` [E, I, D] without gates), ``down`` [E, D, I], the router and its companions."""
    inner, count = spec.latent or width, spec.num_experts
    out = at.tensor("correction", "correction", (count,), leaf="") if spec.correction else {}
    rows = 2 * spec.size if spec.gated else spec.size
    name = "gate_up" if spec.gated else "up"
    if "stacked" in at.names:
        out |= _stacked(spec, name, (count, rows, inner), at)
    else:
        out |= _separate(spec, name, inner, at)
    out |= at.linear("router", {"router": count}, width, bias=spec.router_bias)
    if spec.latent is not None:
        out |= at.linear("into", {"latent_in": spec.latent}, width, bias=spec.latent_bias)
        out |= at.linear("outof", {"latent_out": width}, spec.latent, bias=spec.latent_bias)
    if spec.shared is not None:
        out |= mlp.parts(spec.shared, width, at.within("shared", "shared"))
        if spec.shared_gate:
            out |= at.tensor("shared_gate.weight", "shared_gate", (1, width))
    return out


def _stacked(spec: MoeSpec, name: str, shape: tuple[int, int, int], at: Place) -> Parts:
    """One tensor for all experts; ``stacked`` says ``transposed`` where inputs come before outputs in it."""
    count, rows, inner = shape
    turned = at.names["stacked"] == "transposed"
    out = at.tensor(name, f"experts_{name}", shape, leaf="", transposed=turned)
    out |= at.tensor("down", "experts_down", (count, inner, spec.size), leaf="", transposed=turned)
    if spec.expert_bias:
        out |= at.tensor(f"{name}_bias", f"experts_{name}_bias", (count, rows), leaf="")
        out |= at.tensor("down_bias", "experts_down_bias", (count, inner), leaf="")
    return out


def _separate(spec: MoeSpec, name: str, inner: int, at: Place) -> Parts:
    """An expert a tensor, or a gate and an up."""
    assert not spec.expert_bias, "no family keeps the biases of experts apart"
    first: list[Piece] = []
    down: list[Piece] = []
    keys = ("gate", "up") if spec.gated else ("up",)
    for e in range(spec.num_experts):
        home = f"{at.theirs}.{at.names['expert'].format(e)}"
        tensors = ((f"{home}.{at.names[f'expert_{key}']}.weight", (spec.size, inner)) for key in keys)
        first += joined(*tensors, expert=e)
        down += joined((f"{home}.{at.names['expert_down']}.weight", (inner, spec.size)), expert=e)
    return {f"{at.ours}.{name}": tuple(first), f"{at.ours}.down": tuple(down)}
