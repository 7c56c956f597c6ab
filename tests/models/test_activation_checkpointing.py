from dataclasses import replace

import pytest
import torch
from tests.models.oracle import hf_model, our_logits, tokens_of, twin
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.accounting.activations import activation_bytes
from miles.models.activation_checkpointing import _is_expensive, select_checkpoint_fn, set_recompute
from miles.models.decoder import Decoder
from miles.precision.formats import FORMATS, QuantizationSpec

LENGTHS = (40, 7, 23)
KINDS = ["llama 3.1", "qwen3", "gemma3", "gpt-oss", "qwen3 moe normalised", "deepseek v3"]
KINDS += ["hybrid qwen3 next", "hybrid nemotron h"]


class Allocated(TorchDispatchMode):
    """Every storage that operations made, and how many bytes of them are still there."""

    def __init__(self, decoder):
        super().__init__()
        self._weights = {p.untyped_storage()._cdata for p in decoder.parameters()}
        self._seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._weights:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live(self):
        return sum(size for reference, size in self._seen.values() if not reference.expired())


def trained(decoder: Decoder, how, layers=None):
    """The gradients of a step, and what was held between its forward and its backward."""
    again = select_checkpoint_fn(how)
    decoder.checkpoint_layers, decoder.recompute_num_layers = again is not None, layers
    decoder.checkpoint_fn = again or decoder.checkpoint_fn
    with Allocated(decoder) as memory:
        loss = our_logits(decoder, tokens_of(LENGTHS)).logsumexp(-1).sum()
    held = memory.live()
    loss.backward()
    found = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    return found, held


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_changes_no_bit_of_a_gradient_and_keeps_less(kind):
    decoder = twin(hf_model(kind))
    want, all_kept = trained(decoder, "none")
    some, products_kept = trained(decoder, "selective")
    full, inputs_kept = trained(decoder, "full")
    for name, gradient in want.items():
        assert torch.equal(some[name], gradient), name
        assert torch.equal(full[name], gradient), name
    assert inputs_kept < products_kept < 0.8 * all_kept


@pytest.mark.parametrize("kind", ["deepseek v3.2", "deepseek v4", "minimax-m3", "hybrid glm 5.3 flash", "hybrid qwen4"])
def test_a_selection_that_only_the_forward_pass_runs_displaces_no_saved_matmul(kind):
    decoder = twin(hf_model(kind))
    want, _ = trained(decoder, "none")
    found, _ = trained(decoder, "selective")
    assert all(torch.equal(found[name], gradient) for name, gradient in want.items())


def test_some_layers_alone_may_be_recomputed():
    decoder = twin(hf_model("qwen3", num_hidden_layers=4))
    want, most = trained(decoder, "none")
    held = [most]
    for layers in (1, 2, 4):
        found, kept = trained(decoder, "full", layers)
        assert all(torch.equal(found[name], gradient) for name, gradient in want.items())
        held.append(kept)
    assert held == sorted(held, reverse=True) and len(set(held)) == 4
    assert held[-1] == trained(decoder, "full")[1]


class Counted(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def test_products_and_attention_that_are_kept_do_not_run_again():
    decoder = twin(hf_model("qwen3"))
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    ran = {}
    for how in ("none", "selective", "full"):
        again = select_checkpoint_fn(how)
        decoder.checkpoint_layers, decoder.checkpoint_fn = again is not None, again or decoder.checkpoint_fn
        with Counted() as counted:
            our_logits(decoder, tokens_of([30, 30])).logsumexp(-1).sum().backward()
        ran[how] = {op: counted.counts[op] for op in ("aten.mm.default", attention, "aten.silu.default")}
        decoder.zero_grad()
    assert ran["selective"][attention] == ran["none"][attention] == 2
    assert ran["selective"]["aten.mm.default"] == ran["none"]["aten.mm.default"]
    assert ran["selective"]["aten.silu.default"] == 2 * ran["none"]["aten.silu.default"]
    assert ran["full"][attention] == 4
    # All of a layer's products but its last run again.
    assert ran["full"]["aten.mm.default"] == ran["none"]["aten.mm.default"] + 2 * 3


def test_a_checkpointed_layer_gives_what_the_layer_gives():
    weight = torch.randn(4, 4, requires_grad=True)

    def layer(x, y):
        return (x @ weight).relu() * y

    x = torch.randn(3, 4, requires_grad=True)
    for how in ("none", "selective", "full"):
        checkpoint_fn = select_checkpoint_fn(how)
        out = layer(x, 2.0) if checkpoint_fn is None else checkpoint_fn(layer, x, 2.0)
        assert torch.equal(out, layer(x, 2.0))
        want = torch.autograd.grad(layer(x, 2.0).sum(), (x, weight))
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), (x, weight)), want, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe normalised"])
def test_on_an_accelerator_less_is_kept_and_gradients_stay(kind):
    decoder = twin(hf_model(kind, hidden_size=256, intermediate_size=512), torch.bfloat16).cuda()
    tokens = torch.cat(tokens_of((200, 120, 64))).cuda()
    positions = torch.cat([torch.arange(n) for n in (200, 120, 64)]).cuda()
    held, found = [], []
    for how in ("none", "selective", "full"):
        set_recompute(decoder, how)
        before = torch.cuda.memory_allocated()
        hidden = decoder(tokens, positions, VarlenAttentionBackend((200, 120, 64), tokens.device))
        held.append(torch.cuda.memory_allocated() - before)
        hidden.float().square().mean().backward()
        found.append({name: p.grad.float().clone() for name, p in decoder.named_parameters() if p.grad is not None})
        decoder.zero_grad()
    assert held[2] < held[1] < held[0]
    for name, gradient in found[0].items():
        for other in found[1:]:
            assert (other[name] - gradient).abs().max() <= 0.02 * gradient.abs().max(), name


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantization_changes_what_recomputed_layers_keep_as_the_plan_counts(name, dtype):
    wide = twin(hf_model("qwen3", hidden_size=128, num_hidden_layers=6))

    def measure(quantization):
        """Bytes of matmul and attention outputs that are kept, and those that are counted."""
        spec = replace(wide.spec, quantization=quantization)
        decoder = Decoder(spec, device="cpu", dtype=dtype)
        decoder.load_state_dict(wide.state_dict())
        full, selective = (trained(decoder, how)[1] for how in ("full", "selective"))
        counted = [
            activation_bytes(spec, sum(LENGTHS), size=dtype.itemsize, fused=False, recompute=how)
            for how in ("selective", "full")
        ]
        return selective - full, counted[0] - counted[1]

    kept, counted = measure(None)
    quantized_kept, quantized_counted = measure(QuantizationSpec(format=FORMATS[name], packed=False))
    assert quantized_counted - counted == pytest.approx(quantized_kept - kept, abs=0.05 * kept)


def test_the_scaled_matmuls_of_torch_are_saved():
    for op in (torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_mm_v2.default):
        assert _is_expensive(str(op))
