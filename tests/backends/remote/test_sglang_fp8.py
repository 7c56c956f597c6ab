"""FP8 weights of stock SGLang: what is checked before they are sent, and that a real server then has these bytes."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.backends.remote.harness import client_of
from tests.models.oracle import our_logits
from tests.server_api.live_servers import Wire, sglang
from tests.server_api.tiny import BLOCKS, make

from miles.backends.remote.client import RequestRejected
from miles.backends.remote.pool.engine_pool import EnginePool
from miles.backends.remote.sglang_flags import build_command
from miles.backends.remote.sglang_fp8 import find_shape_problem
from miles.backends.remote.transports.buckets import ShapeManifest, iter_hf_named, pack_bucket
from miles.backends.remote.transports.senders import (
    DiskTransport,
    DistributedTransport,
    HttpTransport,
    WeightTransport,
)
from miles.backends.remote.update_protocols import InPlaceUpdate
from miles.backends.remote.weight_update import RemoteWeightUpdate
from miles.cluster.executor import InlineExecutor
from miles.cluster.platform import detect_platform
from miles.core.types import Version
from miles.models.checkpoint import hf
from miles.models.checkpoint.convert import convert_checkpoint, plan_conversion
from miles.models.decoder import Decoder
from miles.models.packing import pack_params
from miles.models.resolve import resolve_spec
from miles.models.spec import DecoderSpec
from miles.precision.formats import FORMATS, QuantizationSpec

PROMPT = [5, 17, 300, 44, 8, 99, 120, 77, 31, 4, 6, 250, 9, 13, 2, 210]


class Model:
    """A tiny model in FP8: its wide checkpoint, its quantized one, and its packed tensors."""

    def __init__(self, root: Path, name: str, seed: int, **how: Any) -> None:
        experts = how.pop("experts", False)
        more = {"moe_intermediate_size": 128, "num_experts": 4} if experts else {}
        self.wide = make(root / name, seed, experts=experts, **BLOCKS, **more)
        quantization = QuantizationSpec(format=FORMATS["fp8"], packed=True, **how)
        self.spec: DecoderSpec = replace(resolve_spec(self.wide, "native"), quantization=quantization)
        self.quantized = root / f"{name}-fp8"
        plan = plan_conversion(self.wide, format=None, dtype=torch.bfloat16, quantization=quantization)
        convert_checkpoint(plan, self.quantized)

    def packed(self) -> dict[str, torch.Tensor]:
        params = dict(hf.load_slices(self.wide, rank=0, world=1, device="cpu", dtype=torch.float32))
        dtypes = dict(Decoder(self.spec, device="meta", dtype=torch.bfloat16).named_parameters())
        packed = pack_params(self.spec, params, torch.float32)
        return {name: tensor.to(dtypes[name].dtype) for name, tensor in packed.items()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Model:
    return Model(tmp_path_factory.mktemp("dense"), "a", 0)


# -- before anything is sent ----------------------------------------------------------------


def begin(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    client = cast(Any, SimpleNamespace(name="engine 0"))
    update = InPlaceUpdate(cast(Any, None), client, 1.0, model_path=str(folder), ranks=1)
    asyncio.run(update.begin(ShapeManifest(tensors)))


def test_fp8_weights_are_sent_to_servers_of_such_a_checkpoint_only(dense):
    sent = dict(iter_hf_named(dense.spec, dense.packed(), "checkpoint"))
    begin(dense.quantized, sent)
    with pytest.raises(RequestRejected, match=r"a, whose .*proj\.weight is wide, but is sent FP8 weights; start it on"):
        begin(dense.wide, sent)
    with pytest.raises(RequestRejected, match=r"a-fp8, whose .*proj\.weight is FP8, but is sent wide weights"):
        begin(dense.quantized, load_file(dense.wide / "model.safetensors"))
    more = replace(dense.spec, quantization=replace(dense.spec.quantization, layers_at_end=1))
    params = dict(hf.load_slices(dense.wide, rank=0, world=1, device="cpu", dtype=torch.float32))
    with pytest.raises(RequestRejected, match=r"whose model\.layers\.2\.\S+ is FP8, but is sent wide weights"):
        begin(dense.quantized, dict(iter_hf_named(more, pack_params(more, params, torch.float32), "checkpoint")))


def test_weights_packed_for_miles_serve_are_not_sent_to_sglang(dense):
    with pytest.raises(RequestRejected, match="as it is packed for miles serve; start the run with --rollout-backend"):
        begin(dense.quantized, dict(iter_hf_named(dense.spec, dense.packed())))


def test_every_tensor_of_a_bucket_begins_at_a_multiple_of_its_element_size():
    sizes = {"a": torch.float8_e4m3fn, "b": torch.float32, "c": torch.bfloat16, "d": torch.float32}
    bucket = pack_bucket([(name, torch.ones(3).to(dtype)) for name, dtype in sizes.items()])
    assert list(bucket.tensors) == ["b", "d", "c", "a"] and bucket.metadata["names"] == ["b", "d", "c", "a"]
    start = 0
    for tensor in bucket.tensors.values():
        assert torch.equal(bucket.flat[start : start + tensor.nbytes].view(tensor.dtype).float(), torch.ones(3))
        start += tensor.nbytes


@pytest.mark.parametrize(
    ("sizes", "ranks", "problem"),
    [
        ({}, 1, None),
        ({"head_dim": 32}, 1, "k_proj.weight has 64 rows, which are not whole blocks of 128 as SGLang fuses them"),
        ({"hidden_size": 192}, 1, "q_proj.weight has 192 input channels"),
        ({"head_dim": 128}, 2, "each of 2 GPUs would have 192 rows of model.layers.0.mlp.gate_proj.weight"),
        ({"head_dim": 128, "intermediate_size": 512}, 2, None),
        ({"head_dim": 64, "intermediate_size": 512}, 2, "64 rows of model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_shapes_that_sglang_cannot_hold_are_named(tmp_path, sizes, ranks, problem):
    made = make(tmp_path / "model", 0, **{**BLOCKS, **sizes})
    quantization = QuantizationSpec(format=FORMATS["fp8"], packed=True)
    found = find_shape_problem(replace(resolve_spec(made, "native"), quantization=quantization), ranks)
    assert found is None if problem is None else found is not None and problem in found


def test_the_command_line_has_the_kv_cache_and_the_kernels_unless_they_are_given():
    def command(*given: str) -> str:
        line = build_command(
            "python",
            "folder",
            given,
            device="cuda",
            dtype="bfloat16",
            kv_cache_dtype="fp8_e4m3",
            ranks=1,
            routed_experts=False,
            trust_remote_code=False,
            triton_fp8=True,
        )
        return " ".join(line)

    assert "--kv-cache-dtype fp8_e4m3 --fp8-gemm-backend triton --moe-runner-backend triton" in command()
    assert command("--fp8-gemm-backend", "cutlass").count("--fp8-gemm-backend") == 1


# -- a real server --------------------------------------------------------------------------


def score(wire: Wire) -> np.ndarray:
    sampling = {"max_new_tokens": 1, "temperature": 0}
    reply = wire.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
    return np.array([each[0] for each in reply["meta_info"]["input_token_logprobs"][1:]])


def score_here(model: Model) -> np.ndarray:
    """Our own decoder with the same packed tensors."""
    decoder, packed = Decoder(model.spec, device="cpu", dtype=torch.bfloat16), model.packed()
    tokens = torch.tensor(PROMPT)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(packed[name])
        logits = our_logits(decoder, [tokens])
    return logits[:-1].float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"layers_at_start": 1}, {"experts": True}, {"experts": True, "experts_only": True}], ids=str
)
def test_stock_sglang_has_the_bytes_that_it_is_sent(tmp_path, how):
    a, b = Model(tmp_path, "a", 0, **how), Model(tmp_path, "b", 1, **how)
    with sglang(a.quantized, tmp_path / "sglang.log", "--dtype", "bfloat16") as wire:
        loaded = {"a": score(wire)}
        wire.ok("/update_weights_from_disk", model_path=str(b.quantized))
        loaded["b"] = score(wire)
        assert np.abs(loaded["a"] - loaded["b"]).mean() > 0.1
        wire.ok("/weights_checker", action="reset_tensors")
        transports: dict[str, WeightTransport] = {
            "tensor": HttpTransport(),
            "distributed": DistributedTransport(detect_platform("cpu"), 60.0),
            "disk": DiskTransport(tmp_path / "weights", a.quantized),
        }
        for kind, transport in transports.items():
            for name, found in asyncio.run(publish(wire, a, b, transport)).items():
                # The server computes with the same parameters as after it has loaded the files.
                assert np.array_equal(found, loaded[name[0]]), (kind, name)
    # Random weights amplify the rounding of bfloat16; those of the other model are farther away by far.
    ours, other = (np.abs(loaded["a"] - score_here(model)).mean() for model in (a, b))
    assert ours < 0.2 * other


async def publish(wire: Wire, a: Model, b: Model, transport: WeightTransport) -> dict[str, np.ndarray]:
    """Log-probs after updates to ``a``, ``b`` and ``a`` again, in small buckets."""
    pool = EnginePool(["engine 0"], eos_token_ids=frozenset([2]))
    current = a.packed()
    sync = RemoteWeightUpdate(
        pool,
        weights=lambda: current,
        spec=a.spec,
        transport=transport,
        executor=InlineExecutor(),
        bucket_bytes=100_000,
        seconds=60.0,
        layout="checkpoint",
    )
    client = client_of(wire.url, "engine 0")
    found: dict[str, np.ndarray] = {}
    try:
        await sync.join(pool.slots[0], client)
        for number, (name, model) in enumerate((("a0", a), ("b1", b), ("a2", a))):
            current = model.packed()
            metrics = await sync.publish(Version(number=number))
            assert metrics["publish/bytes"] > 0
            found[name] = await asyncio.to_thread(score, wire)
    finally:
        await sync.close()
        await client.close()
    return found
