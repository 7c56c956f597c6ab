"""transformers' own module with the interface of the decoder: packed tokens in, hidden states out.

Shapes: T all tokens of a packed batch, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from miles.core.errors import UsageError
from miles.kernels.numerics import FAST, Numerics
from miles.models.activation_checkpointing import CheckpointFn, checkpoint_full
from miles.models.hf_adapter.attention import BackendBinding
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.hf_adapter.vision import HfVisionTower
from miles.models.hidden_capture import HiddenCapture
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.layers.moe import Routing
from miles.models.vision.inputs import VisionInputs


class HfDecoder(nn.Module):
    """A causal language model of transformers. Parameters have transformers' names.

    ``module`` stays in evaluation mode even in training: dropout would make engine and trainer differ. It is used by
    one thread at a time; engine and trainer each have an instance (``empty_copy``). Its operations are not
    batch-invariant.
    """

    numerics: Numerics = FAST

    def __init__(self, module: Any, spec: HfAdapterSpec, binding: BackendBinding) -> None:
        super().__init__()
        self.module = module
        self.spec = spec
        self._binding = binding
        self.checkpoint_layers = False
        self.checkpoint_fn: CheckpointFn = checkpoint_full
        self.recompute_num_layers: int | None = None
        self.vision = None if spec.vision is None else HfVisionTower(module)
        head = module.get_output_embeddings().weight
        # A tied head is found under its other name: loading new tensors replaces only that one.
        self._head = next(name for name, parameter in module.named_parameters() if parameter is head)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attn_backend: AttentionBackend,
        routing: Routing | None = None,
        vision: VisionInputs | None = None,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        """Compute hidden states [T, D]; logits are these times ``head()`` transposed, then soft-capped by the spec."""
        assert capture is None, "hidden states of transformers modules are not captured"
        assert routing is None, "routing of transformers modules is neither recorded nor replayed"
        recompute = self.checkpoint_layers and torch.is_grad_enabled()
        with self._bind_attention(attn_backend), self._checkpointing(attn_backend) if recompute else nullcontext():
            given = (
                {"input_ids": tokens_T[None]} if vision is None else {"inputs_embeds": self._embed(tokens_T, vision)}
            )
            out = self.module.get_decoder()(**given, position_ids=positions_T[None], use_cache=False, return_dict=True)
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD if self.spec.hidden_scale == 1.0 else hidden_TD * self.spec.hidden_scale

    def _embed(self, tokens_T: Tensor, vision: VisionInputs) -> Tensor:
        """The embeddings of tokens [1, T, D], with the features of images in place of those of placeholders."""
        features = vision.features
        if features is None:
            assert self.vision is not None, "images are refused before: the module has no vision tower"
            features = self.vision(vision.images)
        # A placeholder may lie outside of the vocabulary.
        x_TD = self.module.get_input_embeddings()(tokens_T.index_fill(0, vision.token_I, 0))
        embeds_ID = features.embeds_FD.index_select(0, vision.feature_I).to(x_TD.dtype)
        return x_TD.index_copy(0, vision.token_I, embeds_ID)[None]

    def head(self) -> Tensor:
        """Return the output weight [V, D]: the embedding itself if tied."""
        return self.module.get_parameter(self._head)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over everything that is saved: parameters, and persistent buffers, which take no gradient."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)
        saved = self.module.state_dict(keep_vars=True)
        for name, buffer in self.module.named_buffers(prefix, recurse, remove_duplicate):
            if name.removeprefix(prefix).removeprefix(".") in saved:
                yield name, cast(nn.Parameter, buffer)

    def get_submodule(self, target: str) -> nn.Module:
        return self.module.get_submodule(target)

    def empty_copy(self) -> HfDecoder:
        """Return another instance whose parameters have no storage yet."""
        empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in self.module.parameters()}
        return copy.deepcopy(self, cast(dict[int, Any], empty))

    @contextmanager
    def _bind_attention(self, attn_backend: AttentionBackend) -> Iterator[None]:
        """Bind ``attn_backend`` during a forward and release it afterwards, so that a cache can be freed."""
        self._binding.attn_backend = attn_backend
        try:
            yield
        finally:
            self._binding.attn_backend = None

    @contextmanager
    def _checkpointing(self, attn_backend: AttentionBackend) -> Iterator[None]:
        """Layers save only their input, and are recomputed in backward with the attention backend of this forward."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        # With a number of layers, those are of the decoder; a vision tower is recomputed as a whole or not at all.
        inside = self.module if self.recompute_num_layers is None else self.module.get_decoder()
        layers = [module for module in inside.modules() if isinstance(module, GradientCheckpointingLayer)]
        layers = layers[: self.recompute_num_layers]
        for layer in layers:
            layer.forward = partial(self._run_checkpointed, layer.forward, attn_backend)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _run_checkpointed(self, forward: Any, attn_backend: AttentionBackend, *args: Any, **kwargs: Any) -> Any:
        first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if first:  # within the forward itself, where the backend is bound
                first = False
                return forward(*args, **kwargs)
            with self._bind_attention(attn_backend):
                return forward(*args, **kwargs)

        return self.checkpoint_fn(run, *args, **kwargs)


# -- LoRA adapters on linear layers ------------------------------------------------------------

Adapter = Callable[[Tensor, Tensor], Tensor]


class AdapterHook:
    """A forward hook that gives a layer's output and input to an adapter, which returns the output.

    A copy of the module for an engine has the hook without the adapter: its weights are merged.
    """

    def __init__(self) -> None:
        self.adapter: Adapter | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out if self.adapter is None else self.adapter(out, args[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> AdapterHook:
        return AdapterHook()


def set_adapter(module: nn.Linear, adapter: Adapter) -> None:
    """Set the adapter of a linear layer, in place of an earlier one."""
    hooks = [hook for hook in module._forward_hooks.values() if isinstance(hook, AdapterHook)]  # pyright: ignore[reportPrivateUsage]
    if not hooks:
        hooks = [AdapterHook()]
        module.register_forward_hook(hooks[0])
    hooks[0].adapter = adapter


def find_linear(model: nn.Module, name: str, shape: tuple[int, ...]) -> nn.Linear:
    """Return the linear layer of a target of the checkpoint; UsageError if transformers has another module there."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear) or tuple(module.weight.shape) != shape:
        found = "no module" if module is None else f"a {type(module).__name__}"
        raise UsageError(
            f"--target-modules: {name} of the checkpoint is {found} in transformers, and no linear layer of this "
            "name and shape; name other modules, or add it to --exclude-modules."
        )
    return module
