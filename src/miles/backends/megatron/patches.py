"""Mends of Megatron-Core where it is broken: each by name, with its reason and the version it ends at, when asked."""

# pyright: reportMissingImports=false
from __future__ import annotations

from importlib.util import find_spec

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

# A name that Megatron-Core 0.16 binds only where Transformer Engine is installed, and reads everywhere.
_GEMM = "te_general_gemm"


def router_without_transformer_engine() -> None:
    """Let routers run without Transformer Engine.

    ``moe_utils.router_gating_linear`` asks whether ``te_general_gemm`` is None, but without Transformer Engine the name
    does not exist and every forward of a router is a NameError, on a GPU as on a CPU. Seen in megatron-core 0.16.0 and
    0.16.1; to be removed with the first release that binds the name itself.
    """
    if not hasattr(moe_utils, _GEMM):
        setattr(moe_utils, _GEMM, None)


def latent_without_transformer_engine() -> None:
    """Let latent attention be built without Transformer Engine.

    ``multi_latent_attention`` takes Transformer Engine to be there when Megatron's own wrappers of it can be imported,
    which they always can; without it they are no types, and asking whether a layer is one of them is a TypeError. Seen
    in megatron-core 0.16.1; to be removed with the first release that asks for the package itself.
    """
    if find_spec("transformer_engine") is None:
        multi_latent_attention.HAVE_TE = False
