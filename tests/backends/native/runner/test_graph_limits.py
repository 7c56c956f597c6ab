"""Steps that run as CUDA graphs and steps that cannot: rows beyond the requests, contexts of torch attention.

Without a GPU: kernels run in Triton's interpreter, and CUDA graphs are stubs that call what was captured.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.kernels import interpreter  # noqa: F401
from tests.kernels.device import CARD, needs_triton
from tests.parity.planes import decoder_of, spec_of_kind

from miles.backends.native.runner import cuda_graph as module
from miles.backends.native.runner import model_runner, step_inputs
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import FAST

pytestmark = [needs_triton, pytest.mark.skipif(CARD, reason="a GPU is available: see test_cuda_graph.py")]

# One layer: interpreted kernels take their time.
DENSE = replace(Tiny.spec, layers=Tiny.spec.layers[:1])
LONG = SamplingParams(max_new_tokens=5, ignore_eos=True)


def test_steps_of_more_rows_than_requests_run_without_a_graph(recording):
    """Drafted tokens are verified in a row each, beside a part of a prompt, in an engine of two requests at once."""
    tiny = Tiny(1)
    spec = replace(DENSE, vocab_size=4, eos_token_ids=())
    rng = np.random.default_rng(0)
    short, *long = (rng.integers(0, 4, count).astype(np.int32) for count in (3, 20, 20))
    options = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 5, "speculative_adaptive": False}

    def generate():
        engine = tiny.engine(
            tiny.decoder(spec=spec, scale=6.0),
            page_size=4,
            max_running=2,
            prefill_chunk=4,
            prefill_delay_steps=0,
            **options,
        )
        epochs = [tiny.generate_all(engine, [(short, replace(LONG, max_new_tokens=9)), (each, LONG)]) for each in long]
        return [tiny.tokens(each) for answers in epochs for each in answers], engine.stats()["drafted_tokens"]

    shapes, choose_shape = [], step_inputs.PrefillInputs.choose_shape

    def note_shape(self, batch):
        shapes.append((len(batch.counts_B), choose_shape(self, batch)))
        return shapes[-1][1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_inputs.PrefillInputs, "choose_shape", note_shape)
        ours = generate()
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
        assert generate() == ours
    assert any(rows > 2 and shape is None for rows, shape in shapes) and any(shape for _, shape in shapes)


@pytest.mark.parametrize(
    "kind", ["deepseek v3.2", "minimax-m3", "deepseek v4", "inkling", "hybrid qwen4", "hybrid glm 5.3 flash"]
)
def test_decode_steps_with_torch_attention_are_replayed_for_padded_contexts(recording, kind, monkeypatch):
    """What indexers select, windows, compressed keys and position biases, over contexts of several sizes."""
    monkeypatch.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
    tiny, options = Tiny(1), {"page_size": 4, "max_running": 4, "prefill_chunk": 13, "kv_tokens": 400}
    model = decoder_of(spec_of_kind(kind), torch.float32, numerics=FAST)
    prompts = [np.arange(length, dtype=np.int32) * 7 % model.spec.vocab_size for length in (1, 6, 44)]
    requests = [(p, replace(LONG, seed=i, max_new_tokens=12 - 3 * i)) for i, p in enumerate(prompts)]
    expected = tiny.generate_all(tiny.engine(model, **options), requests)
    assert not recording
    monkeypatch.setattr(model_runner, "supports_torch_decode_graphs", lambda model, device, numerics: True)
    monkeypatch.setattr(module, "_MIN_CONTEXT", 8)
    engine = tiny.engine(model, **options)
    found = tiny.generate_all(engine, requests) + tiny.generate_all(engine, requests[:2])
    assert {key.context for key in recording} >= {8, 16, 48} and {key.has_prefixes for key in recording} == {False}
    for one, other in zip(found, [*expected, *expected[:2]], strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
        np.testing.assert_allclose(tiny.logprobs(one), tiny.logprobs(other), atol=1e-4)


def test_contexts_beyond_so_many_graphs_run_without_one(recording, monkeypatch):
    monkeypatch.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
    tiny, options = Tiny(1), {"page_size": 4, "max_running": 1, "kv_tokens": 400}
    model = decoder_of(spec_of_kind("minimax-m3"), torch.float32, numerics=FAST)
    requests = [(np.arange(6, dtype=np.int32) * 7 % model.spec.vocab_size, replace(LONG, max_new_tokens=30))]
    expected = tiny.generate_all(tiny.engine(model, **options), requests)
    monkeypatch.setattr(model_runner, "supports_torch_decode_graphs", lambda model, device, numerics: True)
    monkeypatch.setattr(module, "_MIN_CONTEXT", 8)
    monkeypatch.setattr(module, "_MAX_CONTEXT_GRAPHS", 1)
    engine = tiny.engine(model, **options)
    for _ in range(2):
        tiny.same(tiny.generate_all(engine, requests)[0], expected[0])
    assert {key.context for key in recording} == {8, 12} == {key.context for key in engine._runner._graphs._graphs}
