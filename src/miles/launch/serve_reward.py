"""``miles serve`` of a reward model: a sequence classifier of one label, behind ``/classify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles.core.errors import UsageError
from miles.launch.config import ServeRoot
from miles.models.files import read_config

if TYPE_CHECKING:
    from miles.backends.fsdp.scorer import Scorer
    from miles.backends.fsdp.serving import RewardServer
    from miles.cluster.local import Run

CLASSIFIER = "ForSequenceClassification"


def is_reward_model(folder: str | Path) -> bool:
    """Does the checkpoint score texts and not continue them?"""
    return any(str(name).endswith(CLASSIFIER) for name in read_config(folder).get("architectures") or ())


async def build_reward(config: ServeRoot, key: str | None, run: Run) -> tuple[RewardServer, Scorer]:
    """The model on its device and the server before it."""
    from miles.backends.fsdp.reward import open_reward
    from miles.backends.fsdp.scorer import Scorer
    from miles.backends.fsdp.serving import RewardServer
    from miles.cluster import platform
    from miles.models import hub
    from miles.models.tokenizer import load_tokenizer

    assert config.models.hf_checkpoint is not None
    if config.serve.tensor_parallel_size > 1:
        raise UsageError("--tensor-parallel-size shares a model that writes; a reward model is served by one device.")
    folder = Path(config.models.hf_checkpoint)
    papers = read_config(folder)
    device = platform.find(config.serve.device, threads=config.serve.num_threads).device
    model = open_reward(folder, device=device, dtype=hub.choose_dtype(config.models.dtype, papers, device))
    tokenizer = None
    if not config.serve.skip_tokenizer_init:
        tokenizer = load_tokenizer(folder, config.models.trust_remote_code)
    scorer = Scorer(model, run=run)
    name = config.serve.served_model_name or str(folder)
    how = {"name": name, "api_key": key, "body_mib": config.serve.max_body_mib}
    return RewardServer(scorer, tokenizer, model.spec, **how), scorer
