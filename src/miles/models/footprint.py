"""What a decoder weighs and costs, from its spec alone: parameters, bytes and operations, without torch."""

from __future__ import annotations

from miles.models.spec import DecoderSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Adam's two moments in float32; low-precision weights also have a float32 master copy.
_MOMENT_BYTES = 8
_MASTER_BYTES = 4


def _attention(spec: DecoderSpec) -> int:
    heads = spec.num_heads + 2 * spec.num_kv_heads
    matrices = (heads + spec.num_heads) * spec.head_dim * spec.hidden_size
    biases = heads * spec.head_dim * spec.qkv_bias + spec.hidden_size * spec.output_bias
    return matrices + biases + 2 * spec.head_dim * spec.qk_norm


def _mlp(spec: DecoderSpec) -> int:
    matrices = 3 * spec.hidden_size * spec.intermediate_size
    return matrices + (2 * spec.intermediate_size + spec.hidden_size) * spec.mlp_bias


def _moe(spec: DecoderSpec, experts: int) -> int:
    assert spec.moe is not None
    return spec.moe.num_experts * spec.hidden_size + experts * 3 * spec.hidden_size * spec.moe.intermediate_size


def _count(spec: DecoderSpec, experts: int) -> int:
    with_experts = len(spec.moe_layers)
    body = spec.num_layers * (_attention(spec) + 2 * spec.hidden_size) + spec.hidden_size
    body += (spec.num_layers - with_experts) * _mlp(spec)
    body += with_experts * _moe(spec, experts) if with_experts else 0
    return body + spec.vocab_size * spec.hidden_size * (1 if spec.tie_embeddings else 2)


def parameter_count(spec: DecoderSpec) -> int:
    """All parameters; tied embeddings count once."""
    return _count(spec, spec.moe.num_experts if spec.moe else 0)


def active_parameter_count(spec: DecoderSpec) -> int:
    """The parameters one token meets: all of them, but of the experts only those it is sent to."""
    return _count(spec, spec.moe.experts_per_token if spec.moe else 0)


def weight_bytes(spec: DecoderSpec, dtype: str) -> int:
    """The weights in memory or on disk."""
    return parameter_count(spec) * BYTES[dtype]


def gradient_bytes(spec: DecoderSpec, dtype: str) -> int:
    """One gradient per weight, in the weights' dtype."""
    return parameter_count(spec) * BYTES[dtype]


def optimizer_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Adam's state: two float32 moments, and a float32 master of weights kept in less."""
    return parameter_count(spec) * (_MOMENT_BYTES + (_MASTER_BYTES if BYTES[dtype] < 4 else 0))


def kv_bytes_per_token(spec: DecoderSpec, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * BYTES[dtype]


def forward_flops_per_token(spec: DecoderSpec, context: float = 0.0) -> float:
    """Operations (a multiply and an add are two) to push one token through, logits included.

    ``context`` is how many keys it attends to, on average. A training step costs three times as much.
    """
    lookups = spec.vocab_size * spec.hidden_size * (0 if spec.tie_embeddings else 1)
    attended = 4.0 * context * spec.num_layers * spec.num_heads * spec.head_dim
    return 2.0 * (active_parameter_count(spec) - lookups) + attended
