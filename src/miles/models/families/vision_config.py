"""Reader of the vision part of Hugging Face configs: ``text_config`` and ``vision_config`` inside an outer config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.core.errors import UsageError
from miles.models.families.config_reader import ConfigReader
from miles.models.vision.spec import VisionActivation

_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


class VisionConfigReader(ConfigReader):
    """Reads ``vision_config``; ``defaults`` are transformers' for keys that it does not name."""

    def __init__(self, config: Mapping[str, Any], family: str, defaults: Mapping[str, Any]) -> None:
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            raise UsageError(f"vision_config of config.json is missing, and the tower is described there ({family}).")
        super().__init__({**defaults, **{k: v for k, v in vision.items() if v is not None}}, family)

    def reject(self, key: str, why: str) -> None:
        super().reject(f"vision_config.{key}", why)

    def activation(self, key: str = "hidden_act") -> VisionActivation:
        """Read the activation of the tower's MLPs."""
        value = self.config.get(key)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            self.reject(key, f"is {value!r}, but only {', '.join(_ACTIVATIONS)} are implemented")
            return "gelu"
        return _ACTIVATIONS[value]

    def heads(self, key: str, hidden_size: int, *, multiple: int = 1) -> int:
        """Read the number of heads, which divide ``hidden_size`` into a multiple of ``multiple`` channels each."""
        heads = self.positive_int(key)
        if not self.problems and hidden_size % (heads * multiple):
            self.reject(key, f"is {heads}, which does not divide {hidden_size} channels in multiples of {multiple}")
        return 1 if hidden_size % (heads * multiple) else heads

    def layer_numbers(self, key: str, num_layers: int) -> tuple[int, ...]:
        """Read a list of layer numbers."""
        value = self.config.get(key)
        if not isinstance(value, list | tuple) or not all(type(i) is int and 0 <= i < num_layers for i in value):
            self.reject(key, f"is {value!r}, but must be a list of numbers of the {num_layers} layers")
            return ()
        return tuple(value)

    def raise_problems(self) -> None:
        """Raise a UsageError of all problems, if there are any."""
        if self.problems:
            raise UsageError(self.problems)


def read_text_config(
    config: Mapping[str, Any], defaults: Mapping[str, Any], *, flat: bool = False, family: str
) -> dict[str, Any]:
    """Return the text model's config, with the outer config's EOS tokens and tied head, and transformers' defaults.

    ``flat`` families have older configs in which the text model's keys are in the outer config.
    """
    text = config.get("text_config")
    if text is None and flat:
        text = {key: value for key, value in config.items() if key != "vision_config"}
    if not isinstance(text, Mapping):
        raise UsageError(f"text_config of config.json is missing, and the text model is described there ({family}).")
    outer = {key: config[key] for key in ("eos_token_id", "tie_word_embeddings") if config.get(key) is not None}
    return {**defaults, **text, **outer}


def read_token_id(config: Mapping[str, Any], key: str, default: int, family: str) -> int:
    """Read a placeholder token of the outer config."""
    value = config.get(key, default)
    if type(value) is not int or value < 0:
        raise UsageError(f"{key} of config.json is {value!r}, but must be a token id ({family}).")
    return value
