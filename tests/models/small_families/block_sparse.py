"""MiniMax-M3: attention to blocks of tokens that an indexer selects. The text model of a model with a vision tower."""

from tests.models.small_families.small import Kind
from transformers import MiniMaxM3SparseForConditionalGeneration as WithTower
from transformers import MiniMaxM3VLConfig

TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
SPARSE = "minimax_m3_sparse"
# Sizes all different, so that none can stand in for another.
MINIMAX = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "intermediate_size": 12,
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", SPARSE, SPARSE],
    "index_n_heads": 2,
    "index_head_dim": 10,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config(*, attn_implementation: str = "eager", **text) -> MiniMaxM3VLConfig:
    """The config of a text model of these arguments beside a tiny tower."""
    return MiniMaxM3VLConfig(
        text_config=text,
        vision_config=TOWER,
        projector_hidden_size=20,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        attn_implementation=attn_implementation,
        experts_implementation="eager",
    )


class MiniMaxM3SparseForConditionalGeneration(WithTower):
    """Without the tower, of which a decoder has nothing."""

    def __init__(self, config: MiniMaxM3VLConfig) -> None:
        super().__init__(config)
        del self.model.vision_tower, self.model.multi_modal_projector

    @classmethod
    def is_custom_code(cls) -> bool:
        """Tensors are named as those of the class of transformers."""
        return False


KINDS = {
    "minimax-m3": Kind(MiniMaxM3SparseForConditionalGeneration, config, MINIMAX),
    "minimax-m3 tied, two local blocks": Kind(
        MiniMaxM3SparseForConditionalGeneration,
        config,
        MINIMAX
        | {
            "tie_word_embeddings": True,
            "index_local_blocks": 2,
            "index_block_size": 3,
            "index_head_dim": 16,
            "rotary_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_types": [SPARSE, SPARSE, "full_attention"],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
        },
    ),
}
