"""The transformers adapter against the plain transformers module with the same weights."""

import asyncio
import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.hf_adapter_kinds import EXPERTS, KINDS, LENGTHS, made
from tests.models.oracle import hf_logits, positions_of, relative, tokens_of
from transformers import AutoModelForCausalLM

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.errors import CheckpointError, UsageError
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.numerics import FAST
from miles.models.accounting.params import (
    active_parameter_count,
    forward_flops_per_token,
    kv_bytes_per_token,
    parameter_count,
)
from miles.models.hf_adapter import checkpoint
from miles.models.resolve import resolve_spec
from miles.sync.manifest import build_manifest


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each kind, saved once."""
    root = tmp_path_factory.mktemp("foreign")
    for number, (name, own) in enumerate(KINDS.values()):
        made(name, **own).save_pretrained(root / str(number))
    return {kind: root / str(number) for number, kind in enumerate(KINDS)}


def theirs(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def ours(folder, dtype=torch.float32, device="cpu"):
    return checkpoint.load(folder, device=device, dtype=dtype)


def hidden(decoder, sequences):
    lengths, device = [len(tokens) for tokens in sequences], decoder.head().device
    attend = VarlenAttentionBackend(lengths, device)
    return decoder(torch.cat(sequences).to(device), positions_of(lengths).to(device), attend)


def packed(decoder, sequences):
    return compute_logits(
        hidden(decoder, sequences), decoder.head(), decoder.spec.logit_softcap, numerics=decoder.numerics
    )


# -- training -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_of_a_packed_batch_are_those_of_the_plain_module(folders, kind):
    decoder, reference = ours(folders[kind]), theirs(folders[kind])
    sequences = tokens_of(LENGTHS, 97)
    weights = torch.randn(sum(LENGTHS), 97, generator=torch.Generator().manual_seed(1))
    mine, wanted = packed(decoder, sequences), hf_logits(reference, sequences)
    assert relative(mine, wanted) < 1e-4
    (mine * weights).sum().backward()
    (wanted * weights).sum().backward()
    found = dict(decoder.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            assert found[name].grad is None
        else:
            assert relative(found[name].grad, parameter.grad) < 1e-3, name


@pytest.mark.parametrize("kind", ["experts", "windows, norms after each part and over all heads"])
def test_layers_that_run_again_in_backward_look_at_their_own_batch(folders, kind):
    plain, again = ours(folders[kind]), ours(folders[kind])
    again.checkpoint_layers = True
    first, second = tokens_of(LENGTHS, 97), tokens_of((5, 31), 97, seed=1)
    for decoder in (plain, again):
        one, other = packed(decoder, first).square().sum(), packed(decoder, second).square().sum()
        one.backward()  # after another batch has gone through
        other.backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        assert a.grad is None or relative(b.grad, a.grad) < 1e-5, name


def test_two_models_in_one_process_never_meet(folders):
    kind, other = "experts", "bounded logits"
    one, two = ours(folders[kind]), ours(folders[other])
    sequences = tokens_of(LENGTHS, 97)
    with torch.no_grad():
        before = packed(one, sequences)
        assert relative(packed(two, sequences), hf_logits(theirs(folders[other]), sequences)) < 1e-4
        assert torch.equal(packed(one, sequences), before)


def test_dropout_is_never_on(tmp_path):
    made("Starcoder2", attention_dropout=0.5, residual_dropout=0.5, embedding_dropout=0.5).save_pretrained(tmp_path)
    decoder = ours(tmp_path)
    sequences = tokens_of(LENGTHS, 97)
    assert torch.equal(packed(decoder, sequences), packed(decoder, sequences))


@pytest.mark.parametrize("kind", ["experts", "sinks", "factors everywhere"])
def test_half_precision_is_held_and_near(folders, kind):
    decoder, reference = ours(folders[kind], torch.bfloat16), theirs(folders[kind])
    assert decoder.head().dtype == torch.bfloat16
    sequences = tokens_of(LENGTHS, 97)
    with torch.no_grad():
        off = (packed(decoder, sequences) - hf_logits(reference, sequences)).abs().amax(-1)
    assert off.median() / hf_logits(reference, sequences).abs().max() < 5e-2


# -- sampling -------------------------------------------------------------------------------


def engine_of(decoder, **knobs):
    config = NativeConfig(**{f"engine_{name}": value for name, value in knobs.items()})
    held = {"device": decoder.head().device, "dtype": decoder.head().dtype}
    engine = NativeEngine(
        decoder.spec, **held, config=config, run=InlineExecutor(), decode=None, model=decoder.empty_copy()
    )
    tensors = {name: p.detach() for name, p in decoder.named_parameters()}
    engine.begin(build_manifest(Version(), tensors))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.commit()
    return engine


def answered(engine):
    """Prompts of several lengths, two of them alike at the start, and what the engine says to each."""
    prompts = [tokens.numpy().astype(np.int32) for tokens in tokens_of((5, 30, 17, 30), 97, seed=3)]
    prompts[3][:20] = prompts[1][:20]

    async def everyone():
        how = [SamplingParams(max_new_tokens=24, seed=seed, ignore_eos=True) for seed in range(len(prompts))]
        return await asyncio.gather(*map(engine.generate, prompts, how))

    for prompt, answer in zip(prompts, asyncio.run(everyone()), strict=True):
        new = np.concatenate([span.tokens for span in answer.spans])
        said = np.concatenate([span.logprobs for span in answer.spans])
        yield len(prompt), torch.from_numpy(np.concatenate((prompt, new)).astype(np.int64)), said


def log_probs(logits, tokens, start):
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, tokens[start:, None].to(logits.device)).squeeze(1).cpu()


@pytest.mark.parametrize("kind", KINDS)
def test_the_engines_log_probs_are_transformers_own(folders, kind):
    engine = engine_of(ours(folders[kind]), page_size=4, prefill_chunk=11, kv_tokens=600)
    reference = theirs(folders[kind])
    for start, whole, said in answered(engine):
        with torch.no_grad():
            wanted = log_probs(reference(whole[None]).logits[0], whole, start)
        np.testing.assert_allclose(said, wanted.numpy(), atol=2e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_both_planes_agree_on_a_cuda_device(folders, kind, dtype):
    decoder, reference = ours(folders[kind], dtype, "cuda"), theirs(folders[kind])
    sequences = tokens_of(LENGTHS, 97)
    with torch.no_grad():
        wanted = hf_logits(reference, sequences)
        off = (packed(decoder, sequences).cpu() - wanted).abs().amax(-1) / wanted.abs().max()
    assert off.max() < 1e-4 if dtype == torch.float32 else off.median() < 5e-2
    hidden(decoder, sequences).float().square().mean().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for _, p in decoder.named_parameters())
    for start, whole, said in answered(engine_of(decoder, page_size=4, prefill_chunk=11, kv_tokens=600)):
        with torch.no_grad():
            mine = log_probs(packed(decoder, [whole]), whole, start)
        gap = (torch.from_numpy(said) - mine).abs()
        assert gap.max() < 2e-4 if dtype == torch.float32 else gap.median() < 5e-2


def test_an_engine_computes_with_the_trainers_own_storage(folders):
    decoder = ours(folders["a buffer that steers the router"])
    twin = decoder.empty_copy()
    assert all(p.is_meta for p in twin.module.parameters())
    engine = engine_of(decoder)
    held = dict(engine._runner.decoder.named_parameters())
    live = dict(decoder.named_parameters())
    assert any(name.endswith("e_score_correction_bias") for name in live)
    assert held.keys() == live.keys()
    assert all(held[name].data_ptr() == live[name].data_ptr() for name in live)
    assert engine._runner.decoder.head().data_ptr() == decoder.head().data_ptr()


def test_an_engine_that_sleeps_holds_no_cache(folders):
    engine = engine_of(ours(folders["experts"]), kv_tokens=600)
    assert list(answered(engine))
    cache = weakref.ref(engine._runner._cache)
    asyncio.run(engine.sleep())
    gc.collect()
    assert cache() is None


def test_a_tied_head_follows_its_embedding_into_the_engine(tmp_path):
    made("Granite", tie_word_embeddings=True).save_pretrained(tmp_path)
    decoder = ours(tmp_path)
    assert "lm_head.weight" not in dict(decoder.named_parameters())
    engine = engine_of(decoder)
    assert engine._runner.decoder.head().data_ptr() == decoder.head().data_ptr()


# -- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_reloads_in_transformers_to_the_bit(folders, kind, tmp_path):
    decoder = ours(folders[kind])
    with torch.no_grad():
        for parameter in decoder.module.parameters():
            parameter.mul_(1.5)
    checkpoint.export(decoder, tmp_path, like=folders[kind])
    again = theirs(tmp_path)
    live = decoder.module.state_dict()
    assert live.keys() == again.state_dict().keys()
    assert all(torch.equal(live[name], tensor) for name, tensor in again.state_dict().items())
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[kind], tmp_path))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == again.config.architectures
    assert not list(tmp_path.glob(".*"))


CODE = """
from transformers import Olmo2Config, Olmo2ForCausalLM


