"""Pinned host memory without a GPU, for SGLang's LoRA adapters on a CPU: an ordinary tensor instead of an error.

SGLang asks for pinned memory for the offsets of fused projections and for adapters. Its LoRA arithmetic on a CPU is its
own ``--lora-backend torch_native``.
"""

import importlib.abc
import importlib.util
import sys
from types import ModuleType

MODULE = "sglang.srt.lora.layers"
_CREATORS = ("tensor", "empty", "zeros", "ones")


def install() -> None:
    """Replace pinned memory by ordinary memory once SGLang imports its LoRA layers."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == MODULE:
            sys.meta_path.remove(self)
            _replace(importlib.import_module("torch"))
        return None


def _replace(torch: ModuleType) -> None:
    for name in _CREATORS:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _without_pinning(create):
    def create_pageable(*values, pin_memory=False, **options):
        return create(*values, **options)

    return create_pageable
