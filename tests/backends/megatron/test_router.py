"""Load balancing of routers on Megatron: gradients and biases against the formulas in plain torch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.test_model import DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, algo_of, layout
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import UsageError
from miles.core.types import Sample
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.train.batch_tensors import flatten_batch, pack_micro_batch

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

AUX = ("--moe-aux-loss-coeff", "0.5")
SEQ_AUX = ("--moe-router-load-balancing-type", "seq_aux_loss", *AUX)
BOTH = ("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss", "--moe-aux-loss-coeff", "0.5", "0.25")
Z = ("--moe-z-loss-coeff", "0.3")
AGAIN = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def balance_grads(
    folder: Path, batch: tuple[Sample, ...], *, aux: float = 0.0, seq_aux: float = 0.0, z: float = 0.0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The gradient of the losses in one process, and how often each expert is selected, [L, E]."""
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    model, moe = LocalModel(decoder, config=read_config(folder)), decoder.spec.moe
    assert moe is not None
    flat = flatten_batch([[s] for s in batch], lambda counts: np.ones(len(counts)))
    rows = pack_micro_batch(flat, range(len(batch)), device=model.device, replay=True)
    inputs: dict[Any, torch.Tensor] = {}
    all_layers: list[Any] = [decoder.layers[i].moe for i in decoder.spec.moe_layers]
    layers = [layer for layer in all_layers if layer.expert_table is None]
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.__setitem__(module, args[0]))

    def judge(_: int, output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = output.hidden_RD.sum() * 0
        for layer in layers:
            logits = layer.compute_router_logits(inputs[layer])
            total = total + z * logits.exp().sum(1).log().pow(2).mean()
            score = {"softmax": lambda x: x.softmax(1), "sigmoid": torch.sigmoid}
            scores = score.get(moe.score, lambda x: x.exp().add(1).log().sqrt())(logits)
            scores = scores / scores.sum(1, keepdim=True)
            count, start = len(scores), 0
            pieces = [(aux, slice(None), count)]
            for length in rows.lengths:
                pieces.append((seq_aux, slice(start, start + length), length))
                start += length
            for coeff, part, tokens in pieces:
                chosen = scores[part].topk(moe.experts_per_token).indices.flatten()
                share = torch.bincount(chosen, minlength=moe.num_experts) / len(chosen)
                formula = moe.num_experts * (share * scores[part].mean(0)).sum()
                total = total + coeff * formula * tokens / count
        return total, {}

    model.forward_backward([rows], judge)
    assert rows.replay_TLk is not None
    counts = [torch.bincount(x.flatten(), minlength=moe.num_experts) for x in rows.replay_TLk.long().unbind(1)]
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.parameters().items()}
    return grads, torch.stack(counts)


@pytest.mark.parametrize(
    ("case", "losses"),
    [
        (Case("qwen3_moe", {}, SEQ_AUX), {"seq_aux": 0.5}),
        (Case("qwen3_moe", {"shard": 2, "expert": 2}, (*SEQ_AUX, *Z)), {"seq_aux": 0.5, "z": 0.3}),
        (Case("qwen3_moe", {"context": 2}, (*SEQ_AUX, *DISTRIBUTED_OPTIMIZER)), {"seq_aux": 0.5}),
        (Case("qwen3_moe", {"tensor": 2, "sequence": True}, (*SEQ_AUX, *Z)), {"seq_aux": 0.5, "z": 0.3}),
        (Case("qwen3_moe", {"pipeline": 2}, (*Z, *INTERLEAVED)), {"z": 0.3}),
        (Case("qwen2_moe", {"pipeline": 2}, (*SEQ_AUX, *AGAIN)), {"seq_aux": 0.5}),
        (Case("deepseek_v3", {"tensor": 2, "sequence": True}, SEQ_AUX), {"seq_aux": 0.5}),
    ],
    ids=str,
)
def test_losses_of_the_router_add_their_gradient(tmp_path: Path, case: Case, losses: dict[str, float]):
    compare_grads(cases.written(tmp_path / "model", case.kind), case, losses, cases.samples(case.kind))


@pytest.mark.parametrize(
    ("case", "losses"),
    [
        (Case("qwen3_moe", {}, AUX), {"aux": 0.5}),
        (Case("qwen3_moe", {"context": 2}, AUX), {"aux": 0.5}),
        (Case("qwen3_moe", {"tensor": 2, "sequence": True}, BOTH), {"aux": 0.5, "seq_aux": 0.25}),
        (Case("deepseek_v3", {"pipeline": 2}, AUX), {"aux": 0.5}),
    ],
    ids=str,
)
def test_the_loss_over_a_micro_batch_adds_its_gradient(tmp_path: Path, case: Case, losses: dict[str, float]):
    one_micro_batch = tuple(sorted(cases.samples(case.kind), key=len)[:2])
    compare_grads(cases.written(tmp_path / "model", case.kind), case, losses, one_micro_batch)


