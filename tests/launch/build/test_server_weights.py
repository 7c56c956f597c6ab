"""What servers are sent: the policy, and with trained MTP layers those under the names of the checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.draft.mtp_checkpoints import make_reference, save_reference

from miles.backends.remote.transports.buckets import iter_hf_named
from miles.kernels.numerics import FAST
from miles.launch.build.engines import get_server_weights
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.draft.checkpoint import load_mtp


def policy_of(folder: Path, decoder: Decoder) -> Any:
    return SimpleNamespace(
        folder=folder,
        spec=decoder.spec,
        rollout_spec=decoder.spec,
        dtype=torch.float32,
        rollout_dtype=torch.float32,
        rollout_quantization=None,
        rollout_adapters=None,
        numerics=FAST,
    )


def config_of(folder: Path, *flags: str) -> Any:
    sglang = SimpleNamespace(rollout_backend="sglang", sglang_flags=flags)
    return SimpleNamespace(sglang=sglang, models=SimpleNamespace(hf_checkpoint=str(folder)))


@pytest.mark.parametrize("name", ["deepseek v3", "glm-4.5", "mimo", "qwen3-next"])
def test_sglang_gets_mtp_layers_under_the_names_and_shapes_of_the_checkpoint(name: str, tmp_path: Path):
    own = save_reference(make_reference(name), tmp_path)
    decoder = hf.load(tmp_path, device="cpu", dtype=torch.float32)
    draft = load_mtp(tmp_path, decoder.spec, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(1)
    policy = policy_of(tmp_path, decoder)

    def trained() -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in draft.named_parameters()}

    def weights() -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in decoder.named_parameters()}

    drafting = config_of(tmp_path, "--speculative-algorithm", "NEXTN")
    sent = dict(iter_hf_named(decoder.spec, get_server_weights(drafting, policy, weights, trained)(), "checkpoint"))
    plain = dict(iter_hf_named(decoder.spec, weights(), "checkpoint"))
    assert own.keys() == sent.keys() - plain.keys()
    for hf_name, tensor in own.items():
        torch.testing.assert_close(sent[hf_name], tensor + 1)

    elsewhere = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "/head")
    for flags in ((), ("--speculative-algorithm", "NGRAM"), elsewhere):
        assert get_server_weights(config_of(tmp_path, *flags), policy, weights, trained)().keys() == weights().keys()
    assert get_server_weights(drafting, policy, weights, None)().keys() == weights().keys()
