"""Adapters for serving: ranks and scales of their modules are those of PEFT's config, and damaged ones are refused."""

import json
import math

import pytest
import torch
from tests.backends.native.lora_adapters import random_adapter, save_adapter
from tests.models.oracle import KINDS
from tests.models.small_families.small import SMALL

from miles.core.errors import UsageError
from miles.models.families import spec_from_config
from miles.models.lora.factors import parse_factors, read_factors


@pytest.fixture(scope="module")
def spec():
    kind = KINDS["qwen3"]
    return spec_from_config(kind.config(**(SMALL | kind.own)).to_dict() | {"architectures": [kind.model.__name__]})


def test_patterns_change_the_rank_and_alpha_of_the_modules_they_match(spec):
    config, tensors = random_adapter(spec, 1, rank=4, alpha=8.0)
    wide = {name: t for name, t in random_adapter(spec, 2, rank=6)[1].items() if ".q_proj." in name}
    config |= {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"layers.0.mlp.up_proj": 2}, "use_rslora": True}
    found = parse_factors(config, tensors | wide, spec, where="it").modules
    assert found["model.layers.1.self_attn.q_proj"].rank == 6
    assert found["model.layers.1.self_attn.q_proj"].scale == pytest.approx(8 / math.sqrt(6))
    assert found["model.layers.0.mlp.up_proj"].scale == pytest.approx(2 / 2)
    assert found["model.layers.1.mlp.up_proj"].scale == pytest.approx(8 / 2)


def test_a_folder_that_is_none_or_damaged_is_refused(spec, tmp_path):
    with pytest.raises(UsageError, match="not a PEFT adapter"):
        read_factors(tmp_path / "nowhere", spec)
    folder = save_adapter(tmp_path / "good", spec, 1)
    assert read_factors(folder, spec).rank == 4
    (folder / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        read_factors(folder, spec)
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(UsageError, match="not a PEFT adapter"):
        read_factors(folder, spec)


def test_numbers_that_are_not_finite_and_missing_halves_are_refused(spec):
    config, tensors = random_adapter(spec, 1)
    name = next(iter(tensors))
    with pytest.raises(UsageError, match="no finite numbers"):
        parse_factors(config, tensors | {name: torch.full_like(tensors[name], float("nan"))}, spec, where="it")
    with pytest.raises(UsageError, match="only one of"):
        parse_factors(config, {key: t for key, t in tensors.items() if key != name}, spec, where="it")
    with pytest.raises(UsageError, match="no factors"):
        parse_factors(config, {}, spec, where="it")
