"""Checkpoints of random weights in published shapes, for benchmarks that run whole programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from miles.cluster.platform import detect_platform
from miles.models.accounting.known_models import find_known_config
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import config_from_spec
from miles.models.families.registry import spec_from_config


def write_random_checkpoint(model: str, folder: Path, **changes: Any) -> None:
    """The published config with ``changes``, and bf16 weights: norms one, matrices of standard deviation 0.02."""
    config = find_known_config(model)
    assert config is not None, f"{model} is not among the published shapes"
    spec = spec_from_config({**config, **changes})
    folder.mkdir(parents=True, exist_ok=True)
    decoder = Decoder(spec, device=detect_platform("auto").device, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    hf.export(decoder, folder, like=None, config=config_from_spec(spec) | {"dtype": "bfloat16"})
