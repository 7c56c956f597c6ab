"""The Triton kernels of a run: steps of its engine and its trainer, on meta tensors, with one layer of each kind.

Shapes: T tokens, R trained tokens, B sequences, M pages of a sequence.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from miles.backends.native.engine.forward_batch import ForwardBatch, SamplingBatch
from miles.backends.native.runner.cuda_graph import CudaGraphRunner, GraphKey
from miles.backends.native.runner.model_runner import ModelRunner
from miles.kernels.attention.gather_rows import index_rows
from miles.kernels.fused.adamw import AdamwParams, fused_adamw
from miles.kernels.fused.grad_sum import launch_add_grad
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.checksum import compute_checksums
from miles.kernels.runtime.fake_gpu import DEVICE, Target, fake_gpu, stub_heavy_imports
from miles.kernels.runtime.triton_compat import start_hashing_triton, use_triton_training
from miles.launch.config import Config
from miles.launch.plan.running_requests import count_running_requests
from miles.launch.precompile.compiler import ParallelCompiler
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.decoder import Decoder
from miles.models.resolve import resolve_spec
from miles.models.spec import DecoderSpec
from miles.train.logprobs import HeadOutput, compute_logprobs
from miles.train.prefix_sharing import TreeNode, build_attention

# More than a table of pages has columns for: the context limits these.
_NUM_PAGES = 1 << 16
# Triton compiles a variant for integers that are multiples of 16, and one for others.
_NUM_TOKENS = (512, 509)


def read_target() -> Target:
    """Describe this machine's GPU, from its properties alone."""
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    return Target(
        family="cuda",
        arch=str(10 * capability[0] + capability[1]),
        warp_size=32,
        capability=capability,
        sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        gpus=properties.name,
    )


def select_layers(spec: DecoderSpec) -> DecoderSpec:
    """The spec with one layer of each kind: its kernels are those of the model."""
    return replace(spec, layers=tuple(dict.fromkeys(spec.layers)))


