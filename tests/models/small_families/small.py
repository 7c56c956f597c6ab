"""What all small models have in common, and what a kind of model is."""

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
    """A transformers model class, its config class, and the config's arguments beyond ``SMALL``."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    own: dict[str, Any]
