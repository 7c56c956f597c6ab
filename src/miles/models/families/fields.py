"""What the families' configs have in common: reading a key with its type, and refusing what is not implemented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from miles.core.errors import UsageError
from miles.models.families.rotary import Rotary, written_rope
from miles.models.spec import AttentionSpec, DecoderSpec, MlpSpec, RopeSpec

# transformers' own default, for configs that name no base.
_THETA = 10_000.0


class Fields:
    """One config being read. Complaints gather and are raised together by ``settle``."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config = config
        self.family = family
        self.problems: list[str] = []

    def refuse(self, key: str, why: str) -> None:
        problem = f"{key} of config.json {why} ({self.family})."
        if problem not in self.problems:  # a key may be read more than once
            self.problems.append(problem)

    def settle(self) -> None:
        if self.problems:
            raise UsageError(self.problems)

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default the key must be there."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, f"is {value!r}, but must be a positive integer")
            return 1
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, f"is {value!r}, but must be a number")
            return default
        return float(value)

    def bound(self, key: str, default: float | None = None) -> float | None:
        """A number above 0, or null for none."""
        value = self.config.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            self.refuse(key, f"is {value!r}, but must be a number above 0")
            return None
        return None if value is None else float(value)

    def index(self, key: str, default: int) -> int:
        """A layer's number: an integer from 0 on."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(key, f"is {value!r}, but must be an integer from 0 on")
            return default
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"is {value!r}, but must be true or false")
            return default
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but the implemented ones (the first is the default)."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            self.refuse(key, f"is {value!r}, but only {' or '.join(map(repr, allowed))} is implemented")

    def ends(self) -> tuple[int, ...]:
        value = self.config.get("eos_token_id")
        if value is None:
            return ()
        return (value,) if isinstance(value, int) else tuple(value)

    def rope(
        self,
        *,
        layer_type: str | None = None,
        head_dim: int | None = None,
        interleaved: bool = False,
        theta: float = _THETA,
        partial: float = 1.0,
        called: Mapping[str, str] | None = None,
    ) -> RopeSpec:
        """Rotary settings: ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` as older configs write them.

        Where they are given by kind of layer, ``layer_type`` says for which. ``head_dim`` is for families that may
        turn only part of a head, and how many channels it has; ``theta`` and ``partial`` are what the family takes
        for a base and for a part that are not named; ``called`` translates names of kinds that only it knows.
        """
        key, given = self.rotary(layer_type)
        part = given.get("partial_rotary_factor", self.config.get("partial_rotary_factor", partial))
        channels, dim = self._turned(part, head_dim)
        rotary = Rotary(given, complain=lambda why: self.refuse(key, why))
        base = self.number("rope_theta", theta) if self.config.get("rope_theta") is not None else theta
        longest = self.config.get("max_position_embeddings")
        # One that is no length is refused where it is read.
        longest = longest if isinstance(longest, int) and longest > 1 else 2
        read = rotary.read(base, dim=channels, longest=longest, called=called)
        return replace(read, dim=dim, interleaved=interleaved)

    def rotary(self, layer_type: str | None = None) -> tuple[str, Mapping[str, Any]]:
        """The group of rotary parameters for a kind of layer as it is written, and the key it stands under."""
        key = "rope_scaling" if self.config.get("rope_scaling") else "rope_parameters"
        given: Mapping[str, Any] = self.config.get(key) or {}
        if not isinstance(given, Mapping):
            self.refuse(key, f"is {given!r}, but must be a group of parameters")
            return key, {}
        if any(isinstance(value, Mapping) for value in given.values()):
            if layer_type is None:
                self.refuse(key, "differs by layer type, which is not implemented")
                return key, {}
            return key, given.get(layer_type) or {}
        # Beside rope_parameters it is the older place, and the one transformers trusts.
        original = self.config.get("original_max_position_embeddings")
        return key, given if original is None else {**given, "original_max_position_embeddings": original}

    def _turned(self, part: Any, head_dim: int | None) -> tuple[int, int | None]:
        """How many channels of a head turn, and the ``dim`` of a RopeSpec that says so."""
        # Sizes that are none are refused where they are read.
        heads, hidden = self.config.get("num_attention_heads"), self.config.get("hidden_size")
        whole = head_dim or self.config.get("head_dim")
        if whole is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            whole = hidden // heads
        whole = whole if isinstance(whole, int) and whole > 1 else 2
        if isinstance(part, int | float) and part == 1:
            return whole, None
        if head_dim is None:
            self.refuse("partial_rotary_factor", "turns only part of a head, which is not implemented")
        elif not isinstance(part, int | float) or not 0 < part < 1 or int(head_dim * part) % 2 or head_dim * part < 2:
            self.refuse("partial_rotary_factor", f"is {part!r}, but must turn an even number of a head's channels")
        else:
            return int(head_dim * part), int(head_dim * part)
        return whole, None

    def kinds(self, default: Callable[[int], str], *allowed: str) -> tuple[str, ...]:
        """Each layer's kind: as ``layer_types`` says, else by its number; refuses any that is not ``allowed``."""
        count, kinds = self.whole("num_hidden_layers"), self.config.get("layer_types")
        if kinds is None:
            return tuple(default(i) for i in range(count))
        if len(kinds) != count:
            self.refuse("layer_types", f"names {len(kinds)} layers, but there are {count}")
            return (allowed[0],) * count
        for kind in sorted(set(kinds) - set(allowed)):
            self.refuse("layer_types", f"has a layer of kind {kind!r}, which is not implemented")
        return tuple(kinds)

    def windows(
        self,
        *,
        first: int = 0,
        always: bool = False,
        default: int | None = None,
        sliding: Callable[[int], bool] | None = None,
    ) -> tuple[int | None, ...]:
        """Each layer's sliding window: as ``layer_types`` says, else from layer ``first`` on where one is in use.

        ``always`` is for families whose window counts whenever it is named, and ``default`` is the window of a config
        that does not have the key; ``sliding`` is for families with another rule for which layers have one.
        """
        used = always or self.flag("use_sliding_window")
        window = self.config.get("sliding_window", default) if used else None
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            self.refuse("sliding_window", f"is {window!r}, but must be a positive integer")
            window = 1
        has = sliding or (lambda i: i >= first)
        named = ("full_attention", "sliding_attention")
        kinds = self.kinds(lambda i: named[window is not None and has(i)], *named)
        if window is None and "sliding_attention" in kinds:
            key, what = ("sliding_window", "missing") if used else ("use_sliding_window", "false")
            self.refuse(key, f"is {what}, but layer_types asks for sliding windows")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def heads(self, *, head_dim: int | None = None) -> dict[str, Any]:
        """``num_heads``, ``num_kv_heads`` and ``head_dim`` of an AttentionSpec; ``head_dim`` is a family's default."""
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        kv_heads = self.whole("num_key_value_heads", heads)
        size = self.whole("head_dim", head_dim or max(1, hidden // heads))
        sound = not self.problems  # a derived complaint about a key already refused would only confuse
        if sound and heads % kv_heads:
            self.refuse("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} attention heads")
        if sound and size % 2:
            self.refuse("head_dim", f"is {size}, but rotary positions need an even one")
        # What was refused is made to fit, so that the rest can be read and complained about too.
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
        return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size + size % 2}

    def experts(self, *keys: str) -> dict[str, Any]:
        """``num_experts`` (under the first of ``keys`` that is there) and ``experts_per_token`` of a MoeSpec."""
        key = next((key for key in keys if self.config.get(key) is not None), keys[0])
        total, each = self.whole(key), self.whole("num_experts_per_tok")
        if each > total and not self.problems:
            self.refuse("num_experts_per_tok", f"is {each}, more than the {total} experts")
        return {"num_experts": total, "experts_per_token": each}

    def common(self, *, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
        """The arguments of a DecoderSpec that all families read alike; ``eps`` and ``tied`` are a family's defaults."""
        self.only("attention_dropout", 0.0, None)
        return {
            "family": self.family,
            "vocab_size": self.whole("vocab_size"),
            "hidden_size": self.whole("hidden_size"),
            "norm_eps": self.number("rms_norm_eps", eps),
            "tie_embeddings": self.flag("tie_word_embeddings", tied),
            "max_positions": self.whole("max_position_embeddings"),
            "eos_token_ids": self.ends(),
        }


def written(spec: DecoderSpec) -> dict[str, Any]:
    """The part of a config that families of plain attention layers write alike; rope both the new way and the old."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec) and mixer.rope is not None
    sizes = [layer.ffn.size for layer in spec.layers if isinstance(layer.ffn, MlpSpec)]
    rope = written_rope(mixer.rope)
    ends = spec.eos_token_ids
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": sizes[0] if sizes else 4 * spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": rope,
        "rope_theta": mixer.rope.theta,
        "rope_scaling": None if mixer.rope.kind == "default" else rope,
        "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.max_positions,
        "eos_token_id": (ends[0] if len(ends) == 1 else list(ends)) if ends else None,
        "bos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }


def written_windows(spec: DecoderSpec) -> dict[str, Any]:
    """Sliding windows as a config says them."""
    windows = [layer.mixer.window for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    if not any(windows):
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": next(window for window in windows if window),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }
