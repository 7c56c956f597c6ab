"""Small models of the families whose layers are partly the decoder's own modules under Megatron, and their samples."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.models.oracle import KINDS
from tests.models.small_families.small import SMALL
from tests.train.small_trainer import ragged

from miles.core.token_fields import INDEXER_TOPK
from miles.core.types import Sample
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.indexer_layout import build_indexer_layout
from miles.models.spec import DecoderSpec

# Windows, chunks, selections and steps of temperature shorter than the samples; sizes that two ranks can share.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek v3.2": {"index_topk": 4},
    "deepseek v3.2 with biases": {"index_topk": 4},
    "glm 5": {"index_topk": 4},
    "glm 5 shared choices": {"index_topk": 4},
    "glm 5 a choice every other layer": {"index_topk": 4},
    "gpt-oss": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},
    "gemma3": {"sliding_window": 4},
    "gemma4": {"sliding_window": 4, "num_global_key_value_heads": 2},
    "gemma4 with experts": {"sliding_window": 4, "num_global_key_value_heads": 2},
    "inkling": {"sliding_window_size": 4, "rel_extent": 5, "log_scaling_n_floor": 3},
    "inkling whole": {"sliding_window_size": 4, "rel_extent": 5},
    "llama 4": {"attention_chunk_size": 4, "floor_scale": 4},
    "llama 4 with experts in some layers": {"attention_chunk_size": 4, "floor_scale": 4},
    "mistral 4": {"q_lora_rank": 12},
    "step 3.7": {"sliding_window": 4},
}


def config_of(kind: str) -> dict[str, Any]:
    """The Hugging Face config of a kind of ``tests.models.oracle``, of its text model alone."""
    known = KINDS[kind]
    made = known.config(**(SMALL | known.own | CHANGES.get(kind, {})))
    if kind.startswith("step"):
        made = made.text_config
        return made.to_dict() | {"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5"}
    return made.to_dict() | {"architectures": [known.model.__name__]}


def spec_of(kind: str) -> DecoderSpec:
    return spec_from_config(config_of(kind))


def write_family(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A model with random weights in a Hugging Face folder; no norm, bias or scale is one or zero."""
    decoder = hf.init_random(spec_of(kind), seed=0, device="cpu", dtype=dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not parameter.is_floating_point():  # the constants of hashes
                continue
            if parameter.dim() == 1 or "norm" in name or name.endswith(("bias", "correction")):
                parameter.uniform_(0.5, 1.5)
            if name.endswith(("router.weight", "router.bias", "correction", "sinks")):
                parameter.normal_(0.0, 0.3)  # replayed experts of no probability would magnify rounding
    hf.export(decoder, folder, config=config_of(kind))
    return decoder


def family_samples(kind: str, count: int = 6) -> tuple[Sample, ...]:
    """Ragged samples; of models with experts, with those an engine is said to have used."""
    found, spec = ragged(count), spec_of(kind)
    if spec.moe is None:
        return found
    rng, moe = np.random.default_rng(7), spec.moe
    for s in found:
        drawn = [
            [rng.permutation(moe.num_experts)[: moe.experts_per_token] for _ in spec.moe_layers] for _ in range(len(s))
        ]
        s.extras["routed_experts"] = np.array(drawn, np.uint8)  # type: ignore[index]
    return found


BLOCKS = "minimax-m3 tied, two local blocks"


def block_samples() -> tuple[Sample, ...]:
    """Samples of ``BLOCKS`` with the blocks that an engine is said to have selected for each key-value head."""
    batch, rng = family_samples(BLOCKS), np.random.default_rng(3)
    indexer = build_indexer_layout(spec_of(BLOCKS))
    assert indexer is not None and indexer.count == 3 and indexer.groups == 2
    for s in batch:
        rows = np.stack([indexer.unrecorded_row() for _ in range(len(s))])
        for place in range(9, len(s)):  # blocks of three tokens, of which the last ones are always selected
            for row in rows[place]:
                row[:] = np.concatenate([np.sort(rng.permutation(place // 3 + 1)[:3]) for _ in range(2)])
        s.extras[INDEXER_TOPK] = rows  # type: ignore[index]
    return batch
