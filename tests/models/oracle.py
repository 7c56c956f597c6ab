"""Small transformers models with random weights, and decoders with the same weights.

Every file of ``tests/models/small_families`` adds kinds of models; a test that takes ``KINDS`` runs on all of them.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.models.small_families.small import SMALL, Kind
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.models.checkpoint import param_map
from miles.models.decoder import Decoder, Routing
from miles.models.families import spec_from_config
from miles.models.families.registry import find_family

_FILES = sorted(file.stem for file in (Path(__file__).parent / "small_families").glob("*.py") if file.stem != "small")
KINDS: dict[str, Kind] = {
    name: kind
    for file in _FILES
    for name, kind in importlib.import_module(f"tests.models.small_families.{file}").KINDS.items()
}


def hf_model(kind: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A transformers model whose weights are far from their tame initial values, so that mistakes show."""
    wanted = KINDS[kind]
    torch.manual_seed(seed)
    made = wanted.model(wanted.config(**(SMALL | wanted.own | changes)))
    for module in made.modules():
        if isinstance(module, torch.nn.Embedding):  # transformers trains no embedding of the padding token
            module.padding_idx = None
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
            if name.endswith(".A_log"):  # a state that forgets at once would hide mistakes
                parameter.sub_(3)
        for name, buffer in made.named_buffers():
            if name.endswith(".tid2eid"):  # the experts of each token
                each = [torch.randperm(made.config.n_routed_experts)[: buffer.shape[1]] for _ in buffer]
                buffer.copy_(torch.stack(each))
            elif name in made.state_dict() and buffer.is_floating_point():  # a bias that steers the router, for one
                noise = torch.randn_like(buffer)
                # A residual stream near zero would make errors of rounding large.
                buffer.copy_(1 + 0.3 * noise if name.endswith("layer_scalar") else 0.1 * noise)
    return made.eval()


def saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors as ``save_pretrained`` names and shapes them, which is not how it holds them in memory."""
    return revert_weight_conversion(model, model.state_dict())


def used(spec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``saved`` tensors that our decoder computes; without a vision tower of which only the text is."""
    is_unused = find_family(spec.family).is_unused
    return {name: tensor for name, tensor in tensors.items() if not is_unused(spec, name)}


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients, named and shaped like ``saved``; zeros for what got none."""
    got = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    got |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return revert_weight_conversion(model, got)


def published(spec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of published checkpoints, which are not always those that transformers saves."""
    published_name = find_family(spec.family).published_name
    return {published_name(name): tensor for name, tensor in tensors.items()}


def assemble(spec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors out of ``saved`` ones (or ``gradients``), by the names table."""
    tensors = published(spec, tensors)
    ours = {}
    for name, pieces in param_map.build_param_map(spec).items():
        dtype = torch.int64 if pieces[0].integer else None
        ours[name] = torch.zeros(param_map.param_shape(pieces), dtype=dtype)
        for piece in pieces:
            piece.view(ours[name]).copy_(tensors[piece.hf_name])
    return ours


def twin(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our decoder with a transformers model's weights."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    decoder = Decoder(spec_from_config(config), device="cpu", dtype=dtype)
    decoder.load_state_dict(assemble(decoder.spec, saved(model)))
    return decoder


def tokens_of(lengths: Sequence[int], vocab: int = SMALL["vocab_size"], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def positions_of(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def hf_logits(model: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """Each sequence on its own, one after the other."""
    return torch.cat([model(tokens[None]).logits[0] for tokens in sequences])


def our_logits(decoder: Decoder, sequences: Sequence[Tensor], routing: Routing | None = None) -> Tensor:
    """All sequences packed, in one forward."""
    lengths = [len(tokens) for tokens in sequences]
    hidden = decoder(torch.cat(list(sequences)), positions_of(lengths), VarlenAttentionBackend(lengths, "cpu"), routing)
    return compute_logits(hidden, decoder.head(), decoder.spec.logit_softcap, numerics=decoder.numerics)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, against the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
