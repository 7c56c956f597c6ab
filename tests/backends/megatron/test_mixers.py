"""Megatron's layers with the decoder's mixers against the FSDP backend's model in one process."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases
from tests.backends.megatron.exact_ranks import exact_step, exact_step_splitting, step_of
from tests.backends.megatron.test_decoder_modules import SELECTIVE, TOLERANCE
from tests.backends.megatron.test_exact import check_parity, sample_from, write_model
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, algo_of, layout
from tests.parity.planes import TEMPERATURE, decoder_of
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.core.token_fields import INDEXER_TOPK
from miles.core.types import Sample
from miles.kernels.numerics import FAST
from miles.models.activation_hooks import ActivationTrace, capture_activations, common_keys
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.models.indexer_layout import build_indexer_layout
from miles.train.batch_tensors import flatten_batch, pack_micro_batch
from miles.train.dp_group import SINGLE_RANK
from miles.train.grad_accumulation import LogprobReader

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

SEQUENCE = {"tensor": 2, "sequence": True}
CONTEXT = {"context": 2, "expert": 2}
FIRST = ("--num-layers-in-first-pipeline-stage", "1")

CASES = [
    Case("qwen3_next", {}),
    Case("qwen3_next", SEQUENCE),
    Case("qwen3_next", {"pipeline": 2}, FIRST),
    Case("qwen3_next", CONTEXT, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_5", {"tensor": 2}),
    Case("qwen3_5", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3_5_moe", {"shard": 2, "expert": 2}),
    Case("deepseek_v32", {}, AGAIN),
    Case("deepseek_v32", SEQUENCE, SELECTIVE),
    Case("deepseek_v32", CONTEXT, DISTRIBUTED_OPTIMIZER),
    Case("glm_moe_dsa", {"pipeline": 2}, AGAIN),
    Case("glm_moe_dsa shared", {"pipeline": 2}, AGAIN),
    Case("glm_moe_dsa shared", {"pipeline": 2}, INTERLEAVED),
    Case("glm_moe_dsa shared", SEQUENCE | {"pipeline": 2}),
    Case("glm_moe_dsa shared", {"pipeline": 2, "context": 2}),
    Case("nemotron_3_super", {}, SELECTIVE),
    Case("glm4_moe_lite", SEQUENCE),
    Case("mistral4", SEQUENCE),
    Case("nemotron_h", {"tensor": 2}),
    Case("nemotron_3", SEQUENCE),
    Case("nemotron_3", {"pipeline": 2}, DISTRIBUTED_OPTIMIZER),
    Case("nemotron_3_super", SEQUENCE),
    Case("nemotron_3_super", CONTEXT, DISTRIBUTED_OPTIMIZER),
    Case("kimi_linear", SEQUENCE),
    Case("kimi_linear", CONTEXT),
    Case("lfm2", {"tensor": 2}),
    Case("lfm2", SEQUENCE),
    Case("lfm2_moe", CONTEXT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_of_any_layout_is_the_step_of_one_process(tmp_path: Path, case: Case):
    folder, batch, algo = cases.written(tmp_path / "model", case.kind), cases.samples(case.kind), algo_of(case.kind)
    wanted = cases.alone(folder, batch, algo)
    where, tolerance = layout(case.sizes), TOLERANCE.get(case.kind, 1e-4)
    for found in ranks(where.world, cases.shared, folder, where, case.flags, batch, algo, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], tolerance)
        assert not cases.apart(found["after"], wanted["after"], tolerance)
        assert not [name for name in found["grads"] if ".indexer." in name]
    if case.kind in cases.ROUTED:
        assert wanted["metrics"]["routing_mismatch_ratio"] > 0.1


PASSED_ON = [
    Case("qwen3_next", CONTEXT, DISTRIBUTED_OPTIMIZER),
    Case("nemotron_3_super", CONTEXT, SELECTIVE),
    Case("kimi_linear", CONTEXT, AGAIN),
    Case("lfm2", {"context": 2}),
    Case("qwen3_5", {"context": 2, "tensor": 2, "sequence": True}, AGAIN),
    Case("nemotron_h", {"context": 4}),
]


@pytest.mark.parametrize("case", PASSED_ON, ids=str)
def test_context_ranks_that_pass_states_on_make_the_step_of_one_process(tmp_path: Path, case: Case):
    """Also over chunks shorter than a convolution reads."""
    folder, batch, algo = cases.written(tmp_path / "model", case.kind), cases.samples(case.kind), algo_of(case.kind)
    wanted = cases.alone(folder, batch, algo)
    where = layout(case.sizes)
    for found in ranks(where.world, cases.shared_splitting, folder, where, case.flags, batch, algo, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], TOLERANCE.get(case.kind, 1e-4))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3_next", SEQUENCE),
        ("deepseek_v32", {"pipeline": 2}),
        ("nemotron_3_super", {"pipeline": 2}),
        ("kimi_linear", SEQUENCE),
        ("lfm2", {"tensor": 2}),
    ],
    ids=str,
)
def test_what_was_read_is_written_bit_for_bit(tmp_path: Path, kind: str, sizes: dict[str, Any]):
    folder = cases.written(tmp_path / "model", kind)
    (tmp_path / "checkpoint").mkdir()
    ranks(2, cases.shared, folder, layout(sizes), (), cases.samples(kind), algo_of(kind), tmp_path)
    read, made = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "exported"))
    assert read.keys() == made.keys() and all(torch.equal(read[name], made[name]) for name in read)
    trained: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "checkpoint").glob("model*.safetensors"):
        trained |= load_file(path)
    unchanged = {name for name in read if torch.equal(read[name], trained[name])}
    frozen = {name for name in read if ".indexer." in name or name.endswith(("correction_bias", "expert_bias"))}
    assert {name for name in unchanged if "layernorm" not in name} == frozen  # some norms have next to no gradient


EXACT = [
    Case("qwen3_next", SEQUENCE),
    Case("qwen3_next", CONTEXT, AGAIN),
    Case("deepseek_v32", SEQUENCE, SELECTIVE),
    Case("glm_moe_dsa", CONTEXT),
    Case("glm_moe_dsa shared", {"pipeline": 2}),
    Case("nemotron_3_super", SEQUENCE),
    Case("nemotron_h", {"pipeline": 2}),
    Case("kimi_linear", SEQUENCE),
    Case("lfm2", {"tensor": 2}),
]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.extended)], ids=str)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_exact_log_probs_are_the_engines(tmp_path: Path, case: Case, dtype: torch.dtype):
    decoder = write_model(tmp_path, case.kind, dtype)
    samples = sample_from(decoder, case.sizes.get("tensor", 1))
    where = layout(case.sizes)
    found = ranks(where.world, exact_step, tmp_path, where, case.flags, samples, {}, dtype, TEMPERATURE)
    for each in found:
        check_parity(each["metrics"])
    if dtype == torch.float32:
        fast = decoder_of(decoder.spec, torch.float32, numerics=FAST)
        wanted = step_of(LocalModel(fast), samples, SINGLE_RANK, {}, TEMPERATURE)
        assert not cases.apart(found[0]["grads"], wanted["grads"], 1e-3)


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3_next", CONTEXT, AGAIN),
        Case("nemotron_3_super", CONTEXT, SELECTIVE),
        Case("kimi_linear", {"context": 2}),
        Case("nemotron_h", {"context": 4}, AGAIN),
    ],
    ids=str,
)
def test_exact_log_probs_of_context_ranks_that_pass_states_on_are_the_engines(tmp_path: Path, case: Case):
    decoder = write_model(tmp_path, case.kind, torch.float32)
    samples = sample_from(decoder)
    where = layout(case.sizes)
    given = (tmp_path, where, case.flags, samples, {}, torch.float32, TEMPERATURE)
    found = ranks(where.world, exact_step_splitting, *given)
    for each in found:
        check_parity(each["metrics"])
    fast = decoder_of(decoder.spec, torch.float32, numerics=FAST)
    wanted = step_of(LocalModel(fast), samples, SINGLE_RANK, {}, TEMPERATURE)
    assert not cases.apart(found[0]["grads"], wanted["grads"], 1e-3)


def recorded(kind: str, seed: int = 3) -> tuple[Sample, ...]:
    """Samples with selections that an engine is said to have made: any four of the tokens before each."""
    found, rng = cases.samples(kind), np.random.default_rng(seed)
    indexer = build_indexer_layout(spec_from_config(cases.KINDS[kind]))
    assert indexer is not None
    for s in found:
        rows = np.stack([indexer.unrecorded_row() for _ in range(len(s))])
        for place in range(indexer.count, len(s)):
            for layer in range(len(indexer.layers)):
                rows[place, layer] = np.sort(rng.permutation(place + 1)[: indexer.count])
        s.extras[INDEXER_TOPK] = rows  # type: ignore[index]
    return found


@pytest.mark.parametrize("sizes", [SEQUENCE, {"pipeline": 2}, CONTEXT], ids=str)
def test_selections_of_the_engine_are_replayed(tmp_path: Path, sizes: dict[str, Any]):
    folder, batch = cases.written(tmp_path / "model", "deepseek_v32"), recorded("deepseek_v32")
    algo = algo_of("deepseek_v32") | {"use_rollout_indexer_replay": True}
    wanted = cases.alone(folder, batch, algo)
    assert wanted["metrics"]["indexer_mismatch_ratio"] > 0.1
    for found in ranks(2, cases.shared, folder, layout(sizes), (), batch, algo, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)


@pytest.mark.parametrize(
    ("kind", "sizes", "modules"),
    [
        ("qwen3_next", SEQUENCE, "attn"),
        ("deepseek_v32", {"tensor": 2, "sequence": True}, "attn"),
        ("glm4_moe_lite", SEQUENCE, "attn"),
        ("nemotron_h", {"tensor": 2}, None),
        ("lfm2", {"pipeline": 2}, None),
    ],
    ids=str,
)
def test_a_step_of_adapters_is_the_step_of_one_process(
    tmp_path: Path, kind: str, sizes: dict[str, Any], modules: str | None
):
    folder, batch, algo = cases.written(tmp_path / "model", kind), cases.samples(kind), algo_of(kind)
    lora = cases.read_lora(folder, modules)
    wanted = cases.alone_adapted(folder, batch, algo, lora)
    for found in ranks(2, cases.shared_adapted, folder, layout(sizes), (), batch, algo, lora, None):
        assert found["metrics"]["grad_norm"] == pytest.approx(wanted["metrics"]["grad_norm"], rel=1e-4)
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


def trace_on_a_rank(rank: int, world: int, folder: Path, batch: tuple[Sample, ...]) -> Any:
    """The values of every operation of Megatron's layers."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.activation_hooks import capture_megatron_activations
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec, trace = spec_from_config(read_config(folder)), ActivationTrace()
        model = load_megatron_model(folder, spec, layout({}), dtype=torch.float32, frozen=True)
        try:
            (module,) = model.chunks().values()
            with capture_megatron_activations(module, spec, trace):
                LogprobReader(temperature=1.0, chunk=None).compute_frozen(model, [rows_of(batch)])
        finally:
            destroy_parallel_state()
        return trace.concatenate()


def rows_of(batch: tuple[Sample, ...]) -> Any:
    flat = flatten_batch([[s] for s in batch], lambda counts_N: np.ones(len(counts_N)))
    return pack_micro_batch(flat, range(len(batch)), device=torch.device("cpu"), replay=False, share=False)


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v32", "nemotron_3"])
def test_operations_are_recorded_under_the_decoders_names(tmp_path: Path, kind: str):
    folder, batch, trace = cases.written(tmp_path, kind), cases.samples(kind), ActivationTrace()
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    with capture_activations(decoder, trace):
        LogprobReader(temperature=1.0, chunk=None).compute_frozen(LocalModel(decoder), [rows_of(batch)])
    wanted = trace.concatenate()
    (found,) = ranks(1, trace_on_a_rank, folder, batch)
    assert {key for key in wanted if key[1] in ("output", "mlp", "residual", "attention")} <= found.keys()
    for key in common_keys(wanted, found):
        assert torch.allclose(found[key].double(), wanted[key].double(), atol=1e-5), key
