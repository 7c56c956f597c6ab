"""Small models in folders, and the functions that test ranks run on them."""

import asyncio
import multiprocessing.process
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.backends.megatron import mixer_cases
from tests.models.parallel.split_scans import splitting_all
from tests.train.small_trainer import EPS, ragged, sample, worker
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_model import LoraModel, LoraReference, UnmergedLoraModel
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch, Sample
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.lora.adapters import LoraAdapters
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import flatten_batch, pack_micro_batch
from miles.train.dp_group import SINGLE_RANK
from miles.train.grad_accumulation import LogprobReader
from miles.train.optim.optimizer import Optimizer
from miles.train.policy_trainer import PolicyTrainer

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOLD = {"head_dim": 8, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 8, "n_shared_experts": 1},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "norm_topk_prob": True},
    **{"num_key_value_heads": 4, "routed_scaling_factor": 2.5, "tie_word_embeddings": False},
}
STRETCHED = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
VISION = {
    **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16},
    **{"window_size": 16, "fullatt_block_indexes": [1], "patch_size": 4, "spatial_merge_size": 2},
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}}


def _told(config: PretrainedConfig, name: str) -> dict[str, Any]:
    return config.to_dict() | {"architectures": [name]}


KINDS: dict[str, dict[str, Any]] = {
    "qwen3": _told(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True), "Qwen3ForCausalLM"),
    "qwen3 one key": _told(Qwen3Config(**(SIZES | {"num_key_value_heads": 1}), **TOLD), "Qwen3ForCausalLM"),
    "qwen3 untied": _told(Qwen3Config(**SIZES, **TOLD), "Qwen3ForCausalLM"),
    "qwen2": _told(Qwen2Config(**SIZES, tie_word_embeddings=False), "Qwen2ForCausalLM"),
    "llama": _told(
        LlamaConfig(**SIZES, rope_parameters=STRETCHED, attention_bias=True, mlp_bias=True), "LlamaForCausalLM"
    ),
    "qwen3_moe": _told(Qwen3MoeConfig(**SIZES, **TOLD, **EXPERTS, norm_topk_prob=True), "Qwen3MoeForCausalLM"),
    "qwen2_moe": _told(
        Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=8, decoder_sparse_step=2),
        "Qwen2MoeForCausalLM",
    ),
    "deepseek_v3": _told(DeepseekV3Config(**(SIZES | LATENT)), "DeepseekV3ForCausalLM"),
    "qwen2_5_vl": _told(
        Qwen2_5_VLConfig(text_config=SIZES | MROPE, vision_config=VISION, image_token_id=30, video_token_id=29),
        "Qwen2_5_VLForConditionalGeneration",
    ),
    **mixer_cases.KINDS,
}
ROUTED = {"qwen3_moe": (4, 4, 2), "qwen2_moe": (2, 4, 2), "deepseek_v3": (2, 8, 4), **mixer_cases.ROUTED}
"""Layers with experts, experts, and experts a token."""


def written(folder: Path, kind: str, seed: int = 0) -> Path:
    """A model with random weights, as Hugging Face has it."""
    config = KINDS[kind]
    decoder = hf.init_random(spec_from_config(config), seed=seed, device="cpu", dtype=torch.float32)
    torch.manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if "norm" in name or name.endswith(("bias", "correction")):  # ones and zeros would hide a mistake
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    hf.export(decoder, folder, config=config)
    return folder


def samples(kind: str, count: int = 6) -> tuple[Sample, ...]:
    """Ragged samples; of models with experts, with those an engine is said to have used."""
    found = ragged(count)
    if kind not in ROUTED:
        return found
    layers, experts, each = ROUTED[kind]
    rng = np.random.default_rng(7)
    for s in found:
        drawn = [[rng.permutation(experts)[:each] for _ in range(layers)] for _ in range(len(s))]
        s.extras["routed_experts"] = np.array(drawn, np.uint8)  # type: ignore[index]
    return found


