"""Inkling: attention with a relative position bias, short convolutions, and shared experts that the router weighs."""

from tests.models.small_families.small import Kind
from torch import Tensor
from transformers import (
    InklingConfig,
    InklingForCausalLM,
    InklingForConditionalGeneration,
    InklingModel,
    InklingTextConfig,
)
from transformers.models.inkling.modeling_inkling import InklingModelOutputWithPast

FULL, SLIDING = "hybrid", "hybrid_sliding"
# Windows, extents and the start of the temperature are less than what sequences reach.
INKLING = {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 6,
    "sliding_window_size": 7,
    "d_rel": 3,
    "rel_extent": 11,
    "log_scaling_n_floor": 9,
    "log_scaling_alpha": 0.3,
    "layer_types": [SLIDING, FULL, SLIDING],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "route_scale": 2.5,
    "logits_mup_width_multiplier": 3.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WHOLE = INKLING | {
    "vocab_size": 60,
    "unpadded_vocab_size": 53,
    "layer_types": [FULL, FULL, SLIDING],
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "conv_kernel_size": 3,
    "log_scaling_n_floor": None,
    "n_shared_experts": 1,
}


def text_config(**own) -> InklingTextConfig:
    return InklingTextConfig(**own, experts_implementation="eager")


def whole_config(*, attn_implementation: str = "eager", **text) -> InklingConfig:
    """A model with the least towers of images and audio, which are not read here."""
    vision = {"patch_size": 4, "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    return InklingConfig(
        text_config=text,
        vision_config=vision,
        audio_config={"n_mel_bins": 2, "mel_vocab_size": 4},
        attn_implementation=attn_implementation,
        experts_implementation="eager",
    )


def run_text_model(self: InklingModel, input_ids: Tensor, **kwargs) -> InklingModelOutputWithPast:
    """Without images: transformers 5.17 normalizes the embedding of the whole model twice, as no engine does."""
    hidden = self.language_model(input_ids, attention_mask=kwargs.get("attention_mask")).last_hidden_state
    return InklingModelOutputWithPast(last_hidden_state=hidden)


InklingModel.forward = run_text_model

KINDS = {
    "inkling": Kind(InklingForCausalLM, text_config, INKLING),
    "inkling whole": Kind(InklingForConditionalGeneration, whole_config, WHOLE),
}
