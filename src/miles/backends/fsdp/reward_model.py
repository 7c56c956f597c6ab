"""Reward model: a decoder that scores whole texts, in one process.

Its folder is a sequence classifier of one label, as transformers names and loads it.

``_T`` packed input tokens, ``_B`` sequences, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from miles.backends.fsdp.local_model import LocalHeadModel
from miles.core.errors import CheckpointError, UsageError
from miles.kernels.numerics import FAST, Numerics
from miles.models.base import CausalLM
from miles.models.checkpoint import load as loading
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    read_config,
    stored_tensors,
    write_atomically,
    write_json,
)
from miles.models.checkpoint.save_plan import SavePlan, single_tensor_unit
from miles.models.checkpoint.tensor_sources import locate_tensors, read_quant_config
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec
from miles.train.packed_images import PackedImages

SCORE = "score.weight"
FILE, BACKBONE_FILE = "model-score.safetensors", "model-trunk.safetensors"
"""The file of the score weight, and that of the decoder if it is a single file."""


def load_reward_model(
    folder: Path, *, device: torch.device, dtype: torch.dtype, numerics: Numerics = FAST
) -> RewardModel:
    """Load the reward model in ``folder`` for scoring; also one that another trainer wrote without an output weight."""
    config, stored = read_config(folder), stored_tensors(folder)
    if SCORE not in stored:
        raise CheckpointError(f"{folder} has no {SCORE}, so it is not a reward model; use another checkpoint.")
    # The architecture is the classifier's; the model type identifies the decoder.
    spec = spec_from_config({name: value for name, value in config.items() if name != "architectures"})
    headless_spec = replace(spec, tie_embeddings=True)
    decoder_tensors = {name: tensor for name, tensor in stored.items() if name not in (SCORE, "lm_head.weight")}
    decoder = Decoder(headless_spec, device="meta", dtype=dtype, numerics=numerics)
    plan = locate_tensors(headless_spec, decoder_tensors, read_quant_config(config), folder)
    wanted = dict(decoder.named_parameters())
    found = loading.load_params(plan, wanted, rank=0, world=1, device=device, reader=FileReader())
    decoder.load_state_dict(dict(found), assign=True)
    model = RewardModel(decoder.requires_grad_(False), config=config, like=folder)
    model.load_score(stored[SCORE])
    return model


def _list_classifiers() -> Mapping[str, str]:
    """Return transformers' sequence classifiers by model type; imported late, as it takes seconds."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


class RewardModel(LocalHeadModel):
    """A ScoreModel over ``decoder``: a float32 linear on the hidden state of a sequence's last token."""

    def __init__(
        self,
        decoder: CausalLM,
        *,
        config: Mapping[str, Any],
        like: Path | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        model_type = str(config.get("model_type"))
        if not isinstance(decoder, Decoder):
            raise UsageError("--loss-type rm_loss needs the native decoder; leave --model-impl transformers out.")
        classifier = _list_classifiers().get(model_type)
        if classifier is None or "text_config" in config:
            raise UsageError(
                f"--loss-type rm_loss cannot write a reward model of type {model_type}: transformers has no sequence "
                "classifier for its text model; start from another --hf-checkpoint."
            )
        shapes = {SCORE: (1, decoder.spec.hidden_size)}
        super().__init__(decoder, shapes, config=config, like=like, gradient_checkpointing=gradient_checkpointing)
        self._decoder, self._classifier = decoder, classifier

    @property
    def spec(self) -> DecoderSpec:
        return self._decoder.spec

    def scores(
        self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], images: PackedImages | None = None
    ) -> Tensor:
        hidden_TD = self._backbone.read(tokens_T, positions_T, lengths, None, images=images).hidden_TD
        last_B = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        hidden_BD = hidden_TD.index_select(0, last_B).to(torch.float32)
        return F.linear(hidden_BD, self._head[SCORE]).squeeze(1)

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        blob = save({SCORE: self._head[SCORE].detach().cpu()})
        weight_map = {name: stored.file.name for name, stored in stored_tensors(folder).items()}
        if (folder / WEIGHTS).exists():  # a reader that finds this file ignores the index
            (folder / WEIGHTS).rename(folder / BACKBONE_FILE)
            weight_map = dict.fromkeys(weight_map, BACKBONE_FILE)
        write_atomically(folder / FILE, lambda file: file.write(blob))
        total = sum((folder / name).stat().st_size for name in {*weight_map.values(), FILE})
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": {**weight_map, SCORE: FILE}})
        write_json(folder / "config.json", self._classifier_config(read_config(folder)))

    def save_plan(self) -> SavePlan | None:
        plan = self._backbone.save_plan()
        assert plan is not None, "a reward model is a native decoder"
        score = single_tensor_unit(SCORE, self._head[SCORE])
        return replace(plan, units=(*plan.units, score), config=self._classifier_config(plan.config))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        stored = stored_tensors(folder)
        if SCORE not in stored:
            raise CheckpointError(f"{folder} has no {SCORE}, so it is not a reward model; use another checkpoint.")
        score = stored.pop(SCORE)
        params = dict(self._decoder.named_parameters())
        plan = locate_tensors(self._decoder.spec, stored, None, folder)
        for name, tensor in loading.load_params(plan, params, rank=0, world=1, device=self.device, reader=FileReader()):
            params[name].copy_(tensor)
        self.load_score(score)

    @torch.no_grad()
    def load_score(self, stored: StoredTensor) -> None:
        """Load the score weight only."""
        if stored.shape != tuple(self._head[SCORE].shape):
            count = stored.shape[0] if stored.shape else 0
            raise CheckpointError(
                f"{stored.file} has {count} scores, but a reward model needs one; use another checkpoint."
            )
        with safe_open(stored.file, framework="pt") as file:
            self._head[SCORE].copy_(file.get_tensor(SCORE))

    def _classifier_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder's config as that of its sequence classifier."""
        config = {**config, "architectures": [self._classifier]}
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if config.get("pad_token_id") in self._decoder.spec.eos_token_ids:
            # transformers scores the last token that is not padding, and a response ends with an EOS token
            config["pad_token_id"] = None
        return config
