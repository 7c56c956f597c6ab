"""On an accelerator Megatron's models run as they are, with nothing of a test's put in their way."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.backends.megatron import cases
from torch import distributed as dist

from miles.backends.fsdp.model import FsdpModel
from miles.cluster.layout import Layout
from miles.models import hub
from miles.models.families import spec_of
from miles.models.files import read_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_a_step_on_the_card_is_the_embedded_trainers(tmp_path: Path, kind: str, dtype: torch.dtype, tolerance: float):
    from miles.backends.megatron.layout import leave
    from miles.backends.megatron.model import open_megatron

    folder, batch, home = cases.written(tmp_path / "model", kind), cases.samples(kind), torch.device("cuda", 0)
    algo = {"use_rollout_routing_replay": True} if kind in cases.ROUTED else {}
    own = FsdpModel(hub.load(folder, device=home, dtype=dtype), config=read_config(folder))
    wanted = cases.stepped(own, batch, cases.ALONE, algo)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = open_megatron(folder, spec_of(read_config(folder)), Layout(), dtype=dtype, device=home)
        found = cases.stepped(model, batch, model.peers, algo)
    finally:
        leave()
        dist.destroy_process_group()
    assert found["metrics"]["grad_norm"] == pytest.approx(wanted["metrics"]["grad_norm"], rel=tolerance)
    assert not cases.apart(found["after"], {n: p.float() for n, p in wanted["after"].items()}, tolerance)