class RunSteps:
    """The steps of a run's engine and trainer, each of which launches its kernels."""

    def __init__(self, config: Config) -> None:
        models = config.models
        assert models.hf_checkpoint is not None
        folder = Path(models.hf_checkpoint)
        raw, rollout = read_config(folder), models.rollout_dtype
        self._config = config
        self._spec = select_layers(resolve_spec(folder, models.model_impl))
        self._numerics: Numerics = models.numerics
        self._dtype = hf.choose_dtype(models.dtype, raw, DEVICE)
        self._rollout_dtype = self._dtype if rollout == "auto" else hf.choose_dtype(rollout, raw, DEVICE)

    def build_engine(self) -> tuple[ModelRunner, CudaGraphRunner]:
        """The runner of the engine, and its CUDA graphs, which are not captured."""
        native = self._config.native
        runner = ModelRunner(
            self._spec,
            num_pages=_NUM_PAGES,
            page_size=native.engine_page_size,
            num_slots=count_running_requests(self._config, "cuda", self._spec),
            return_routed_experts=native.engine_return_routed_experts,
            device=DEVICE,
            dtype=self._rollout_dtype,
            numerics=self._numerics,
            use_cuda_graphs=False,
        )
        return runner, runner.build_graphs()

    def launch_checksums(self) -> None:
        """The digests of a weight update."""
        compute_checksums([torch.empty(64, 64, dtype=self._rollout_dtype, device=DEVICE)])

    def launch_prefill(self, runner: ModelRunner, *, decodes: int) -> None:
        """Steps that prefill prompts, beside ``decodes`` sequences that decode."""
        for tokens in _NUM_TOKENS:
            runner.launch(_build_prefill(tokens, decodes, page_size=self._config.native.engine_page_size))

    def launch_training(self) -> None:
        """Forward and backward pass over packed sequences, and over samples that share a prompt."""
        decoder = Decoder(self._spec, device="meta", dtype=self._dtype, numerics=self._numerics)
        temperature, chunk = self._config.rollout.rollout_temperature, self._config.train.log_probs_chunk_size
        cases: list[tuple[int, bool, bool]] = [(*case, False) for case in product(_NUM_TOKENS, (False, True))]
        if self._config.train.share_prefix is not False:
            cases += [(tokens, False, True) for tokens in _NUM_TOKENS]
        for tokens, with_entropy, shares in cases:
            lengths = (tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4)
            nodes = (
                tuple(TreeNode(n, parent) for n, parent in zip(lengths, (None, 0, 0), strict=True)) if shares else ()
            )
            positions_T = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
            tokens_T = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
            attention = build_attention(lengths, nodes, DEVICE, numerics=self._numerics)
            hidden_TD = decoder(tokens_T, positions_T, attention, None)
            rows_R = torch.arange(tokens // 2, device=DEVICE)
            output = HeadOutput(
                hidden_RD=index_rows(hidden_TD, rows_R, repeated=shares),
                head_VD=decoder.head(),
                softcap=self._spec.logit_softcap,
                numerics=self._numerics,
            )
            logp_R, entropy_R = compute_logprobs(output, tokens_T[rows_R], temperature=temperature, chunk=chunk)
            torch.autograd.backward(logp_R.sum() + entropy_R.sum() if with_entropy else logp_R.sum())

    def launch_update(self) -> None:
        """Sums of gradients over micro-batches, and the optimizer step of weights in half precision."""
        train = self._config.train
        weight = torch.empty(1024, dtype=self._dtype, device=DEVICE)
        if not use_triton_training(weight):
            return
        total = launch_add_grad(None, weight)
        launch_add_grad(total, weight)
        if train.optimizer != "adam" or train.optimizer_state_dtype != "float32" or train.optimizer_cpu_offload:
            return
        params = AdamwParams(lr=1e-6, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1, step=1)
        for scale in (None, torch.empty((), device=DEVICE)):
            fused_adamw(weight, total, total, (total, total), params, scale=scale)


def _build_prefill(tokens: int, decodes: int, *, page_size: int) -> ForwardBatch:
    """A step of ``decodes`` sequences with one token, and two prompts of ``tokens`` in all."""
    counts_B = np.array([*[1] * decodes, tokens // 2, tokens - tokens // 2], np.int64)
    rows = len(counts_B)
    pages = -(-tokens // page_size) + 1
    zeros_B = np.zeros(rows, np.int64)
    ones_B = np.ones(rows, np.float32)
    return ForwardBatch(
        tokens_T=np.zeros(decodes + tokens, np.int64),
        starts_B=np.array([*[page_size] * decodes, 0, 0], np.int64),
        counts_B=counts_B,
        req_slots_B=np.arange(rows),
        num_decodes=decodes,
        block_table_BM=np.arange(rows * pages, dtype=np.int64).reshape(rows, pages),
        shared_B=zeros_B,
        group_B=zeros_B - 1,
        rows_D=np.cumsum(counts_B) - 1,
        req_slots_D=np.arange(rows),
        sampling=SamplingBatch(
            temperature_D=ones_B,
            top_k_D=zeros_B,
            top_p_D=ones_B,
            min_p_D=0 * ones_B,
            has_filter_D=np.zeros(rows, np.bool_),
            uniform_D=0 * ones_B,
        ),
    )


def compile_run(config: Config, on_ready: Callable[[], object]) -> bool:
    """Compile the kernels of a run in this process, which must not have used CUDA; false if any cannot be.

    ``on_ready`` is called when those of the first rollout are compiled.
    """
    hashing = start_hashing_triton()
    target = read_target()
    compiler = ParallelCompiler(target, workers=max(1, len(os.sched_getaffinity(0)) - 1))
    hashing.join()  # forks inherit the hash
    compiler.link_driver()
    compiler.install()
    with fake_gpu(target):
        steps = RunSteps(config)
        engines: list[tuple[ModelRunner, CudaGraphRunner]] = []
        if not _launch_step(lambda: engines.append(steps.build_engine())):
            return False
        runner, graphs = engines[-1]
        keys = graphs.list_keys()
        # Steps with prefill launch the same kernels whatever their size.
        prefill, decode = ([key for key in keys if (key.num_tokens > 0) == has] for has in (True, False))
        # Graphs of all batch sizes are captured in the first rollout; one request alone has kernels of its own.
        ends = {decode[0].batch_size, decode[-1].batch_size} if decode else set[int]()
        early = [*prefill[:1], *(key for key in decode if key.batch_size in ends)]
        rest = [*prefill[-1:], *(key for key in decode if key.batch_size not in ends)]
        first = (
            steps.launch_checksums,
            lambda: steps.launch_prefill(runner, decodes=0),
            lambda: _launch_graphs(graphs, early),
            lambda: steps.launch_prefill(runner, decodes=2),
        )
        others = (steps.launch_training, steps.launch_update, lambda: _launch_graphs(graphs, rest))
        worked = [_launch_step(step) for step in first]
        rollout = set(compiler.children)
        worked.append(_launch_step(others[0]))
        compiler.wait(rollout)
        on_ready()
        worked += [_launch_step(step) for step in others[1:]]
        compiler.wait()
    return all(worked) and not compiler.failed


def _launch_step(step: Callable[[], object]) -> bool:
    """Run a step, if need be with SymPy; what it cannot launch is compiled by the run itself."""
    for sizes in (True, False):
        try:
            with stub_heavy_imports(sizes=sizes):
                step()
        except Exception:
            traceback.print_exc()
        else:
            return True
    return False


def _launch_graphs(graphs: CudaGraphRunner, keys: Sequence[GraphKey]) -> None:
    for key in keys:
        graphs.run_padding(key)
