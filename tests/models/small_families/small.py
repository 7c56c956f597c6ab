"""What all small models have in common, and what a kind of model is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

SMALL = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}


class Kind(NamedTuple):
    """A transformers model class, what builds its config, and the config's arguments beyond ``SMALL``."""

    model: type[PreTrainedModel]
    config: Callable[..., PreTrainedConfig]
    own: dict[str, Any]
