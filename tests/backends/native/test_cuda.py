"""The same engine on a CUDA device: whatever the kind of model, it writes what a full forward on the CPU says."""

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.models.oracle import KINDS, SMALL, hf_model, our_logits, twin

from miles.core.protocols import SamplingParams
from miles.models.decoder import Decoder

if not torch.cuda.is_available():  # without hundreds of tests that are collected to be skipped
    pytest.skip("needs a CUDA device", allow_module_level=True)

LENGTHS = (1, 21, 62)
SAMPLES = 3


@pytest.fixture
def tiny() -> Tiny:
    """Engines with a step in flight, as is usual on such a device."""
    return Tiny(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_a_full_forward_on_the_cpu(tiny, kind, dtype):
    decoder = twin(hf_model(kind))
    there = Decoder(decoder.spec, device="cuda", dtype=dtype)
    with torch.no_grad():
        for name, parameter in there.named_parameters():
            parameter.copy_(decoder.get_parameter(name))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, SMALL["vocab_size"], n).astype(np.int32) for n in LENGTHS]
    asked = [
        (prompt, SamplingParams(max_new_tokens=8, ignore_eos=True, seed=i))
        for prompt in prompts
        for i in range(SAMPLES)
    ]
    engine = tiny.engine(there, page_size=4, prefill_chunk=13, max_running=6, kv_tokens=800)
    answers = tiny.generate_all(engine, asked)
    whole = [torch.tensor([*prompt, *tiny.tokens(to)]) for (prompt, _), to in zip(asked, answers, strict=True)]
    with torch.no_grad():
        logprobs = our_logits(decoder, whole).log_softmax(-1).split([len(sequence) for sequence in whole])
    off = []
    for (prompt, _), to, sequence, own in zip(asked, answers, whole, logprobs, strict=True):
        wanted = own[len(prompt) - 1 : -1].gather(1, sequence[len(prompt) :, None]).squeeze(1).numpy()
        off.append(np.abs(tiny.logprobs(to) - wanted))
    if dtype == torch.float32:
        assert np.max(off) <= 1e-3
    # A token near the border between two experts may go to the other one in bfloat16: compare the bulk.
    assert np.median(off) <= (1e-4 if dtype == torch.float32 else 1e-1)
