"""Random weights: every kind of parameter of every family starts as something a model can be trained from."""

import pytest
import torch
from tests.models.each_kind import each_kind
from tests.models.oracle import KINDS, our_logits, tokens_of
from tests.models.small_families.small import SMALL

from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.layers.norm import RMSNorm


def spec(kind):
    wanted = KINDS[kind]
    config = wanted.config(**(SMALL | wanted.own)).to_dict()
    return spec_from_config(config | {"architectures": [wanted.model.__name__]})


@each_kind
def test_a_fresh_model_computes_and_knows_nothing_yet(kind):
    decoder = hf.init_random(spec(kind), seed=0, device="cpu", dtype=torch.float32)
    for module in decoder.modules():
        if isinstance(module, RMSNorm):
            assert torch.equal(module.scale(), torch.ones_like(module.weight)), "a norm only normalises"
    for name, parameter in decoder.named_parameters():
        assert parameter.isfinite().all(), name
        if name.endswith(("bias", "sinks", "correction")) and not name.endswith("dt_bias"):
            assert not parameter.any(), name
    with torch.no_grad():
        logits = our_logits(decoder, tokens_of([40, 7]))
    assert logits.isfinite().all() and logits.std() > 0
    surprise = torch.nn.functional.cross_entropy(logits, torch.cat(tokens_of([40, 7], seed=1)))
    assert abs(surprise - torch.log(torch.tensor(float(logits.shape[1])))) < 0.5


@pytest.mark.parametrize("kind", ["qwen3 moe", "deepseek v3"])
def test_weights_of_fewer_bits_are_the_same_weights_rounded(kind):
    wide, narrow = (hf.init_random(spec(kind), seed=3, device="cpu", dtype=d) for d in (torch.float32, torch.bfloat16))
    for (name, some), other in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(some.to(other.dtype), other), name
    made = Decoder(wide.spec, device="meta", dtype=torch.bfloat16)
    for other, wanted in zip(narrow.parameters(), made.parameters(), strict=True):
        assert (other.dtype, other.requires_grad) == (wanted.dtype, wanted.requires_grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_makes_no_difference():
    here, there = (hf.init_random(spec("qwen3 moe"), seed=3, device=d, dtype=torch.bfloat16) for d in ("cpu", "cuda"))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here.parameters(), there.parameters(), strict=True))
