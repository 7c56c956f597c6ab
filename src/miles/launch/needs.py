"""What a model needs, from its config alone: ``miles plan MODEL``, before anything is downloaded or loaded."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any

from miles.algo.config import GIVEN, WITH_CRITIC, distils
from miles.cluster.layout import Layout
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.layout_memory import adapted_by_rank
from miles.launch.lora import lora_of
from miles.launch.memory import critic_bytes, sized
from miles.launch.plan import teacher_folders
from miles.models.choice import chosen_spec
from miles.models.families import spec_of
from miles.models.files import dtype_of, read_config, read_json
from miles.models.footprint import (
    BYTES,
    active_parameter_count,
    forward_flops_per_token,
    gradient_bytes,
    kv_bytes_per_token,
    optimizer_bytes,
    parameter_count,
    state_bytes_per_sequence,
    weight_bytes,
)
from miles.models.published import config_named, published
from miles.models.retained import activation_bytes
from miles.models.spec import AttentionSpec, DecoderSpec, DeltaSpec, LayerSpec, MambaSpec, MlaSpec, MoeSpec

# Cards people have, by their memory in GB; a tenth of each is left to the driver and to fragments.
CARDS = (24, 80, 141, 192)
_USABLE = 0.9e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes and operations. ``context`` is how many tokens a sequence has; ``tokens`` how many train at once.

    Cards are how many of a memory in GB it takes at least; 0 where even one's own activations do not fit one.
    """

    name: str
    family: str
    dtype: str
    layers: str
    parameters: int
    active_parameters: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    teachers: int
    adapters: int
    activations: int
    activations_checkpointed: int
    checkpointing: bool
    tokens: int
    context: int
    kv_per_token: int
    state_per_sequence: int
    forward_flops: float
    cards_to_sample: dict[int, int]
    cards_to_train: dict[int, int]
    cards_to_train_checkpointed: dict[int, int]

    @property
    def training(self) -> int:
        """All a trainer holds."""
        held = self.activations_checkpointed if self.checkpointing else self.activations
        others = self.reference + self.critic + self.teachers + self.adapters
        return self.weights + self.gradients + self.optimizer + others + held