def compare_grads(folder: Path, case: Case, losses: dict[str, float], batch: tuple[Sample, ...]) -> None:
    algo, where = {"use_rollout_routing_replay": True}, layout(case.sizes)
    own = cases.alone(folder, batch, algo)
    assert own["metrics"]["micro_batches"] == 1 or "aux" not in losses
    added, _ = balance_grads(folder, batch, **losses)
    wanted = {name: grad + added[name] for name, grad in own["grads"].items()}
    assert cases.apart(wanted, own["grads"], 0.01)  # they are seen
    for found in ranks(where.world, cases.shared, folder, where, case.flags, batch, algo, None):
        assert found["metrics"]["loss"] == pytest.approx(own["metrics"]["loss"], abs=1e-5)
        assert not cases.apart(found["grads"], wanted, 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case("deepseek_v3", {}),
        Case("deepseek_v3", {"tensor": 2, "sequence": True}),
        Case("deepseek_v3", {"pipeline": 2}, INTERLEAVED),
        Case("deepseek_v3", {"context": 2, "expert": 2}),
        Case("deepseek_v3", {"shard": 2}, (*DISTRIBUTED_OPTIMIZER, *AGAIN)),
    ],
    ids=str,
)
def test_the_bias_of_an_expert_follows_its_load(tmp_path: Path, case: Case):
    folder, batch, where = cases.written(tmp_path / "model", case.kind), cases.samples(case.kind), layout(case.sizes)
    own = cases.alone(folder, batch, algo_of(case.kind))
    _, counts = balance_grads(folder, batch)
    before = dict(hf.load(folder, device="cpu", dtype=torch.float32).named_parameters())
    flags = (*case.flags, "--moe-router-bias-update-rate", "0.25")
    names = [name for name in own["after"] if name.endswith(".moe.correction")]
    assert len(names) == len(counts) == 2
    for found in ranks(where.world, cases.shared, folder, where, flags, batch, algo_of(case.kind), None):
        for name, count in zip(names, counts.double(), strict=True):
            step = torch.where(count < count.mean(), 0.25, torch.where(count > count.mean(), -0.25, 0.0))
            assert step.abs().max() > 0
            assert torch.allclose(found["after"][name] - before[name], step.float(), atol=1e-6)
        rest = {name: value for name, value in found["after"].items() if name not in names}
        assert not cases.apart(rest, {name: own["after"][name] for name in rest}, 1e-4)


@pytest.mark.parametrize("flags", [(), DISTRIBUTED_OPTIMIZER], ids=["ours", "megatrons"])
def test_a_frozen_router_keeps_its_weight_and_the_rest_trains(tmp_path: Path, flags: tuple[str, ...]):
    folder, batch = cases.written(tmp_path / "model", "qwen3_moe"), cases.samples("qwen3_moe")
    own, where = cases.alone(folder, batch, algo_of("qwen3_moe")), layout({"pipeline": 2})
    before = dict(hf.load(folder, device="cpu", dtype=torch.float32).named_parameters())
    flags = (*flags, "--moe-router-freeze-gate")
    for found in ranks(2, cases.shared, folder, where, flags, batch, algo_of("qwen3_moe"), None):
        routers = [name for name in found["after"] if name.endswith(".moe.router.weight")]
        assert len(routers) == 4 and not found["grads"].keys() & set(routers)
        assert all(torch.equal(found["after"][name], before[name]) for name in routers)
        assert not cases.apart(found["grads"], {n: g for n, g in own["grads"].items() if n not in routers}, 1e-4)


@pytest.mark.parametrize(
    ("kind", "flags", "said"),
    [
        ("qwen3", {"moe_aux_loss_coeff": 0.1}, "has no routers"),
        ("qwen3_moe", {"moe_router_bias_update_rate": 0.1}, "does not have"),
        (
            "qwen3_moe",
            {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
            "global_aux_loss is not supported",
        ),
        ("qwen3_moe", {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn is not supported"),
        (
            "qwen3_moe",
            {"moe_aux_loss_coeff": 0.1, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
            "recompute-modules moe",
        ),
        (
            "qwen3_moe",
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1]},
            "one coefficient for each",
        ),
    ],
)
def test_what_cannot_be_balanced_is_named(kind: str, flags: dict[str, Any], said: str):
    from miles.backends.megatron.transformer_config import build_transformer_config

    spec = spec_from_config(cases.KINDS[kind])
    with pytest.raises(UsageError, match=said):
        build_transformer_config(spec, layout({}), flags, dtype=torch.float32, device=torch.device("cpu"))
