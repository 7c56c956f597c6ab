"""Draft training: the draft model of speculative decoding is trained beside the policy, on hidden states it computed.

    policy's forward -> features, detached -> draft, several steps deep -> loss -> the draft's own backward and AdamW

The policy's graph, gradients and weights are the same as without it. Every rank has the whole draft. Ranks that
share samples (tensor and context parallel) all compute their gradient, and the gradients of all ranks are summed, so
that every rank makes the same update.

``_T`` packed input tokens, ``_R`` trained tokens, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.core.errors import CheckpointError, UsageError
from miles.core.types import Version
from miles.models.checkpoint.safetensors_io import StoredTensor, stored_tensors
from miles.models.checkpoint.save_plan import SavePlan
from miles.models.draft.base import PolicyWeights
from miles.models.draft.checkpoint import load_draft_params, plan_draft_save
from miles.models.draft.eagle import EagleDraft
from miles.models.draft.mtp import MtpDraft
from miles.models.draft.multi_step_attention import MultiStepAttention
from miles.models.draft.param_map import TOKEN_OFFSETS
from miles.models.optim_groups import MuonMatrices
from miles.train.batch_tensors import MicroBatch
from miles.train.checkpoint import checkpoint
from miles.train.config import TrainConfig
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.draft_loss import DraftLoss
from miles.train.logprobs import HeadOutput, PolicyFeatures
from miles.train.optim.lr_scheduler import LRSchedule
from miles.train.optim.master_weights import TrainedParam
from miles.train.optim.optimizer import Optimizer, full_grad_norm
from miles.train.prefix_sharing import build_attention, compute_slots

DRAFT_FOLDERS = {"eagle3": "draft", "mtp": "mtp"}
"""Subfolder of a checkpoint, by the kind of draft: an EAGLE-3 head can be served from there as it is."""


class DraftParameters:
    """``ShardedParameters`` of a draft, of which every rank has all; checkpoints have them in ``save_dtype``."""

    def __init__(self, draft: MtpDraft | EagleDraft, save_dtype: torch.dtype) -> None:
        self.draft = draft
        self._save_dtype = save_dtype
        self._parameters: dict[str, Tensor] = dict(draft.named_parameters())
        if draft.token_offsets_v is not None:
            self._parameters[TOKEN_OFFSETS] = draft.token_offsets_v

    @property
    def device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def finalize_grads(self) -> None:
        """``DraftTrainer`` sums the gradients."""

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return full_grad_norm(grads)

    def after_update(self) -> None:
        """There are no copies of the parameters."""

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local

    def shard(self, name: str, full: Tensor) -> Tensor:
        return full

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return {}

    def move(self, device: torch.device) -> None:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(device)

    def save(self, folder: Path) -> None:
        raise AssertionError("a draft is written by its save plan")

    def save_plan(self) -> SavePlan:
        return plan_draft_save(self.draft, self._save_dtype)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        for name, tensor in load_draft_params(folder, self.draft, device=self.device).items():
            own = self.draft.get_buffer(name) if name not in self._parameters else self._parameters[name]
            own.copy_(tensor)


class DraftTrainer:
    """Trains ``draft`` with its own AdamW at ``train.draft_lr``, ``train.draft_train_steps`` steps deep.

    ``temperature`` is that of sampling. The loss is the mean over all pairs of a trained token and a step that predicts
    it, times ``train.mtp_loss_scaling_factor``. Of ``pipeline_size`` stages the last computes it.
    """

    def __init__(
        self,
        draft: MtpDraft | EagleDraft,
        *,
        train: TrainConfig,
        temperature: float,
        save_dtype: torch.dtype | None = None,
        dp_group: DataParallelGroup = SINGLE_RANK,
        pipeline_size: int = 1,
    ) -> None:
        if draft.token_offsets_v is not None and train.draft_loss == "hard":
            raise UsageError("--draft-loss hard needs a draft of the policy's whole vocabulary; use --draft-loss soft.")
        dtype = next(draft.parameters()).dtype
        self.draft = draft
        self._model = DraftParameters(draft, save_dtype or dtype)
        self._steps = train.draft_train_steps
        self._scale = train.mtp_loss_scaling_factor
        self._dp_group = dp_group
        # Ranks that share samples and have the last layers: each computes their whole gradient.
        self._sharing = dp_group.world_size // dp_group.dp_size // pipeline_size
        self._verify = train.verify_checkpoints
        self._loss = DraftLoss(kind=train.draft_loss, temperature=temperature, chunk=train.log_probs_chunk_size)
        schedule = LRSchedule(style="constant", lr=train.draft_lr, min_lr=train.draft_lr, warmup=0, decay=1)
        adam = replace(train, optimizer="adam", vision_lr=None)
        trained = {name: p for name, p in self._model.parameters().items() if p.requires_grad}
        self._optimizer = Optimizer(
            trained, adam, schedule, lr_flag="--draft-lr", norm=self._model.norm, model=self._model
        )
        self._sums = self._zeros()

    def _zeros(self) -> Tensor:
        """Loss, and for each step the tokens and those on which draft and policy agree."""
        return torch.zeros(1 + 2 * self._steps, dtype=torch.float64, device=self._model.device)

    def accumulate(self, rows: MicroBatch, output: HeadOutput) -> None:
        """Add the gradient of a micro-batch, whose forward by the policy returned ``output``."""
        if rows.idle:
            return
        assert output.features is not None, "the policy was not asked for features"
        features = output.features
        self.draft.share(_detach_weights(features))
        hidden_TD = features.features_TF
        if rows.tree_nodes:
            slots = torch.from_numpy(compute_slots(rows.tree_nodes, rows.ends)).to(hidden_TD.device)
            hidden_TD, rows = hidden_TD.index_select(0, slots), rows.unshare()
        numerics = self.draft.numerics
        backend = build_attention(rows.lengths, (), hidden_TD.device, numerics=numerics)
        attention = MultiStepAttention(backend, rows.lengths)
        last = self.draft.spec.decoder.max_positions - 1
        before_R = rows.before_R
        policy_RD = output.hidden_RD.detach()
        if output.tokens is not None:  # this rank has some of the tokens
            policy_RD = output.tokens.join(policy_RD)
        depth_R = rows.positions_T.index_select(0, before_R)
        losses: list[Tensor] = []
        for step in range(self._steps):
            # Rows at the end of a sequence read a token of the next one; no loss depends on them.
            next_tokens_T = rows.tokens_T.roll(-(step + 1))
            positions_T = (rows.positions_T + step).clamp(max=last)
            hidden_TD = self.draft(hidden_TD, next_tokens_T, positions_T, attention, step=step)
            used_R = (depth_R > step).nonzero().squeeze(1)
            roots_R = before_R.index_select(0, used_R) - (step + 1)
            input_RD = self.draft.head_input(hidden_TD.index_select(0, roots_R), step=step)
            found = self._loss(self.draft, input_RD, policy_RD, used_R, rows.target_R, softcap=output.softcap)
            losses.append(found.loss)
            self._sums[0] += found.loss.detach()
            self._sums[1 + 2 * step] += len(used_R)
            self._sums[2 + 2 * step] += found.agreed
        total = torch.stack(losses).sum()
        if total.requires_grad:
            total.backward()

    def step(self) -> dict[str, float]:
        """Update the draft by the accumulated gradient of all ranks; returns metrics."""
        loss, *counts = (self._dp_group.sum_world(self._sums) / self._sharing).tolist()
        self._sums = self._zeros()
        total = sum(counts[::2])
        if not total:
            return {}
        for param in self._optimizer.trained_params():
            self._reduce_grad(param, total)
        grad_norm, lr = self._optimizer.step()
        metrics = {"draft_loss": loss / total, "draft_grad_norm": grad_norm, "draft_lr": lr}
        for number, (count, agreed) in enumerate(zip(counts[::2], counts[1::2], strict=True), 1):
            if count:
                metrics[f"draft_agreement_{number}"] = agreed / count
        return metrics

    def _reduce_grad(self, param: TrainedParam, total: float) -> None:
        grad = param.grad
        if self._dp_group.world_size > 1:
            wide = torch.promote_types(param.parameter.dtype, torch.float32)
            grad = torch.zeros_like(param.parameter, dtype=wide) if grad is None else grad
            grad = self._dp_group.sum_world(grad) / self._sharing
        if grad is not None:
            param.grad = grad * (self._scale / total)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live weights by name; the next step changes them in place."""
        return {name: parameter.detach() for name, parameter in self._model.parameters().items()}

    def move(self, device: torch.device) -> None:
        """Move the optimizer state to ``device``; the weights stay, because an engine may use them."""
        self._optimizer.move(device)

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, folder: Path, version: Version) -> dict[str, StoredTensor]:
        """Write the draft into a subfolder of the checkpoint ``folder``, on the lead rank.

        Returns when it is on disk, on every rank: the tensors that the policy's checkpoint must contain too.
        """
        own = folder / DRAFT_FOLDERS[self.draft.spec.kind]
        if self._dp_group.is_lead:
            own.mkdir(exist_ok=True)
            saver = checkpoint.CheckpointSaver(verify=self._verify)
            checkpoint.save(own, self._model, self._optimizer, version, SINGLE_RANK, saver)
        self._dp_group.sum_world(torch.zeros((), device=self._model.device))  # until the lead has written it
        return stored_tensors(own) if self.draft.spec.kind == "mtp" else {}

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote."""
        own = folder / DRAFT_FOLDERS[self.draft.spec.kind]
        if not own.is_dir():
            raise CheckpointError(
                f"{folder} has no draft model ({own.name}/), which --draft-train needs to resume; "
                f"to start from its weights alone use --hf-checkpoint {folder}."
            )
        checkpoint.load(own, self._model, self._optimizer)


def _detach_weights(features: PolicyFeatures) -> PolicyWeights:
    embedding_VD, head_VD = features.embedding_VD.detach(), features.head_VD.detach()
    return PolicyWeights(embed=lambda tokens_T: F.embedding(tokens_T, embedding_VD), head=lambda: head_VD)
