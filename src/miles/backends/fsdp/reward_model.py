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
from torch import Tensor
from torch.nn import functional as F

from miles.backends.fsdp.local_model import LocalHeadModel
from miles.core.errors import UsageError
from miles.kernels.numerics import FAST, Numerics
from miles.models.base import CausalLM
from miles.models.checkpoint import load as loading
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import StoredTensor, read_config
from miles.models.checkpoint.save_plan import SavePlan, single_tensor_unit
from miles.models.checkpoint.sequence_classifier import SCORE, SequenceClassifier, read_score, split_score
from miles.models.checkpoint.tensor_sources import locate_tensors, read_quant_config
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import PackedSequences
from miles.train.model_protocols import KeptTensors, ValueCallback, run_scores
from miles.train.packed_images import PackedImages


def load_reward_model(
    folder: Path, *, device: torch.device, dtype: torch.dtype, numerics: Numerics = FAST
) -> RewardModel:
    """Load the reward model in ``folder`` for scoring; also one that another trainer wrote without an output weight."""
    config = read_config(folder)
    stored, score = split_score(folder)
    # The architecture is the classifier's; the model type identifies the decoder.
    spec = spec_from_config({name: value for name, value in config.items() if name != "architectures"})
    headless_spec = replace(spec, tie_embeddings=True)
    decoder_tensors = {name: tensor for name, tensor in stored.items() if name != "lm_head.weight"}
    decoder = Decoder(headless_spec, device="meta", dtype=dtype, numerics=numerics)
    plan = locate_tensors(headless_spec, decoder_tensors, read_quant_config(config), folder)
    wanted = dict(decoder.named_parameters())
    found = loading.load_params(plan, wanted, rank=0, world=1, device=device, reader=FileReader())
    decoder.load_state_dict(dict(found), assign=True)
    model = RewardModel(decoder.requires_grad_(False), config=config, like=folder)
    model.load_score(score)
    return model


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
        if not isinstance(decoder, Decoder):
            raise UsageError("--loss-type rm_loss needs the native decoder; leave --model-impl transformers out.")
        self._classifier = SequenceClassifier(config, decoder.spec.eos_token_ids)
        shapes = {SCORE: (1, decoder.spec.hidden_size)}
        super().__init__(decoder, shapes, config=config, like=like, gradient_checkpointing=gradient_checkpointing)
        self._decoder = decoder

    @property
    def spec(self) -> DecoderSpec:
        return self._decoder.spec

    def freeze_backbone(self) -> None:
        """Train the head only."""
        self._backbone.freeze()

    def forward_backward_scores(
        self, micro_batches: Sequence[PackedSequences], callback: ValueCallback
    ) -> list[KeptTensors]:
        return run_scores(self.scores, micro_batches, callback)

    def scores(
        self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], images: PackedImages | None = None
    ) -> Tensor:
        """Return the score of each sequence at its last token, in float32; sequences are concatenated."""
        hidden_TD = self._backbone.read(tokens_T, positions_T, lengths, None, images=images).hidden_TD
        last_B = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        hidden_BD = hidden_TD.index_select(0, last_B).to(torch.float32)
        return F.linear(hidden_BD, self._head[SCORE]).squeeze(1)

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        self._classifier.write_score(folder, self._head[SCORE])

    def save_plan(self) -> SavePlan | None:
        plan = self._backbone.save_plan()
        assert plan is not None, "a reward model is a native decoder"
        score = single_tensor_unit(SCORE, self._head[SCORE])
        return replace(plan, units=(*plan.units, score), config=self._classifier.build_config(plan.config))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        stored, score = split_score(folder)
        params = dict(self._decoder.named_parameters())
        plan = locate_tensors(self._decoder.spec, stored, None, folder)
        for name, tensor in loading.load_params(plan, params, rank=0, world=1, device=self.device, reader=FileReader()):
            params[name].copy_(tensor)
        self.load_score(score)

    @torch.no_grad()
    def load_score(self, stored: StoredTensor) -> None:
        """Load the score weight only."""
        self._head[SCORE].copy_(read_score(stored, self.spec.hidden_size))
