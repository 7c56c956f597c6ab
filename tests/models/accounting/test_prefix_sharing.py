"""The cost model of prefix sharing."""

from miles.kernels.numerics import FAST
from miles.models.accounting.known_models import find_known_config
from miles.models.accounting.prefix_sharing import PrefixCost, count_segments, count_sequences
from miles.models.families import spec_from_config


def speedup(model, prompt, reply, count):
    cost = PrefixCost(spec_from_config(find_known_config(model)), "bfloat16", FAST)
    shared = count_segments([(0, prompt), *[(prompt, prompt + reply)] * count])
    return cost.estimate_speedup(count_sequences([prompt + reply] * count), shared)


def test_segments_have_the_pairs_of_sequences_less_those_of_the_prefix():
    whole = count_sequences([30] * 8)
    shared = count_segments([(0, 20), *[(20, 30)] * 8])
    assert whole.varlen_pairs - shared.varlen_pairs == 7 * 20 * 20 / 2
    assert (whole.tokens, shared.tokens) == (240, 100)


def test_a_shared_prefix_pays_where_matmuls_dominate():
    # One H200: 1.25 s to 0.94 s, and 1.41x and 1.04x.
    assert speedup("Qwen3-0.6B", 256, 256, 8) > 1.3
    assert speedup("Qwen3-4B", 1024, 1024, 8) > 1.1
    assert speedup("Qwen3-0.6B", 1024, 1024, 8) < 1.05
    # Long responses need attention that is slower over segments.
    assert speedup("Qwen3-0.6B", 100, 8000, 8) < speedup("Qwen3-0.6B", 100, 400, 8)
    assert speedup("Qwen3-0.6B", 2000, 8000, 8) < 1


def test_sharing_gains_at_most_the_tokens_it_saves():
    for prompt, reply in ((1000, 100), (256, 256), (64, 512)):
        assert speedup("Qwen3-8B", prompt, reply, 8) < 8 * (prompt + reply) / (prompt + 8 * reply)


def test_nothing_shared_is_no_gain():
    assert speedup("Qwen3-0.6B", 0, 100, 4) <= 1