class OddConfig(Olmo2Config):
    model_type = "odd"


class OddForCausalLM(Olmo2ForCausalLM):
    config_class = OddConfig
"""


def test_code_that_came_with_a_model_runs_where_it_is_trusted_and_is_saved_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    source, saved = tmp_path / "source", tmp_path / "saved"
    made("Olmo2").save_pretrained(source)
    own = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    rewritten(source, source, model_type="odd", architectures=["OddForCausalLM"], auto_map=own)
    (source / "odd.py").write_text(CODE)
    with pytest.raises(UsageError, match="allow it with --trust-remote-code"):
        ours(source)
    trusted = {"device": "cpu", "dtype": torch.float32, "trust_remote_code": True}
    decoder = checkpoint.load(source, **trusted)
    checkpoint.export(decoder, saved, like=source)
    again = checkpoint.load(saved, **trusted)
    assert type(again.module).__name__ == "OddForCausalLM"
    found = checkpoint.tensors(saved, like=decoder, dtype=torch.float32)
    assert all(torch.equal(found[name], p) for name, p in decoder.named_parameters())


def test_the_spec_counts_what_the_files_hold(folders):
    spec = resolve_spec(folders["experts"], "transformers")
    held = theirs(folders["experts"])
    total = sum(p.numel() for p in held.parameters())
    experts = sum(p.numel() for name, p in held.named_parameters() if ".experts." in name)
    assert parameter_count(spec) == total and active_parameter_count(spec) == total - experts // 2
    assert kv_bytes_per_token(spec, "float32", FAST) == 4 * 2 * 2 * 2 * 8
    assert spec.eos_token_ids == (1,) and spec.max_positions == 128 and spec.moe is None and not spec.recurrent
    assert forward_flops_per_token(spec) == 2 * (active_parameter_count(spec) - 97 * 32)


def test_loading_completes_the_spec(folders):
    spec = ours(folders["windows, norms after each part and over all heads"]).spec
    assert [layer.mixer.window for layer in spec.layers] == [9, None, 9]
    assert ours(folders["factors everywhere"]).spec.hidden_scale == pytest.approx(1 / 3)
    assert ours(folders["bounded logits"]).spec.logit_softcap == 15.0
    assert all(layer.mixer.sinks for layer in ours(folders["sinks"]).spec.layers)


# -- refusals -------------------------------------------------------------------------------

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
}
UNFIT = {
    "a convolution over tokens": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "more than attention"),
    "a delta network": ("Qwen3Next", EXPERTS | DELTA, "more than attention"),
    "no attention at all": ("Mamba", {}, "does not compute attention through"),
    "attention of its own": ("Falcon", {}, "does not compute attention through"),
    "a bias in the head": ("Phi", {}, "its output head has a bias"),
    "two attentions a layer": ("DiffLlama", {}, "called more than once"),
    "a mask made of values": ("Doge", {"head_dim": 8}, "running it on packed tokens fails"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", UNFIT)
def test_what_cannot_be_held_is_refused_in_a_sentence(what, dtype, tmp_path):
    name, own, why = UNFIT[what]
    made(name, **own).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=why) as raised:
        ours(tmp_path, dtype)
    assert f"{name}ForCausalLM" in str(raised.value) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda held: held.pop("model.norm.weight"), "model.norm.weight is missing from"),
        (lambda held: held.update(spare=torch.zeros(2)), "spare belongs to no part of the model in"),
        (lambda held: held.update({"model.norm.weight": torch.zeros(7)}), "model.norm.weight has another shape than"),
    ],
)
def test_weights_that_transformers_would_only_warn_of_are_refused(folders, tmp_path, change, why):
    source = folders["part of a head turns"]
    held = load_file(source / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=why):
        ours(tmp_path)


def rewritten(source: Path, folder: Path, **changes) -> Path:
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return folder


def test_positions_end_where_frequencies_begin_to_depend_on_the_batch(folders, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = rewritten(folders["part of a head turns"], tmp_path, rope_parameters=rope)
    assert resolve_spec(folder, "transformers").max_positions == 32


def test_quantised_weights_are_refused(folders, tmp_path):
    folder = rewritten(folders["experts"], tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UsageError, match="quantized"):
        resolve_spec(folder, "transformers")


def test_an_architecture_without_a_spec_is_refused_with_the_way_out(folders, tmp_path):
    folder = folders["factors everywhere"]
    with pytest.raises(UsageError, match=r"GraniteForCausalLM.*--model-impl transformers runs"):
        resolve_spec(folder, "auto")
    with pytest.raises(UsageError) as raised:
        resolve_spec(folder, "native")
    assert "--model-impl" not in str(raised.value)
    unheard = rewritten(folder, tmp_path, architectures=["OddForCausalLM"], model_type="odd")
    with pytest.raises(UsageError, match=r"OddForCausalLM.*does not support it either"):
        resolve_spec(unheard, "auto")
    own = rewritten(
        folder, tmp_path, architectures=["OddForCausalLM"], model_type="odd", auto_map={"AutoConfig": "x.y"}
    )
    with pytest.raises(UsageError, match=r"with --trust-remote-code, --model-impl transformers"):
        resolve_spec(own, "auto")
