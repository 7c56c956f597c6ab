"""What a draft model is said to take, against real modules, a real optimizer and what autograd keeps."""

from pathlib import Path

import pytest
import torch
from tests.models.draft.mtp_checkpoints import make_reference, save_reference
from tests.train.small_trainer import DENSE

from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.accounting.draft import draft_activation_bytes, draft_optimizer_bytes, draft_weight_bytes
from miles.models.checkpoint import hf
from miles.models.draft.base import PolicyWeights
from miles.models.draft.checkpoint import init_eagle, load_mtp
from miles.models.draft.multi_step_attention import MultiStepAttention
from miles.models.draft.spec import build_eagle_spec
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig
from miles.train.draft_trainer import DraftTrainer

WIDE = DENSE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.mark.parametrize("name", ["deepseek v3", "glm-4.5", "mimo"])
def test_mtp_layers_have_as_many_bytes_as_counted(name: str, tmp_path: Path):
    save_reference(make_reference(name), tmp_path)
    policy = hf.load(tmp_path, device="cpu", dtype=torch.float32)
    draft = load_mtp(tmp_path, policy.spec, device="cpu", dtype=torch.float32)
    assert draft_weight_bytes(draft.spec, "float32") == sum(p.nbytes for p in draft.parameters())


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_and_its_optimizer_have_as_many_bytes_as_counted(dtype: str, moments: str):
    spec = build_eagle_spec(spec_from_config(WIDE))
    draft = init_eagle(spec, seed=0, device="cpu", dtype=getattr(torch, dtype))
    assert draft_weight_bytes(spec, dtype) == sum(p.nbytes for p in draft.parameters())
    trainer = DraftTrainer(draft, train=TrainConfig(optimizer_state_dtype=moments), temperature=1.0)
    for param in trainer._optimizer.trained_params():
        param.grad = torch.ones_like(param.parameter)
    trainer._optimizer.step()
    assert draft_optimizer_bytes(spec, dtype, moments) == trainer._optimizer.bytes


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_keep_about_what_they_are_said_to_keep(steps: int):
    policy = hf.init_random(spec_from_config(WIDE), seed=0, device="cpu", dtype=torch.float32)
    spec = build_eagle_spec(policy.spec)
    draft = init_eagle(spec, seed=0, device="cpu", dtype=torch.float32)
    draft.share(PolicyWeights(embed=lambda tokens: policy.embedding(tokens).detach(), head=policy.head))
    own = {p.untyped_storage().data_ptr() for p in (*draft.parameters(), *policy.parameters())}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    count = 60
    tokens, positions = torch.arange(count) % 31, torch.arange(count)
    hidden = torch.randn(count, spec.feature_size)
    attention = MultiStepAttention(VarlenAttentionBackend([count], "cpu"), [count])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for number in range(steps):
            hidden = draft(hidden, tokens, positions, attention, step=number)
            draft.head_input(hidden, step=number)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    options = {"longest": 0, "dtype": "float32", "fused": False, "gathered": False}
    counted = draft_activation_bytes(spec, count, steps, **options) - count * 31 * 4 * 4  # the logits
    assert counted == pytest.approx(kept, rel=0.15)
