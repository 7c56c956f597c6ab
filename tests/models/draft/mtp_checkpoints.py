"""Small checkpoints with an MTP layer, and the layer computed by transformers.

The MTP layer is the only layer of a second transformers model, whose final norm is the norm before the shared head.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.models.oracle import hf_model, saved
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpKind:
    """A kind of ``tests.models.oracle``, how its MTP layer differs from it, and how a checkpoint names it."""

    kind: str
    layer: dict = field(default_factory=dict)
    policy: dict = field(default_factory=dict)
    names: tuple[str, str, str, str]
    block: str
    inner: str
    hidden_first: bool = False
    architecture: str | None = None
    norm_offset: float = 0.0


_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_LAST = {"names": _DEEPSEEK, "policy": {"num_hidden_layers": 2}, "layer": {"first_k_dense_replace": 0}}
_LAST |= {"block": "model.layers.2", "inner": "model.layers.2"}
_BESIDE = {"block": "mtp", "inner": "mtp.layers.0", "names": _QWEN, "norm_offset": 1.0}
_FULL = {"layer_types": ["full_attention"]}
MTP_KINDS = {
    "deepseek v3": MtpKind(kind="deepseek v3", **_LAST),
    "glm-4.5": MtpKind(kind="glm-4.5", **_LAST),
    "deepseek v3.2": MtpKind(kind="deepseek v3.2", **_LAST),
    "glm 4.7 flash": MtpKind(kind="glm 4.7 flash", **(_LAST | {"layer": {"mlp_layer_types": ["sparse"]}})),
    "glm 5": MtpKind(kind="glm 5", **_LAST),
    "qwen3-next": MtpKind(kind="hybrid qwen3 next", layer=_FULL, **_BESIDE),
    "qwen3.5": MtpKind(kind="hybrid qwen3.5", layer=_FULL, **_BESIDE),
    "mimo": MtpKind(
        kind="qwen2",
        names=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        block="model.mtp_layers.0",
        inner="model.mtp_layers.0",
        hidden_first=True,
        architecture="MiMoForCausalLM",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpReference:
    """A policy and its MTP layer in transformers."""

    kind: MtpKind
    policy: PreTrainedModel
    layer: PreTrainedModel
    norms: tuple[Tensor, Tensor]
    projection: Tensor

    def hidden(self, tokens: Tensor) -> Tensor:
        """The policy's hidden states after its final norm."""
        return self.policy.model(tokens[None]).last_hidden_state[0]

    def step(self, hidden: Tensor, next_tokens: Tensor, first: int = 0) -> Tensor:
        """The hidden states after the layer and its norm, of a sequence whose first position is ``first``."""
        embedding = self.policy.get_input_embeddings()(next_tokens)
        pair = (self._norm(embedding, self.norms[0]), self._norm(hidden, self.norms[1]))
        mixed = F.linear(torch.cat(pair[::-1] if self.kind.hidden_first else pair, -1), self.projection)
        positions = torch.arange(first, first + len(hidden))[None]
        return self.layer.model(inputs_embeds=mixed[None], position_ids=positions).last_hidden_state[0]

    def logits(self, normed: Tensor) -> Tensor:
        return F.linear(normed, self.policy.get_output_embeddings().weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.policy.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + self.kind.norm_offset)


def make_reference(name: str, **changes: int) -> MtpReference:
    """The reference of a kind, with ``changes`` of its config."""
    kind = MTP_KINDS[name]
    policy = hf_model(kind.kind, **(kind.policy | changes))
    layer = hf_model(kind.kind, seed=1, num_hidden_layers=1, **(kind.layer | changes))
    width = policy.config.hidden_size
    generator = torch.Generator().manual_seed(2)
    norms = (1 + 0.3 * torch.randn(2, width, generator=generator)).unbind()
    projection = 0.25 * torch.randn(width, 2 * width, generator=generator)
    return MtpReference(kind=kind, policy=policy, layer=layer, norms=norms, projection=projection)


def mtp_tensors(reference: MtpReference) -> dict[str, Tensor]:
    """The MTP layer's tensors, as the checkpoint names them."""
    kind, stored = reference.kind, saved(reference.layer)
    inner = "model.layers.0."
    tensors = {f"{kind.inner}.{n.removeprefix(inner)}": t for n, t in stored.items() if n.startswith(inner)}
    embedding_norm, hidden_norm, projection, norm = (f"{kind.block}.{role}.weight" for role in kind.names)
    tensors |= {embedding_norm: reference.norms[0], hidden_norm: reference.norms[1], projection: reference.projection}
    return tensors | {norm: stored["model.norm.weight"]}


def save_reference(reference: MtpReference, folder: Path, **extra: Tensor) -> dict[str, Tensor]:
    """Write the checkpoint; returns its MTP tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    own = mtp_tensors(reference) | extra
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in (saved(reference.policy) | own).items()}
    config = reference.policy.config.to_dict()
    architecture = reference.kind.architecture or type(reference.policy).__name__
    config |= {"architectures": [architecture]} | ({"model_type": "mimo"} if reference.kind.architecture else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return {name: tensors[name] for name in own}
