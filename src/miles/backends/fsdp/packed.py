"""What one rank reads of a micro-batch, whichever way its tokens are shared.

``_T`` input tokens of this rank, ``_R`` tokens something is asked of, ``_r`` those of them that are this rank's, ``L``
layers with experts, ``k`` experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.backends.fsdp import context
from miles.backends.fsdp.context import Laid
from miles.backends.fsdp.mesh import Mesh
from miles.core.errors import MilesError
from miles.models.memory import Attend
from miles.models.spec import DecoderSpec
from miles.train.logits import Tokens
from miles.train.prefix import Stretch, attend_of, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Packed tokens that are asked for one number each."""

    lengths: Sequence[int]
    tokens_T: Tensor
    positions_T: Tensor
    before_R: Tensor
    replay_TLk: Tensor | None = None
    stretches: Sequence[Stretch] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The tokens of one rank; the hidden states behind its tokens ``at_r`` are wanted.

    Where ranks share the tokens, ``tokens`` says which of the wanted ones are this rank's; some are ``repeated`` where
    samples share what they begin with. The last ``fill`` tokens only fill up.
    """

    tokens_T: Tensor
    positions_T: Tensor
    attend: Attend
    at_r: Tensor
    replay_TLk: Tensor | None
    tokens: Tokens | None = None
    repeated: bool = False
    fill: int = 0


def packed_of(laid: Laid, mesh: Mesh, spec: DecoderSpec) -> Packed:
    """This rank's share of ``laid``, which is the same on all ranks of a part."""
    refuse(spec, laid.stretches)
    longest, most = max(laid.lengths), spec.max_positions
    if longest > most:
        raise MilesError(f"a sample of {longest} tokens is longer than the {most} positions of the model's config.")
    multiple = mesh.tensor.world if mesh.layout.sequence else 1
    if mesh.context.world > 1:
        cut = context.cut(laid, mesh.context, multiple=multiple)
        return Packed(
            tokens_T=cut.tokens_t,
            positions_T=cut.positions_t,
            attend=cut.attend,
            at_r=cut.before_r,
            replay_TLk=cut.replay_tLk,
            repeated=bool(laid.stretches),
            tokens=cut.tokens,
            fill=cut.fill,
        )
    filled = _filled(laid, -len(laid.tokens_T) % multiple)
    return Packed(
        tokens_T=filled.tokens_T,
        positions_T=filled.positions_T,
        attend=attend_of(filled.lengths, filled.stretches, mesh.device),
        at_r=filled.before_R,
        replay_TLk=filled.replay_TLk,
        repeated=bool(laid.stretches),
        fill=len(filled.tokens_T) - len(laid.tokens_T),
    )


def _filled(laid: Laid, missing: int) -> Text:
    """With so many tokens more, of a sequence that nobody asks about: ranks that share tokens have as many each."""
    text = Text(
        lengths=laid.lengths,
        tokens_T=laid.tokens_T,
        positions_T=laid.positions_T,
        before_R=laid.before_R,
        replay_TLk=laid.replay_TLk,
        stretches=laid.stretches,
    )
    if not missing:
        return text
    replay_TLk = laid.replay_TLk
    if replay_TLk is not None:
        replay_TLk = torch.cat((replay_TLk, replay_TLk.new_full((missing, *replay_TLk.shape[1:]), -1)))
    return replace(
        text,
        lengths=(*laid.lengths, missing),
        tokens_T=torch.cat((laid.tokens_T, laid.tokens_T.new_zeros(missing))),
        positions_T=torch.cat((laid.positions_T, torch.arange(missing, device=laid.positions_T.device))),
        replay_TLk=replay_TLk,
        stretches=(*laid.stretches, Stretch(missing)) if laid.stretches else (),
    )
