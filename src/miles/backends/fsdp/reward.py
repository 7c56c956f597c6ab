"""A decoder that scores whole texts: a reward model in training, held whole by this process.

Its folder is a sequence classifier of one label as transformers names and loads it.

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
from torch import Tensor, nn

from miles.backends.fsdp.model import FsdpModel
from miles.core.errors import CheckpointError, UsageError
from miles.models import loading
from miles.models.decoder import Decoder
from miles.models.door import Model
from miles.models.families import spec_of
from miles.models.files import INDEX, WEIGHTS, Stored, read_config, stored_tensors, void, write_json, write_whole
from miles.models.matrices import Matrices
from miles.models.outline import Outline, lone_unit
from miles.models.reader import Reader
from miles.models.sources import quantised, sources
from miles.models.spec import DecoderSpec
from miles.train.optim import whole_norm

SCORE = "score.weight"
FILE, TRUNK = "model-score.safetensors", "model-trunk.safetensors"
"""Where the score's weight lies, and where the decoder's if they are one file."""


def open_reward(folder: Path, *, device: torch.device, dtype: torch.dtype) -> FsdpReward:
    """The reward model in ``folder``, to score with; also one that another trainer wrote without an output weight."""
    config, stored = read_config(folder), stored_tensors(folder)
    if SCORE not in stored:
        raise CheckpointError(f"{folder} holds no {SCORE}, so it is no reward model; use another checkpoint.")
    # Its architecture is the classifier's; what lies below is known by the type.
    spec = spec_of({name: value for name, value in config.items() if name != "architectures"})
    headless = replace(spec, tie_embeddings=True)
    without = {name: tensor for name, tensor in stored.items() if name not in (SCORE, "lm_head.weight")}
    decoder = Decoder(headless, device="meta", dtype=dtype)
    plan = sources(headless, without, quantised(config), folder)
    wanted = dict(decoder.named_parameters())
    found = loading.slices(plan, wanted, rank=0, world=1, device=device, reader=Reader())
    decoder.load_state_dict(dict(found), assign=True)
    model = FsdpReward(decoder.requires_grad_(False), config=config, like=folder)
    model.load_score(stored[SCORE])
    return model


def _classifiers() -> Mapping[str, str]:
    """The classifiers transformers knows, by model type; asked for late, as it takes seconds to be told."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


class FsdpReward:
    """A ScoreModel over ``decoder``: one linear on the hidden state of a sequence's last token, in float32.

    A new head is zero: at first all texts are worth the same. The decoder's own head, where it is not the embedding, is
    kept for the folder's sake and not trained.
    """

    def __init__(
        self,
        decoder: Model,
        *,
        config: Mapping[str, Any],
        like: Path | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        kind = str(config.get("model_type"))
        if not isinstance(decoder, Decoder):
            raise UsageError("--loss-type rm_loss needs a model of our own; leave --model-impl transformers out.")
        classifier = _classifiers().get(kind)
        if classifier is None or "text_config" in config:
            raise UsageError(
                f"--loss-type rm_loss cannot write a reward model of type {kind}: transformers has no sequence "
                "classifier of its text alone; start from another --hf-checkpoint."
            )
        self._decoder, self._classifier = decoder, classifier
        self._trunk = FsdpModel(decoder, config=config, like=like, gradient_checkpointing=gradient_checkpointing)
        if not decoder.spec.tie_embeddings:
            decoder.head().requires_grad_(False)
        width = decoder.spec.hidden_size
        self._weight_1D = nn.Parameter(torch.zeros(1, width, dtype=torch.float32, device=self._trunk.device))

    @property
    def spec(self) -> DecoderSpec:
        return self._decoder.spec

    @property
    def device(self) -> torch.device:
        return self._trunk.device

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self._trunk.parameters(), SCORE: self._weight_1D}

    def settle(self) -> None:
        """Gradients are whole as they come."""

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return whole_norm(grads)

    def updated(self) -> None:
        """There are no copies of the parameters."""

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def matrices(self) -> Mapping[str, Matrices]:
        return self._trunk.matrices()

    def move(self, device: torch.device) -> None:
        for parameter in self.parameters().values():
            parameter.data = parameter.data.to(device)

    def scores(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden_TD = self._trunk.read(tokens_T, positions_T, lengths, None).hidden_TD
        last_B = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        hidden_BD = hidden_TD.index_select(0, last_B).to(self._weight_1D.dtype)
        return nn.functional.linear(hidden_BD, self._weight_1D).squeeze(1)

    def save(self, folder: Path) -> None:
        self._trunk.save(folder)
        blob = save({SCORE: self._weight_1D.detach().cpu()})
        where = {name: stored.file.name for name, stored in stored_tensors(folder).items()}
        if (folder / WEIGHTS).exists():  # a reader that finds this file looks for no other
            (folder / WEIGHTS).rename(folder / TRUNK)
            where = dict.fromkeys(where, TRUNK)
        write_whole(folder / FILE, lambda file: void(file.write(blob)))
        total = sum((folder / name).stat().st_size for name in {*where.values(), FILE})
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": {**where, SCORE: FILE}})
        write_json(folder / "config.json", self._told(read_config(folder)))

    def outline(self) -> Outline | None:
        trunk = self._trunk.outline()
        assert trunk is not None, "a reward model is a decoder of ours"
        score = lone_unit(SCORE, self._weight_1D)
        return replace(trunk, units=(*trunk.units, score), config=self._told(trunk.config))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        stored = stored_tensors(folder)
        if SCORE not in stored:
            raise CheckpointError(f"{folder} holds no {SCORE}, so it is no reward model; use another checkpoint.")
        score = stored.pop(SCORE)
        live = dict(self._decoder.named_parameters())
        plan = sources(self._decoder.spec, stored, None, folder)
        for name, tensor in loading.slices(plan, live, rank=0, world=1, device=self.device, reader=Reader()):
            live[name].copy_(tensor)
        self.load_score(score)

    @torch.no_grad()
    def load_score(self, stored: Stored) -> None:
        """Fill the head alone."""
        if stored.shape != tuple(self._weight_1D.shape):
            count = stored.shape[0] if stored.shape else 0
            raise CheckpointError(f"{stored.file} scores with {count} numbers, and a reward model gives one.")
        with safe_open(stored.file, framework="pt") as file:
            self._weight_1D.copy_(file.get_tensor(SCORE))

    def _told(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The decoder's config as its classifier's."""
        told = {**config, "architectures": [self._classifier]}
        told |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if told.get("pad_token_id") in self._decoder.spec.eos_token_ids:
            # transformers scores at the last token that is no padding, and a reply's last token is its end
            told["pad_token_id"] = None
        return told
