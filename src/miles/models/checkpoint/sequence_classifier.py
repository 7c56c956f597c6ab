"""Reward model's folder: a sequence classifier of one label, as transformers names and loads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint.safetensors_io import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    read_config,
    stored_tensors,
    write_atomically,
    write_json,
)

SCORE = "score.weight"
FILE, BACKBONE_FILE = "model-score.safetensors", "model-trunk.safetensors"
"""The file of the score weight, and that of the decoder if it is a single file."""


class SequenceClassifier:
    """The classifier that transformers has for the text model of ``config``; UsageError if there is none."""

    def __init__(self, config: Mapping[str, Any], eos_token_ids: Collection[int]) -> None:
        # Imported late, as it takes seconds.
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

        model_type = str(config.get("model_type"))
        name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
        if name is None or "text_config" in config:
            raise UsageError(
                f"--loss-type rm_loss cannot write a reward model of type {model_type}: transformers has no sequence "
                "classifier for its text model; start from another --hf-checkpoint."
            )
        self.name = name
        self._eos_token_ids = eos_token_ids

    def build_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's config as that of its sequence classifier."""
        config = {**config, "architectures": [self.name]}
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if config.get("pad_token_id") in self._eos_token_ids:
            # transformers scores the last token that is not padding, and a response ends with an EOS token
            config["pad_token_id"] = None
        return config

    def write_score(self, folder: Path, score: Tensor) -> None:
        """Add the score weight to the decoder in ``folder``, and make its config that of the classifier."""
        blob = save({SCORE: score.detach().cpu()})
        weight_map = {name: stored.file.name for name, stored in stored_tensors(folder).items()}
        if (folder / WEIGHTS).exists():  # a reader that finds this file ignores the index
            (folder / WEIGHTS).rename(folder / BACKBONE_FILE)
            weight_map = dict.fromkeys(weight_map, BACKBONE_FILE)
        write_atomically(folder / FILE, lambda file: file.write(blob))
        total = sum((folder / name).stat().st_size for name in {*weight_map.values(), FILE})
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": {**weight_map, SCORE: FILE}})
        write_json(folder / "config.json", self.build_config(read_config(folder)))


def build_decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder in a sequence classifier, which its model type names."""
    return {key: value for key, value in config.items() if key != "architectures"}


def split_score(folder: Path) -> tuple[dict[str, StoredTensor], StoredTensor]:
    """Return the tensors of the decoder in the reward model's ``folder``, and its score weight."""
    stored = stored_tensors(folder)
    if SCORE not in stored:
        raise CheckpointError(f"{folder} has no {SCORE}, so it is not a reward model; use another checkpoint.")
    return {name: tensor for name, tensor in stored.items() if name != SCORE}, stored[SCORE]


def read_score(stored: StoredTensor, hidden_size: int) -> Tensor:
    """Read the score weight."""
    if stored.shape != (1, hidden_size):
        count = stored.shape[0] if stored.shape else 0
        raise CheckpointError(
            f"{stored.file} has {count} scores, but a reward model needs one; use another checkpoint."
        )
    with safe_open(stored.file, framework="pt") as file:
        return file.get_tensor(SCORE)
