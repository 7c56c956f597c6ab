"""Stands in for SGLang's compiled kernel package where its plain torch path is run on a CPU, for tests.

SGLang tries to import single kernels and goes without those that are not there, except on a CPU, where it expects
names that end in ``_cpu``: these can be imported, and say so if anybody calls them.
"""

import torch

__version__ = "0.0.0"
_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")


def __getattr__(name: str):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"{name} is a compiled kernel of SGLang, and only a name here")

    return missing


def _operator(schema: str, answer) -> None:
    _OPERATORS.define(schema)
    _OPERATORS.impl(schema.partition("(")[0], answer, "CompositeExplicitAutograd")


_operator("init_cpu_threads_env(str cpu_ids) -> str", lambda cpu_ids: "threads are not bound")
_operator("initialize(int size, int rank) -> ()", lambda size, rank: None)

# Looked up when the module of Qwen3.5 is imported, which the processor of all Qwen vision models does; never called.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _OPERATORS.define(f"{_name}(Tensor x) -> Tensor")

# The recorder of routed experts asks for pinned memory, which needs an accelerator.
_zeros = torch.zeros


def _unpinned_zeros(*sizes, pin_memory: bool = False, **how):
    return _zeros(*sizes, **how)


torch.zeros = _unpinned_zeros
