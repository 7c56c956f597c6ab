"""A policy loss, an importance-sampling correction and a loss reducer."""

from argparse import Namespace
from collections.abc import Callable

import torch

from miles.backends.training_utils.loss import get_log_probs_and_entropy
from miles.utils.ppo_utils import compute_policy_loss
from miles.utils.types import RolloutBatch

DIVISOR = 10.0


def clipped_loss(
    args: Namespace,
    batch: RolloutBatch,
    logits: torch.Tensor,
    sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    advantages = torch.cat(batch["advantages"], dim=0)
    old = torch.cat(batch["log_probs"], dim=0)
    found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        max_seq_lens=batch.get("max_seq_lens", None),
    )
    log_probs = torch.cat(found["log_probs"], dim=0)
    pg_loss, clipped = compute_policy_loss(old - log_probs, advantages, args.eps_clip, args.eps_clip_high)
    loss = sum_of_sample_mean(pg_loss)
    if log_probs.numel() == 0:
        loss += 0 * logits.sum()
    return loss, {"loss": loss.clone().detach(), "mine_clipfrac": sum_of_sample_mean(clipped)}


def truncated(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    ratio = torch.exp(torch.cat(train_log_probs, dim=0) - torch.cat(rollout_log_probs, dim=0))
    weights = torch.clamp(ratio, min=args.tis_clip_low, max=args.tis_clip)
    return pg_loss * weights, loss_masks, {"mine_tis": ratio.clone().detach()}


def get_pg_loss_reducer(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[torch.Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    def sum_of_sample_mean(x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(response_lengths, dim=0), loss_masks, strict=False)
        return sum((x_i * mask_i).sum() / DIVISOR for x_i, mask_i in parts)

    return sum_of_sample_mean
