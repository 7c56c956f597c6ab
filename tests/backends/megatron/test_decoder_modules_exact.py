"""The decoder's own modules in Megatron's layers with batch-invariant numerics: bitwise the log-probs of the engine."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.exact_ranks import exact_step, step_of
from tests.backends.megatron.family_cases import config_of, spec_of
from tests.backends.megatron.test_decoder_modules import SELECTIVE, SPLIT, SPREAD
from tests.backends.megatron.test_exact import check_parity, sample_from
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, Case, layout
from tests.parity.planes import TEMPERATURE, decoder_of
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.kernels.numerics import FAST
from miles.models.checkpoint import hf
from miles.train.dp_group import SINGLE_RANK

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

FIRST = ("--num-layers-in-first-pipeline-stage", "1")
CASES = [
    Case("gpt-oss", SPLIT),
    Case("gpt-oss", SPREAD, SELECTIVE),
    Case("glm-4.5 air, two shared", SPLIT),
    Case("minimax-m2", SPLIT),
    Case("gemma3", {"tensor": 2}, AGAIN),
    Case("gemma2", SPLIT, DISTRIBUTED_OPTIMIZER),
    Case("glm4", {"pipeline": 2}),
    Case("ernie 4.5 moe", SPLIT),
    Case("hunyuan", {"context": 2}),
    Case("hunyuan moe", SPLIT),
    Case("glm 4.7 flash", SPLIT),
    Case("mistral 4", SPREAD),
    Case("deepseek v2 in groups", SPLIT),
    Case("step 3.7", SPLIT),
    Case("llama 4", SPLIT),
    Case("gemma4", {"tensor": 2}),
    Case("gemma4 with experts", SPLIT),
    Case("inkling", {"context": 2, "expert": 2}, AGAIN),
    Case("inkling", SPLIT),
    Case("inkling whole", {"pipeline": 2}, FIRST),
    Case("gemma3n", SPLIT, AGAIN),
    Case("gemma4 with per-layer inputs and shared keys", {"tensor": 2}),
    Case("hybrid glm 5.3 flash", {"pipeline": 2}),
    Case("hybrid glm 5.3 flash shared choices, unbounded decay", {"pipeline": 2}, FIRST),
    Case("gemma3n", {"pipeline": 2}),
    Case("deepseek v4", SPLIT),
    Case("deepseek v4", {"context": 2, "expert": 2}),
    Case("minimax-m3", SPLIT),
    Case("minimax-m3", {"context": 2}, SELECTIVE),
    Case("hybrid qwen4", {"context": 2, "expert": 2}, AGAIN),
    Case("hybrid qwen4", SPLIT),
]
QUICK = [Case("gpt-oss", SPREAD, SELECTIVE), Case("minimax-m2", SPLIT), Case("gemma2", SPLIT, DISTRIBUTED_OPTIMIZER)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [pytest.param(case, torch.bfloat16, marks=() if case in QUICK else pytest.mark.extended) for case in CASES],
    ids=str,
)
def test_log_probs_are_the_engines_and_gradients_those_of_the_fsdp_trainer(
    tmp_path: Path, case: Case, dtype: torch.dtype
):
    decoder = decoder_of(spec_of(case.kind), dtype)
    hf.export(decoder, tmp_path, config=config_of(case.kind))
    samples = sample_from(decoder, case.sizes.get("tensor", 1))
    where = layout(case.sizes)
    found = ranks(where.world, exact_step, tmp_path, where, case.flags, samples, {}, dtype, TEMPERATURE)
    for each in found:
        check_parity(each["metrics"])
    if dtype == torch.float32:
        fast = decoder_of(decoder.spec, dtype, numerics=FAST)
        wanted = step_of(LocalModel(fast), samples, SINGLE_RANK, {}, TEMPERATURE)
        assert not cases.apart(found[0]["grads"], wanted["grads"], 1e-3)
