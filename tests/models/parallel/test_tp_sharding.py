"""A decoder cut across ranks is the decoder: every kind of model, sliced, joined and put together again."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.each_kind import each_kind
from tests.models.oracle import KINDS, positions_of, relative, tokens_of
from tests.models.small_families.small import SMALL
from tests.tiers import examples
from torch import Tensor

from miles.core.errors import UsageError
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.models.decoder import Decoder, Routing
from miles.models.families import spec_from_config
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.parallel.tp_decoder import build_tp_decoder
from miles.models.parallel.tp_sharding import (
    ShardSegment,
    TpShard,
    check_tp_size,
    compute_tp_shards,
    gather_param,
    shard_param,
    shard_spec,
)
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MambaSpec, MlpSpec, RopeSpec

LENGTHS = (7, 1, 19)


class Circle:
    """Ranks as threads, whose sum is taken in the order of the ranks."""

    def __init__(self, world: int) -> None:
        self.barrier = Barrier(world, timeout=60)
        self.slots: list[Tensor | None] = [None] * world
        self.seats = [Slot(self, rank, world) for rank in range(world)]


class Slot:
    def __init__(self, circle: Circle, rank: int, world: int) -> None:
        self.circle, self.rank, self.world = circle, rank, world

    def sum(self, x: Tensor) -> Tensor:
        self.circle.slots[self.rank] = x
        self.circle.barrier.wait()
        total = torch.stack([x for x in self.circle.slots if x is not None]).sum(0)
        self.circle.barrier.wait()
        return total


@cache
def whole(kind: str) -> Decoder:
    """A decoder of a kind, no parameter of which is zero or one."""
    config = KINDS[kind].config(**(SMALL | KINDS[kind].own)).to_dict()
    decoder = Decoder(
        spec_from_config(config | {"architectures": [KINDS[kind].model.__name__]}), device="cpu", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if ".ngram." in name and not parameter.is_floating_point():  # the constants of a hash
                owner, _, constant = name.rpartition(".")
                parameter.copy_(decoder.get_submodule(owner).constants()[constant])
                continue
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
            if name.endswith(".A_log"):
                parameter.sub_(3)
    return decoder.requires_grad_(False)


def logits(decoder: Decoder, routing: Routing | None) -> Tensor:
    tokens_T = torch.cat(tokens_of(LENGTHS))
    hidden_TD = decoder(tokens_T, positions_of(LENGTHS), VarlenAttentionBackend(LENGTHS, "cpu"), routing)
    return compute_logits(hidden_TD, decoder.head(), decoder.spec.logit_softcap, numerics=decoder.numerics)


def tp_logits(decoder: Decoder, world: int, routing: Routing | None) -> Tensor:
    """The same, out of as many decoders as there are ranks."""

    def run(slot: Slot) -> Tensor:
        try:
            with torch.no_grad():
                part = build_tp_decoder(decoder.spec, slot, device="meta", dtype=torch.float32)
                own = {
                    name: shard_param(decoder.spec, name, tensor, slot.rank, world)
                    for name, tensor in decoder.named_parameters()
                }
                part.load_state_dict(own, assign=True)
                return logits(part, None if routing is None else routing if slot.rank == 0 else Routing(record=True))
        except BaseException:
            slot.circle.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as threads:
        parts = list(threads.map(run, Circle(world).seats))
    return torch.cat(parts, -1)[:, : decoder.spec.vocab_size]


def worlds(spec: DecoderSpec, *wanted: int) -> list[int]:
    """Those numbers of ranks that this model can be cut across; two are always among them but for a single group."""
    fit = [world for world in wanted if check_tp_size(spec, world) is None]
    single = any(isinstance(layer.mixer, MambaSpec) and layer.mixer.groups == 1 for layer in spec.layers)
    assert (2 in fit) is not single
    return fit


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_give_together_what_the_whole_decoder_gives(kind):
    decoder = whole(kind)
    one = Routing(record=True)
    expected = logits(decoder, one)
    for world in worlds(decoder.spec, 2, 4):
        many = Routing(record=True)
        assert relative(tp_logits(decoder, world, many), expected) < 2e-5
        assert all(torch.equal(a, b) for a, b in zip(one.recorded, many.recorded, strict=True))


@each_kind
def test_slices_fit_the_smaller_decoder_and_gather_to_the_whole(kind):
    decoder = whole(kind)
    spec = decoder.spec
    assert set(compute_tp_shards(spec)) == {name for name, _ in decoder.named_parameters()}
    for world in worlds(spec, 2, 3, 4):
        small = dict(Decoder(shard_spec(spec, world), device="meta", dtype=torch.float32).named_parameters())
        for name, tensor in decoder.named_parameters():
            slices = [shard_param(spec, name, tensor, rank, world) for rank in range(world)]
            assert all(one.shape == small[name].shape and one.is_contiguous() for one in slices), name
            assert torch.equal(gather_param(spec, name, slices), tensor), name


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(0, 2),
)
@settings(max_examples=examples(200), deadline=None)
def test_any_share_gathers_to_what_was_cut(parts, world, dim):
    share = TpShard(dim=dim, segments=tuple(ShardSegment(units, rows) for units, rows in parts))
    shape = [2, 3, 2]
    shape[dim] = sum(units * rows for units, rows in parts)
    tensor = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    slices = [share.shard(tensor, rank, world) for rank in range(world)]
    assert len({one.shape for one in slices}) == 1
    assert torch.equal(share.gather(slices), tensor)
    assert sum(one.sum() for one in slices) == tensor.sum()  # nothing twice, and padding adds nothing


def test_a_bias_that_is_added_after_the_sum_is_on_one_rank_alone():
    decoder = whole("llama linear rope and biases")
    for name in ("layers.0.attention.output.bias", "layers.1.mlp.down.bias"):
        tensor = decoder.get_parameter(name)
        slices = [shard_param(decoder.spec, name, tensor, rank, 4) for rank in range(4)]
        assert torch.equal(slices[0], tensor)
        assert not any(one.any() for one in slices[1:])


def test_key_value_heads_are_repeated_where_ranks_are_more():
    spec = whole("qwen3").spec
    assert isinstance(spec.layers[0].mixer, AttentionSpec)
    small = shard_spec(spec, 4).layers[0].mixer
    assert isinstance(small, AttentionSpec)
    assert (small.num_heads, small.num_kv_heads) == (1, 1)
    tensor = whole("qwen3").get_parameter("layers.0.attention.qkv.weight")
    keys = [shard_param(spec, "layers.0.attention.qkv.weight", tensor, rank, 4)[16:32] for rank in range(4)]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[2], keys[3])
    assert not torch.equal(keys[1], keys[2])


def _spec(mixer) -> DecoderSpec:
    return replace(whole("qwen3").spec, layers=(LayerSpec(mixer=mixer, ffn=MlpSpec(size=5)),))


@pytest.mark.parametrize(
    ("spec", "world", "words"),
    [
        (
            _spec(AttentionSpec(num_heads=12, num_kv_heads=6, head_dim=4, rope=RopeSpec(theta=1e4))),
            4,
            "6 key-value heads",
        ),
        (
            _spec(AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=4, rope=RopeSpec(theta=1e4))),
            4,
            "6 attention heads",
        ),
        (
            _spec(MambaSpec(num_heads=4, head_dim=4, state_dim=6, groups=1, kernel=4, conv_bias=True, bias=False)),
            2,
            "1 groups in its Mamba-2 mixer",
        ),
        (
            HfAdapterSpec(
                **{name: getattr(whole("qwen3").spec, name) for name in DecoderSpec.__dataclass_fields__},
                architecture="OddForCausalLM",
                parameters=1,
                active=1,
            ),
            2,
            "OddForCausalLM is computed by transformers",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused_in_a_sentence(spec, world, words):
    with pytest.raises(UsageError, match=words):
        shard_spec(spec, world)


def test_one_rank_has_the_decoder_as_it_is():
    decoder = whole("qwen3 tied, every head its own")
    assert shard_spec(decoder.spec, 1) is decoder.spec
    for name, tensor in decoder.named_parameters():
        assert shard_param(decoder.spec, name, tensor, 0, 1) is tensor
