"""On an accelerator Megatron's models run as they are, with nothing of a test's put in their way."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.family_cases import family_samples, spec_of, write_family
from torch import distributed as dist

from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]


FAMILIES = ["gpt-oss", "gemma3", "minimax-m2", "ernie 4.5 moe", "glm 4.7 flash", "step 3.7", "gemma4 with experts"]
"""Of whose layers some modules are the decoder's."""


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3", *FAMILIES])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_a_step_on_the_card_is_the_embedded_trainers(tmp_path: Path, kind: str, dtype: torch.dtype, tolerance: float):
    from miles.backends.megatron.model import load_megatron_model
    from miles.backends.megatron.parallel_state import destroy_parallel_state

    folder, home = tmp_path / "model", torch.device("cuda", 0)
    if kind in FAMILIES:
        write_family(folder, kind)
        batch, has_experts = family_samples(kind), spec_of(kind).moe is not None
    else:
        cases.written(folder, kind)
        batch, has_experts = cases.samples(kind), kind in cases.ROUTED
    algo = {"use_rollout_routing_replay": True} if has_experts else {}
    own = LocalModel(hf.load(folder, device=home, dtype=dtype), config=read_config(folder))
    wanted = cases.stepped(own, batch, cases.SINGLE_RANK, algo)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = load_megatron_model(
            folder, spec_from_config(read_config(folder)), ParallelDims(), dtype=dtype, device=home
        )
        found = cases.stepped(model, batch, model.dp_group, algo)
    finally:
        destroy_parallel_state()
        dist.destroy_process_group()
    assert found["metrics"]["grad_norm"] == pytest.approx(wanted["metrics"]["grad_norm"], rel=tolerance)
    assert not cases.apart(found["after"], {n: p.float() for n, p in wanted["after"].items()}, tolerance)