# -- one step -------------------------------------------------------------------------------


def trainer_of(model: Any, algo: dict[str, Any], dp_group: Any, reference: Any = None, **train: Any) -> PolicyTrainer:
    # What decays or is clipped wrongly is seen.
    how = {"max_tokens_per_gpu": 16, "adam_eps": EPS, "lr": 1e-2, "weight_decay": 0.5, "clip_grad": 0.1} | train
    return worker(model, algo=algo, train=how, temperature=0.9, dp_group=dp_group, reference=reference)


def stepped(
    model: Any, batch: tuple[Sample, ...], dp_group: Any, algo: dict[str, Any], reference: Any = None, **train: Any
) -> dict[str, Any]:
    """A GRPO step: its metrics, every whole gradient as the optimizer was given it, and the weights it left."""
    trainer = trainer_of(model, algo, dp_group, reference, **train)
    grads = watch(model, trainer)
    report = asyncio.run(trainer.step(Batch(step=0, samples=batch, num_groups=1)))
    after = {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}
    return {"metrics": dict(report.metrics), "grads": grads, "after": after, "trainer": trainer}


def watch(model: Any, trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Where every whole gradient of the next step will be, as the optimizer was given it."""
    grads: dict[str, torch.Tensor] = {}
    optimizer: Any = trainer._optimizer
    step = optimizer.step

    def watched(lr: float | None = None) -> tuple[float, float]:
        if isinstance(optimizer, Optimizer):
            found = {w.name: w.grad for w in optimizer._params if w.grad is not None}
        else:
            found = optimizer.grads()
        grads.update({name: model.gather(name, grad).clone() for name, grad in found.items()})
        return step(lr)

    optimizer.step = watched
    return grads


def alone(folder: Path, batch: tuple[Sample, ...], algo: dict[str, Any]) -> dict[str, Any]:
    """The same step of the embedded trainer in one process: the oracle, itself held against transformers."""
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    return stepped(LocalModel(decoder, config=read_config(folder)), batch, SINGLE_RANK, algo)


def lora_of(spec: DecoderSpec, wanted: str | None = None, **form: Any) -> LoraSpec:
    """Adapters of the ``wanted`` modules, of a form such as DoRA."""
    return LoraSpec(rank=3, alpha=6.0, targets=select_targets(spec, wanted, None), **form)


def read_lora(folder: Path, wanted: str | None = None, **form: Any) -> LoraSpec:
    """The same for the model in a folder."""
    return lora_of(spec_from_config(read_config(folder)), wanted, **form)


def adapted(base: Any, folder: Path, lora: LoraSpec) -> LoraModel:
    """The model under adapters none of which is zero."""
    model = (UnmergedLoraModel if lora.unmerged else LoraModel)(base, lora, base=folder, seed=1)
    fill_factors(model.adapters(), seed=2)
    model.after_update()
    return model


def fill_factors(adapters: LoraAdapters, *, seed: int) -> None:
    """None of them is zero."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapters.parameters.items():
            start = parameter if "magnitude" in name else 0.0
            parameter.copy_(start + 0.1 * torch.randn(parameter.shape, generator=random))


def alone_adapted(
    folder: Path, batch: tuple[Sample, ...], algo: dict[str, Any], lora: LoraSpec, referred: bool = False
) -> dict[str, Any]:
    """The step of adapters in one process of the embedded trainer: the oracle, itself held against PEFT."""
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    model = adapted(LocalModel(decoder, config=read_config(folder), frozen=True), folder, lora)
    return stepped(model, batch, SINGLE_RANK, algo, LoraReference(model) if referred else None)


def load_frozen(
    folder: Path, layout: ParallelDims, flags: tuple[str, ...], lora: LoraSpec, dtype: torch.dtype = torch.float32
) -> Any:
    """The base of adapters on one of Megatron's ranks."""
    from miles.backends.megatron.model import load_megatron_model

    config = read_config(folder)
    how: dict[str, Any] = {"dtype": dtype, "flags": flags, "frozen": True, "config": config, "lora": lora}
    return load_megatron_model(folder, spec_from_config(config), layout, **how)


def shared_adapted(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[Sample, ...],
    algo: dict[str, Any],
    lora: LoraSpec,
    out: Path | None,
    referred: bool = False,
) -> dict[str, Any]:
    """The same on one of Megatron's ranks; after it a checkpoint is written."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        base = load_frozen(folder, layout, flags, lora)
        try:
            model = adapted(base, folder, lora)
            found = stepped(model, batch, base.dp_group, algo, LoraReference(model) if referred else None)
            trainer = found.pop("trainer")
            if out is not None:
                asyncio.run(trainer.save(out))
                base.sum_grad(torch.zeros(1))  # until the lead has written its files
                asyncio.run(trainer.load(out))
            return found
        finally:
            destroy_parallel_state()


def shared(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[Sample, ...],
    algo: dict[str, Any],
    out: Path | None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The step on one of Megatron's ranks; before it the model is exported, after it a checkpoint written."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        model = load_megatron_model(folder, spec_from_config(read_config(folder)), layout, dtype=dtype, flags=flags)
        try:
            if out is not None:
                model.save(out / "exported")
            found = stepped(model, batch, model.dp_group, algo)
            trainer = found.pop("trainer")
            if out is not None:
                asyncio.run(trainer.save(out / "checkpoint"))
            return found
        finally:
            destroy_parallel_state()


def shared_splitting(rank: int, world: int, *args: Any) -> dict[str, Any]:
    """``shared`` where recurrent layers pass states on, of sequences of any length."""
    with splitting_all():
        return shared(rank, world, *args)


def handed(rank: int, world: int, folder: Path, made: ParallelDims, read: ParallelDims, out: Path) -> None:
    """Weights that one layout writes in Megatron's own format, read by another and exported."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        # Megatron writes with processes of its own, which a borrowed rank must be allowed to have.
        multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        other, spec = written(out / f"other{rank}", "qwen3_moe", seed=1), spec_from_config(read_config(folder))
        try:
            checkpoint.save(load_megatron_model(folder, spec, made, dtype=torch.float32), out / "dist")
            destroy_parallel_state()
            model = load_megatron_model(other, spec, read, dtype=torch.float32)
            checkpoint.load(model, out / "dist")
            model.save(out / "exported")
        finally:
            destroy_parallel_state()


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> dict[str, float]:
    """Of tensors by name, how far apart those are that are too far, against how large they are."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    found = {n: float((a[n] - b[n]).abs().max() / (b[n].abs().max() + 1e-6)) for n in a}
    return {n: d for n, d in found.items() if not d < tolerance}


def unlike(a: dict[str, float], b: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Metrics that differ; how many micro-batches there are may."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    far = {n for n in a if abs(a[n] - b[n]) > 1e-5 * max(1.0, abs(b[n])) and n != "micro_batches"}
    return {n: (a[n], b[n]) for n in far}


# -- reading --------------------------------------------------------------------------------


def together(count: int = 4, begin: int = 24) -> tuple[Sample, ...]:
    """Samples of one prompt, which begin alike."""
    found = tuple(sample(np.random.default_rng(i), prompt=begin, reply=3 + i, trajectory=i) for i in range(count))
    for s in found:
        s.tokens[:begin] = found[0].tokens[:begin]
    return found


def logprobs_of(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    batch: tuple[Sample, ...],
    dtype: torch.dtype,
    share: bool,
    flags: tuple[str, ...] = (),
) -> torch.Tensor:
    """The log-probs of all trained tokens, sample after sample, of a frozen model of Megatron's."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec = spec_from_config(read_config(folder))
        model = load_megatron_model(folder, spec, layout, dtype=dtype, flags=flags, frozen=True)
        try:
            flat = flatten_batch([[s] for s in batch], lambda counts: np.ones(len(counts)))
            rows = pack_micro_batch(flat, range(len(batch)), device=model.device, replay=False, share=share)
            assert bool(rows.tree_nodes) is share
            return LogprobReader(temperature=1.0, chunk=None).compute_frozen(model, [rows])[0]
        finally:
            destroy_parallel_state()


@torch.no_grad()
def oracle_of(folder: Path, batch: tuple[Sample, ...]) -> torch.Tensor:
    """The same of transformers, a sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    parts: list[torch.Tensor] = []
    for s in batch:
        tokens, at = torch.from_numpy(s.tokens.astype(np.int64)), torch.from_numpy(np.flatnonzero(s.mask))
        logp = F.log_softmax(model(tokens[None]).logits[0], -1)
        parts.append(logp[at - 1].gather(1, tokens[at][:, None])[:, 0])
    return torch.cat(parts)


# -- many steps -----------------------------------------------------------------------------

PROMPTS, TRIES, LENGTH, WANTED = 4, 8, 4, 11


@torch.no_grad()
def drawn(decoder: Decoder, seed: int) -> tuple[list[Sample], float]:
    """Samples of the decoder's own, rewarded for how often they say ``WANTED``, and how often that was."""
    noise = torch.Generator().manual_seed(seed)
    count = PROMPTS * TRIES
    tokens = torch.arange(PROMPTS).repeat_interleave(TRIES)[:, None] + torch.tensor([[3, 5]])
    said = torch.zeros(count, 0)
    for _ in range(LENGTH):
        size = tokens.shape[1]
        registry = torch.arange(size).repeat(count)
        hidden = decoder(tokens.flatten(), registry, VarlenAttentionBackend([size] * count, "cpu")).view(
            count, size, -1
        )
        logp = F.log_softmax(hidden[:, -1] @ decoder.head().T, -1)
        reported = torch.multinomial(logp.exp(), 1, generator=noise)
        tokens, said = torch.cat((tokens, reported), 1), torch.cat((said, logp.gather(1, reported)), 1)
    reward = (tokens[:, 2:] == WANTED).float().mean(1)
    worth = reward.view(PROMPTS, TRIES)
    worth = ((worth - worth.mean(1, keepdim=True)) / (worth.std(1, keepdim=True) + 1e-6)).flatten()
    out: list[Sample] = []
    for i in range(count):
        made = sample(np.random.default_rng(0), prompt=2, reply=LENGTH, advantage=float(worth[i]), trajectory=i)
        made.tokens[:] = tokens[i].numpy()
        made.logprobs[2:] = said[i].numpy()
        out.append(made)
    return out, float(reward.mean())


def learnt(model: Any, spec: Any, dp_group: Any, steps: int) -> list[float]:
    """The rewards of a short run."""
    how = {"max_tokens_per_gpu": 64, "lr": 2e-2, "adam_eps": 1e-8, "weight_decay": 0.0}
    trainer = worker(model, train=how, updates=steps, dp_group=dp_group)
    rewards: list[float] = []
    for number in range(steps):
        decoder = Decoder(spec, device="meta", dtype=torch.float32)
        whole = {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}
        decoder.load_state_dict(whole, assign=True)
        batch, reward = drawn(decoder, number)
        for s in batch:
            s.versions[2:] = number
        asyncio.run(trainer.step(Batch(step=number, samples=tuple(batch), num_groups=PROMPTS)))
        rewards.append(reward)
    return rewards


def learnt_shared(rank: int, world: int, folder: Path, layout: ParallelDims, steps: int) -> list[float]:
    """The run on one of Megatron's ranks."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec = spec_from_config(read_config(folder))
        model = load_megatron_model(folder, spec, layout, dtype=torch.float32)
        try:
            return learnt(model, spec, model.dp_group, steps)
        finally:
            destroy_parallel_state()