def find(model: str) -> tuple[str, Mapping[str, Any]]:
    """A model's name and config: a checkpoint's folder, a config.json, or the name of a published model."""
    path = Path(model)
    if path.is_dir():
        return path.resolve().name, read_config(path)
    if path.is_file():
        return path.resolve().parent.name, read_json(path)
    if (config := config_named(model)) is not None:
        return model, config
    near = get_close_matches(model.rpartition("/")[2], published(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(published())}"
    raise UsageError(f"{model} is no recipe, no folder with a config.json and no published model known here; {hint}.")


def needs_of(model: str, knobs: Config) -> Needs:
    """What a model takes under a run's knobs; precision is the config's own, or bfloat16 where it names none."""
    name, config = find(model)
    spec = _spec(model, knobs)
    named = dtype_of(config) if knobs.models.dtype == "auto" else knobs.models.dtype
    dtype = named if named in BYTES else "bfloat16"
    context = min(spec.max_positions, knobs.rollout.rollout_max_context_len or spec.max_positions)
    tokens = knobs.train.max_tokens_per_gpu
    held = {"size": BYTES[dtype], "fused": True}
    activations = [activation_bytes(spec, tokens, checkpointing=again, **held) for again in (False, True)]
    weights = weight_bytes(spec, dtype)
    others = _others(spec, knobs, dtype)
    gradients, optimizer = gradient_bytes(spec, dtype), optimizer_bytes(spec, dtype)
    lora = lora_of(knobs.lora, spec)
    if lora is not None:
        held = adapted_by_rank(spec, Layout(), dtype, lora)
        gradients, optimizer, others["adapters"] = held.gradients, held.optimizer, held.base + held.adapters
    fixed = weights + gradients + optimizer + sum(others.values())
    kept = activations[knobs.train.gradient_checkpointing]
    sequence = context * kv_bytes_per_token(spec, dtype) + state_bytes_per_sequence(spec, dtype)
    return Needs(
        name=name,
        family=spec.family,
        dtype=dtype,
        layers=_layers(spec),
        parameters=parameter_count(spec),
        active_parameters=active_parameter_count(spec),
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        **others,
        activations=activations[0],
        activations_checkpointed=activations[1],
        checkpointing=knobs.train.gradient_checkpointing,
        tokens=tokens,
        context=context,
        kv_per_token=kv_bytes_per_token(spec, dtype),
        state_per_sequence=state_bytes_per_sequence(spec, dtype),
        forward_flops=forward_flops_per_token(spec, context / 2),
        cards_to_sample={card: ceil((weights + sequence) / (card * _USABLE)) for card in CARDS},
        cards_to_train={card: _cards(fixed, kept, card) for card in CARDS},
        cards_to_train_checkpointed={card: _cards(fixed, activations[1], card) for card in CARDS},
    )


def _spec(model: str, knobs: Config) -> DecoderSpec:
    return chosen_spec(model, knobs.models.model_impl) if Path(model).is_dir() else spec_of(find(model)[1])


def _others(spec: DecoderSpec, knobs: Config, dtype: str) -> dict[str, int]:
    """What the models beside the policy take that its trainer holds; a teacher may be named as the model is."""
    a, t = knobs.algo, knobs.train
    compares = a.use_kl_loss or a.kl_coef > 0 or a.loss_type == "dpo_loss"
    has_critic = a.advantage_estimator in WITH_CRITIC and a.loss_type not in GIVEN and t.critic_device == "auto"
    critic = spec if t.critic_load is None else _spec(t.critic_load, knobs)
    folders = teacher_folders(knobs).values() if distils(a) else ()
    return {
        "reference": weight_bytes(spec, dtype) if compares else 0,
        "critic": sum(critic_bytes(critic, dtype)) if has_critic else 0,
        "teachers": sum(weight_bytes(_spec(str(folder), knobs), dtype) for folder in folders),
        "adapters": 0,
    }


def _cards(shared: int, each: int, card: int) -> int:
    """Cards that divide ``shared`` among them while each holds its own activations; 0: none do."""
    room = card * _USABLE - each
    return ceil(shared / room) if room > 0 else 0


def _kind(layer: LayerSpec) -> str:
    match layer.mixer:
        case AttentionSpec(window=None, chunk=None):
            mixer = "attention"
        case AttentionSpec():
            mixer = f"attention over {layer.mixer.window or layer.mixer.chunk:,}"
        case MlaSpec(indexer=None):
            mixer = "latent attention"
        case MlaSpec():
            mixer = "sparse latent attention"
        case DeltaSpec():
            mixer = "delta network"
        case MambaSpec():
            mixer = "Mamba-2"
        case None:
            mixer = ""
    if isinstance(layer.ffn, MoeSpec):
        ffn = f"{layer.ffn.experts_per_token} of {layer.ffn.num_experts} experts"
    else:
        ffn = "" if layer.ffn is None else "MLP"
    return " + ".join(filter(None, (mixer, ffn)))


def _layers(spec: DecoderSpec) -> str:
    """The layers by kind, most frequent first."""
    return ", ".join(f"{count} of {kind}" for kind, count in Counter(map(_kind, spec.layers)).most_common())


def as_json(needs: Needs) -> str:
    """For programs."""
    return json.dumps(asdict(needs) | {"training": needs.training}, indent=2)


def as_text(needs: Needs) -> str:
    """For people."""
    n = needs
    again = "with --gradient-checkpointing" if n.checkpointing else "without --gradient-checkpointing"
    other = n.activations if n.checkpointing else n.activations_checkpointed
    held = n.activations_checkpointed if n.checkpointing else n.activations
    masters = "" if n.dtype == "float32" else " and float32 masters"
    rows = [
        ("weights", n.weights, n.dtype),
        ("gradients", n.gradients, "float32"),
        (
            "optimizer",
            n.optimizer,
            f"Adam: two moments{masters}" if not n.adapters else "Adam: two moments of adapters",
        ),
        *([("adapters", n.adapters, "adapters, and the matrices they are added to")] if n.adapters else []),
        *([("reference", n.reference, n.dtype)] if n.reference else []),
        *([("critic", n.critic, "weights, gradients and optimizer")] if n.critic else []),
        *([("teachers", n.teachers, n.dtype)] if n.teachers else []),
        ("activations", held, f"{n.tokens:,} tokens at once {again} ({sized(other)} {_other(n)})"),
        ("training", n.training, "together, before it is divided among cards"),
        ("kv cache", n.kv_per_token, f"a token; {sized(n.kv_per_token * n.context)} for a context of {n.context:,}"),
        *([("state", n.state_per_sequence, "a sequence, whatever its length")] if n.state_per_sequence else []),
    ]
    active = f", {n.active_parameters / 1e9:,.2f}B of them for a token" if n.active_parameters < n.parameters else ""
    work = f"{n.forward_flops / 1e9:,.1f} GFLOP a token to sample, {3 * n.forward_flops / 1e9:,.1f} to train"
    lines = [
        f"model        {n.name} ({n.family}): {n.parameters / 1e9:,.2f}B parameters{active}",
        f"layers       {n.layers}",
        *(f"{name.ljust(12)} {sized(count).rjust(10)}  {note}" for name, count, note in rows),
        f"work         {work}, half-way through the context",
        f"to sample    {_on_cards(n.cards_to_sample)}",
        f"to train     {_to_train(n)}",
    ]
    return "\n".join(lines)


def _other(needs: Needs) -> str:
    return "without" if needs.checkpointing else "with"


def _to_train(needs: Needs) -> str:
    if any(needs.cards_to_train.values()):
        return _on_cards(needs.cards_to_train)
    if any(needs.cards_to_train_checkpointed.values()):
        return f"{_on_cards(needs.cards_to_train_checkpointed)}, with --gradient-checkpointing"
    return "no card holds the activations; lower --max-tokens-per-gpu"


def _on_cards(cards: Mapping[int, int]) -> str:
    return "at least " + ", or ".join(f"{count:,} of {size} GB" for size, count in cards.items() if count)
