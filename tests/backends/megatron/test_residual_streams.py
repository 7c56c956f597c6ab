"""Several residual streams, inputs of each layer, shared keys and sparse attention in Megatron's layers, against one
process of the FSDP backend.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.backends.megatron.test_decoder_modules import SELECTIVE, SPLIT, SPREAD, compare_step
from tests.backends.megatron.test_model import DISTRIBUTED_OPTIMIZER, Case

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

AGAIN = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
CASES = [
    Case("gemma3n", {}),
    Case("gemma3n", SPLIT),
    Case("gemma3n untied, another stream active", {"pipeline": 2}),
    Case("gemma4 with per-layer inputs", {"pipeline": 2}),
    Case("gemma4 with per-layer inputs and shared keys", SPLIT),
    Case("hybrid glm 5.3 flash", SPLIT),
    Case("deepseek v4", SPLIT),
    Case("minimax-m3", SPLIT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_that_of_one_process_and_weights_are_written_as_read(tmp_path: Path, case: Case):
    compare_step(tmp_path, case)
