"""Tensor-parallel engine with packed weights: its ranks hold shards of the packed tensors and answer as one process."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from operator import and_, eq

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import ATTENTION, Tiny
from tests.backends.native.tp.test_runner import CPU, model, shared, swift  # noqa: F401
from torch import Tensor

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.tp import runner
from miles.backends.native.tp.worker import scatter_shards
from miles.cluster.executor import InlineExecutor
from miles.core.errors import SyncError, UsageError
from miles.core.types import Version
from miles.models.checkpoint.param_slices import param_shape
from miles.models.lora.layout import build_factor_map
from miles.models.packing import pack_params
from miles.models.parallel.tp_sharding import compute_tp_shards, shard_param, shard_spec
from miles.models.spec import AdapterSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.sync.manifest import build_manifest

KNOBS = {"kv_tokens": 512, "max_running": 8, "page_size": 8}
HEADS = replace(ATTENTION, head_dim=64)
DENSE = replace(Tiny.spec, hidden_size=128, layers=2 * (LayerSpec(mixer=HEADS, ffn=MlpSpec(size=256)),))
EXPERTS = MoeSpec(num_experts=4, experts_per_token=2, size=256, norm_topk_prob=True, shared=MlpSpec(size=256))
SPARSE = replace(DENSE, family="qwen3_moe", layers=2 * (LayerSpec(mixer=HEADS, ffn=EXPERTS),))
MODULES = tuple(f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "self_attn.v_proj"))
MODULES += tuple(f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down"))
ADAPTERS = AdapterSpec(rank=4, alpha=8.0, modules=MODULES)


def quantize(spec: DecoderSpec, name: str, world: int) -> DecoderSpec:
    return replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=True, tensor_parallel_size=world))


def packed_weights(spec: DecoderSpec, seed: int) -> dict[str, Tensor]:
    """The packed tensors of random weights, and random factors of its adapters."""
    wide = model(replace(spec, quantization=None, adapters=None), seed)
    tensors = pack_params(spec, {name: p.detach() for name, p in wide.named_parameters()}, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, slices in build_factor_map(spec).items():
        tensors[name] = 0.3 * torch.randn(param_shape(slices), generator=generator)
    return tensors


def publish(engine: NativeEngine, tensors: Mapping[str, Tensor], number: int) -> None:
    engine.begin(build_manifest(Version(number=number), tensors))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.verify()
    engine.commit()


class PackedPair:
    """An engine of two ranks and one of a single process, of the same values."""

    def __init__(self, engine: NativeEngine, spec: DecoderSpec) -> None:
        self.tiny, self.engine, self.spec = Tiny(), engine, spec
        assert spec.quantization is not None
        self.rounds_activations = spec.quantization.format.quantizes_activations
        self.alone_spec = replace(spec, quantization=replace(spec.quantization, tensor_parallel_size=1))
        self.alone = NativeEngine(
            self.alone_spec,
            device=CPU,
            dtype=torch.float32,
            config=NativeConfig(**{f"engine_{name}": value for name, value in KNOBS.items()}),
            run=InlineExecutor(),
            decode=None,
        )

    def publish(self, seed: int, number: int) -> None:
        publish(self.engine, packed_weights(self.spec, seed), number)
        publish(self.alone, packed_weights(self.alone_spec, seed), number)

    def compare(self, count: int = 4, new: int = 8) -> None:
        requests = self.tiny.mixed(count, new=new)
        many, one = (self.tiny.generate_all(engine, requests) for engine in (self.engine, self.alone))
        differences, total = list[np.ndarray](), 0
        for ours, theirs in zip(many, one, strict=True):
            same = list(accumulate(map(eq, self.tiny.tokens(ours), self.tiny.tokens(theirs)), and_))
            total += len(same)
            both = self.tiny.logprobs(ours)[: sum(same)], self.tiny.logprobs(theirs)[: sum(same)]
            differences.append(np.abs(both[0] - both[1]))
        found = np.concatenate(differences)
        assert np.median(found) < 1e-5
        # Another order of summation moves an activation to the next E4M3 value now and then, and then the output.
        if self.rounds_activations:
            assert len(found) > 0.9 * total and found.max() < 0.2
        else:
            assert len(found) == total and found.max() < 1e-4


CASES = {
    "fp8 dense": (DENSE, "fp8"),
    "int4 dense": (DENSE, "int4"),
    "fp8 experts": (SPARSE, "fp8"),
    "int4 with adapters": (replace(DENSE, adapters=ADAPTERS), "int4"),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> Iterator[PackedPair]:
    spec, name = CASES[request.param]
    spec = quantize(spec, name, 2)
    with shared(spec, 2, **KNOBS) as engine:
        yield PackedPair(engine, spec)


def test_tokens_and_logprobs_are_those_of_one_process_through_updates_and_sleep(pair: PackedPair):
    pair.publish(0, 0)
    pair.compare(6)
    pair.publish(1, 1)
    pair.compare()

    async def nap() -> None:
        await pair.engine.sleep()
        await pair.engine.wake()

    asyncio.run(nap())
    pair.compare(2)


def test_each_rank_has_a_shard_of_the_packed_bytes(pair: PackedPair):
    tensors = packed_weights(pair.spec, 2)
    publish(pair.engine, tensors, 2)
    held = pair.engine.weights()
    assert set(held) == set(tensors)
    for name, tensor in tensors.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    sizes = [sum(shard_param(pair.spec, n, t, rank, 2).nbytes for n, t in tensors.items()) for rank in (0, 1)]
    norms = sum(t.nbytes for n, t in tensors.items() if not compute_tp_shards(pair.spec)[n].segments)
    assert max(sizes) < 0.51 * sum(t.nbytes for t in tensors.values()) + norms


def test_a_packed_shard_that_did_not_arrive_as_it_left_is_refused(pair: PackedPair, monkeypatch: pytest.MonkeyPatch):
    pair.publish(0, 3)

    def damage(comm, shards, like):
        if like.element_size() == 1:
            shards = [shards[0], *(shard.view(torch.uint8).bitwise_xor(1).view(shard.dtype) for shard in shards[1:])]
        return scatter_shards(comm, shards, like)

    monkeypatch.setattr(runner, "scatter_shards", damage)
    with pytest.raises(SyncError, match=r"rank 1 received tensor layers\.0\.\S+ with a wrong digest"):
        publish(pair.engine, packed_weights(pair.spec, 4), 4)
    pair.engine.rollback()
    monkeypatch.undo()
    assert pair.engine.version is not None and pair.engine.version.number == 3
    pair.compare(2)


@pytest.mark.parametrize(
    ("spec", "name", "sentence"),
    [
        (DENSE, "fp8_channel", "fp8_channel has one scale for all inputs of a token"),
        (DENSE, "fp8_tensor", "fp8_tensor has one scale for all inputs of a token"),
        (
            replace(DENSE, layers=2 * (LayerSpec(mixer=HEADS, ffn=MlpSpec(size=192)),)),
            "fp8",
            "layers.0.mlp.down.weight has 192 input channels, which 2 tensor-parallel ranks cannot share in blocks of",
        ),
    ],
)
def test_a_format_that_ranks_cannot_share_is_refused_before_a_process_starts(spec, name, sentence):
    with pytest.raises(UsageError, match=sentence), shared(quantize(spec, name, 2), 2, **KNOBS):
        pass


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("fp8_channel", "fp8_tensor")])
def test_shards_of_every_other_format_are_the_parameters_of_a_rank(name):
    spec = quantize(SPARSE, name, 2)
    tensors = packed_weights(spec, 0)
    own = dict(Tiny().decoder(0, replace(shard_spec(spec, 2), quantization=None)).named_parameters())
    for tensor_name, tensor in tensors.items():
        whole = compute_tp_shards(spec)[tensor_name].gather(
            [shard_param(spec, tensor_name, tensor, rank, 2) for rank in (0, 1)]
        )
        assert torch.equal(whole.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), tensor_name
    assert own.keys() <= tensors.keys()
