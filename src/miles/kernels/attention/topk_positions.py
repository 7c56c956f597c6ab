"""Top-k selection of sparse-attention indexers, with one tie rule: of equal scores the lowest position is selected.

Shapes: ... any leading axes, C candidates (tokens, pools or blocks), k selected ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select_topk(scores_C: Tensor, count: int) -> Tensor:
    """Return the ``count`` candidates of the highest scores (or all), ascending, [..., k].

    ``torch.topk`` may select any of equal scores, and others on another device or in a longer row.

    >>> select_topk(torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0]), 3).tolist()
    [0, 1, 3]
    """
    count = min(count, scores_C.shape[-1])
    if not count:
        return scores_C.new_zeros(*scores_C.shape[:-1], 0, dtype=torch.int64)
    lowest_1 = scores_C.topk(count, dim=-1).values[..., -1:]
    above_C, tied_C = scores_C > lowest_1, scores_C == lowest_1
    room_1 = count - above_C.sum(-1, keepdim=True, dtype=torch.int32)
    return list_selected(above_C | (tied_C & (tied_C.cumsum(-1, dtype=torch.int32) <= room_1)), count)


def list_selected(selected_C: Tensor, count: int) -> Tensor:
    """Return the positions of the true values of each row, at most ``count``, ascending, [..., k]; 0 in place of
    missing ones.
    """
    place_C = selected_C.cumsum(-1, dtype=torch.int32).sub_(1).masked_fill_(~selected_C, count).clamp_(max=count)
    position_C = torch.arange(selected_C.shape[-1], device=selected_C.device).expand(selected_C.shape)
    out = torch.zeros(*selected_C.shape[:-1], count + 1, dtype=torch.int64, device=selected_C.device)
    return out.scatter_(-1, place_C.long(), position_C)[..., :count]
