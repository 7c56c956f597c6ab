"""Attention over pages that keep one short vector a token (MLA): values are the first channels of the keys.

Shapes: B rows, T new tokens, H query heads, d channels of a key, e of them its value, S slots of the cache.

Every tile of keys is read once and used for both products. All heads ask the same keys: decode takes up to 64 of them
in a tile.
"""

from __future__ import annotations

from torch import Tensor

from miles.kernels.decode import attend_work, decode_reference
from miles.kernels.prefill import attend_new, prefill_reference
from miles.kernels.tiling import Look, how
from miles.kernels.work import DecodeWork


def latent_decode_attention(
    q_BHd: Tensor,
    k_S1d: Tensor,
    pages_SP: Tensor,
    seats_B: Tensor,
    work: DecodeWork,
    *,
    value_dim: int,
    page_size: int,
    scale: float,
    out: Tensor | None = None,
    has_trunks: bool | None = None,
) -> Tensor:
    """What the new token of every row sees, [B, H, value_dim]; see ``decode_attention``.

    The work was filled in with ``kv_heads`` the number of tiles of heads (``head_tiles``) and all H as queries of one.
    """
    look = Look(page_size, scale, None, None, None, None)
    v_S1e = k_S1d[..., :value_dim]
    compiled = how(q_BHd, k_S1d, v_S1e, look, latent=True)
    read = (q_BHd, k_S1d, v_S1e, pages_SP, seats_B)
    return attend_work(read, work, look, compiled, out=out, has_trunks=has_trunks)


def head_tiles(heads: int) -> int:
    """Into how many tiles decode cuts the heads."""
    return -(-heads // 64)


def latent_prefill_attention(
    q_THd: Tensor,
    k_S1d: Tensor,
    pages_SP: Tensor,
    tiles: Tensor,
    *,
    value_dim: int,
    page_size: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """What every new token sees of its sequence, [T, H, value_dim]; see ``prefill_attention``."""
    look = Look(page_size, scale, None, None, None, None)
    v_S1e = k_S1d[..., :value_dim]
    compiled = how(q_THd, k_S1d, v_S1e, look, latent=True)
    return attend_new((q_THd, k_S1d, v_S1e, pages_SP, tiles), look, compiled, out)


def latent_decode_reference(
    q_BHd: Tensor,
    k_S1d: Tensor,
    pages_SP: Tensor,
    seats_B: Tensor,
    lengths_B: Tensor,
    *,
    value_dim: int,
    page_size: int,
    scale: float,
) -> Tensor:
    """The same as the decode, row after row."""
    return decode_reference(
        q_BHd, k_S1d, k_S1d[..., :value_dim], pages_SP, seats_B, lengths_B, page_size=page_size, scale=scale
    )


def latent_prefill_reference(
    q_THd: Tensor,
    k_S1d: Tensor,
    pages_SP: Tensor,
    tiles: Tensor,
    *,
    value_dim: int,
    page_size: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """The same as the prefill, tile after tile."""
    return prefill_reference(
        q_THd, k_S1d, k_S1d[..., :value_dim], pages_SP, tiles, page_size=page_size, scale=scale, out=out
    )
