"""A quantized model over ranks: the loss and gradients of one process, and the same packed weights."""

import numpy as np
import pytest
from tests.backends.fsdp.quantized_ranks import in_one_process, over_ranks
from tests.backends.fsdp.sharded_runs import decoder_of
from tests.models.oracle import KINDS
from tests.models.small_families.small import SMALL
from tests.pool import ranks

from miles.cluster.parallel_dims import ParallelDims
from miles.models.checkpoint import hf

LAYOUTS = {
    "fsdp": ParallelDims(world=2, shard=2),
    "tp": ParallelDims(world=2, tensor=2),
    "tp+sp": ParallelDims(world=2, tensor=2, sequence=True),
    "ep": ParallelDims(world=2, shard=2, expert=2),
}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}


def folder_of(kind, root):
    config = KINDS[kind].config(**(SMALL | KINDS[kind].own | SIZES)).to_dict()
    config |= {"architectures": [KINDS[kind].model.__name__]}
    hf.export(decoder_of(config), root / "model", config=config)
    return str(root / "model")


@pytest.mark.parametrize(
    ("kind", "name", "dtype", "layouts"),
    [
        ("qwen3", "int4_g32", "float32", ("fsdp", "tp", "tp+sp")),
        ("qwen3", "fp8", "bfloat16", ("fsdp",)),
        ("qwen3 moe", "int8_g32", "float32", ("tp", "ep")),
        ("qwen3 moe", "nvfp4", "float32", ("fsdp", "ep")),
    ],
)
def test_ranks_compute_what_one_process_computes_and_publish_the_same_bytes(kind, name, dtype, layouts, tmp_path):
    folder = folder_of(kind, tmp_path)
    wanted = in_one_process(folder, name, dtype)
    bound = 1e-4 if dtype == "float32" else 0.1
    found = ranks(2, over_ranks, folder, [LAYOUTS[each] for each in layouts], name, dtype)[0]
    for layout, step in zip(layouts, found, strict=True):
        assert step.digests == wanted.digests, layout
        assert step.loss == pytest.approx(wanted.loss, rel=bound), layout
        for param, grad in wanted.grads.items():
            apart = np.abs(step.grads[param] - grad).max() / max(np.abs(grad).max(), 1e-12)
            assert apart < bound, (layout, param)
