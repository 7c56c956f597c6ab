"""LoRA on routed experts: every row gets what its adapter adds to its expert, whatever rows are beside it.

Shapes: T tokens, k choices, E experts, S slots, P targets, I inputs, O outputs of a target, R the largest rank.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.device import DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.tiers import examples

from miles.kernels.lora import experts
from miles.kernels.lora.experts import ExpertFactors, ExpertLora
from miles.kernels.moe import fused_moe
from miles.kernels.moe.grouped_gemm import dispatch, sort_rows_by_group
from miles.kernels.numerics import FAST
from miles.kernels.runtime.triton_compat import HAVE_TRITON

EXPERTS, MAX_RANK = 5, 20
RANKS = [[16, 16], [3, 0], [20, 20]]
SCALES = [[0.5, 0.5], [2.0, 1.0], [1.3, 1.3]]
SLOTS = [0, -1, 2, 1, 0, -1, 2, 1, 1, 0, 2, 2, 0]


def make_factors(inputs, outputs, dtype, *, own=(EXPERTS, EXPERTS), targets=2, first_column=0) -> ExpertFactors:
    """Factors of three slots; beyond a slot's rank lies what must never be read."""
    a = 0.1 * random(len(RANKS), targets, own[0], MAX_RANK, inputs, dtype=dtype)
    b = 0.1 * random(len(RANKS), targets, own[1], outputs, MAX_RANK, dtype=dtype)
    for slot, ranks in enumerate(RANKS):
        for target in range(targets):
            a[slot, target, :, ranks[target] :] = float("nan")
            b[slot, target, :, :, ranks[target] :] = float("nan")
    return ExpertFactors(
        a_SPXRI=a,
        b_SPXOR=b,
        first_column=first_column,
        ranks_SP=torch.tensor(RANKS, dtype=torch.int32, device=DEVICE)[:, :targets].contiguous(),
        scales_SP=torch.tensor(SCALES, device=DEVICE)[:, :targets].contiguous(),
    )


def choose_experts(tokens, per_token=2):
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:per_token] for _ in range(tokens)]).to(DEVICE)


def one_by_one(y, x, factors, experts_Tk, slots, per_token):
    """Every row by the formula, in float64; ``x`` has a row for each token or for each row."""
    out, flat = y.double().clone(), experts_Tk.flatten().tolist()
    for row, expert in enumerate(flat):
        slot = slots[row // experts_Tk.shape[1]]
        for target, (start, stop) in enumerate(factors.list_spans() if slot >= 0 else []):
            rank = RANKS[slot][target]
            a_XRI, b_XOR = factors.a_SPXRI[slot, target].double(), factors.b_SPXOR[slot, target].double()
            a_rI, b_Or = a_XRI[expert % len(a_XRI), :rank], b_XOR[expert % len(b_XOR), :, :rank]
            out[row, start:stop] += b_Or @ (a_rI @ x[row // per_token].double()) * SCALES[slot][target]
    return out


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [(EXPERTS, EXPERTS), (1, EXPERTS), (EXPERTS, 1)], ids=str)
@pytest.mark.parametrize("per_token", [2, 1])
def test_each_row_gets_the_product_of_its_adapter_and_expert(dtype, own, per_token, poisoned):
    experts_Tk, slots_T = choose_experts(len(SLOTS)), torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
    targets, first = (2, 0) if per_token == 2 else (1, 8)
    factors = make_factors(48, 24, dtype, own=own, targets=targets, first_column=first)
    x, y = random(26 // per_token, 48, dtype=dtype), random(26, 50, dtype=dtype)
    plan = experts.plan_expert_tiles(experts_Tk, slots_T, num_experts=EXPERTS, num_slots=3, tile_rows=16)
    wanted = one_by_one(y, x, factors, experts_Tk, SLOTS, per_token)
    got = experts.add_expert_rows(y.clone(), x, factors, plan, num_experts=EXPERTS, per_token=per_token)
    assert apart(got, wanted) < ROUNDING[dtype]
    without = [2 * token + choice for token, slot in enumerate(SLOTS) if slot < 0 for choice in range(2)]
    assert torch.equal(got[without], y[without]) and torch.equal(got[:, 48:], y[:, 48:])
    rows = sort_rows_by_group(experts_Tk, EXPERTS)
    x_QI = dispatch(x, rows) if per_token == 2 else x[rows.order_R]
    slots_Q = slots_T[rows.order_R // 2]
    sorted_QN = experts.add_sorted_rows(y[rows.order_R], x_QI, factors, slots_Q, rows, numerics=FAST)
    assert apart(sorted_QN[rows.place_R], wanted) < ROUNDING[dtype]


@needs_triton
@settings(max_examples=examples(20), deadline=None)
@given(
    chosen=st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60),
    tile_rows=st.sampled_from([16, 64]),
    has_slots=st.booleans(),
)
def test_tiles_hold_every_row_with_an_adapter_once_under_its_group(chosen, tile_rows, has_slots):
    experts_Tk = torch.tensor([row[1:] for row in chosen], device=DEVICE)
    slots = [row[0] if has_slots else 0 for row in chosen]
    slots_T = torch.tensor(slots, dtype=torch.int32, device=DEVICE) if has_slots else None
    count = 3 if has_slots else 1
    plan = experts.plan_expert_tiles(experts_Tk, slots_T, num_experts=5, num_slots=count, tile_rows=tile_rows)
    rows, tiles = plan.rows_T.tolist(), plan.tiles_G3.tolist()
    found = [(row, group) for group, first, size in tiles for row in rows[first : first + size]]
    flat = enumerate(experts_Tk.flatten().tolist())
    assert sorted(found) == [(row, slots[row // 2] * 5 + expert) for row, expert in flat if slots[row // 2] >= 0]
    assert all(0 <= size <= tile_rows for _, _, size in tiles)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (True, True), (False, False)])
def test_the_fused_moe_with_adapters_is_that_of_merged_experts(dtype, gated, biased):
    """One adapter for all tokens, merged into the weights in float64, is the oracle."""
    width, size, tokens = 48, 24, 13
    targets = 2 if gated else 1
    first, down = (
        0.2 * random(EXPERTS, targets * size, width, dtype=dtype),
        0.2 * random(EXPERTS, width, size, dtype=dtype),
    )
    biases = (random(EXPERTS, targets * size, dtype=dtype), random(EXPERTS, width, dtype=dtype)) if biased else None
    factors = [
        ExpertFactors(
            a_SPXRI=0.1 * random(1, t, EXPERTS, 8, i, dtype=dtype),
            b_SPXOR=0.1 * random(1, t, EXPERTS, o, 8, dtype=dtype),
            first_column=0,
            scale=0.5,
        )
        for t, i, o in ((targets, width, size), (1, size, width))
    ]
    merged = []
    for weight, own in zip((first, down), factors, strict=True):
        delta_PXOI = own.scale * (own.b_SPXOR[0].double() @ own.a_SPXRI[0].double())
        merged.append(weight.double() + torch.cat(delta_PXOI.unbind(), 1))
    x_TD, experts_Tk = random(tokens, width, dtype=dtype), choose_experts(tokens)
    weights_Tk = random(tokens, 2, dtype=dtype).abs()
    kind = "silu" if gated else "relu2"
    wide_biases = {} if biases is None else {"first_bias_EF": biases[0].double(), "down_bias_ED": biases[1].double()}
    wanted = fused_moe.moe_forward(
        x_TD.double(), weights_Tk.double(), experts_Tk, *merged, activation=kind, numerics=FAST, **wide_biases
    )
    config = fused_moe.TILE_CONFIGS[0]
    got = fused_moe.launch_with_lora(
        x_TD,
        weights_Tk,
        experts_Tk,
        first,
        down,
        biases or (None, None),
        kind,
        False,
        config,
        ExpertLora(first=factors[0], down=factors[1]),
    )
    assert apart(got, wanted) < 3 * ROUNDING[dtype]


PROGRAM = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

family, arch, wave, limit, max_rank = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget(family, int(arch) if family == "cuda" else arch, wave)

driver.set_active(Card())
launch, names = JITFunction.run, []

def compile_only(self, *args, grid, warmup, **more):
    kernel = launch(self, *args, grid=grid, warmup=True, **more)
    assert kernel.metadata.shared <= limit, kernel.metadata
    names.append(self.fn.__name__)
    return kernel

JITFunction.run = compile_only
from miles.kernels.runtime import triton_compat
if family == "cuda" and int(arch) >= 90:
    triton_compat.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}
from miles.kernels.lora.experts import ExpertFactors, ExpertLora
from miles.kernels.moe import fused_moe

half = torch.bfloat16
tables = {"ranks_SP": torch.ones(4, 2, dtype=torch.int32), "scales_SP": torch.ones(4, 2)}
for slots, own, more in ((1, 128, {}), (4, 1, tables)):
    factors = [
        ExpertFactors(
            a_SPXRI=torch.zeros(slots, targets, own, max_rank, inputs, dtype=half),
            b_SPXOR=torch.zeros(slots, targets, own, outputs, max_rank, dtype=half),
            first_column=0,
            **more,
        )
        for targets, inputs, outputs in ((2, 2048, 768), (1, 768, 2048))
    ]
    lora = ExpertLora(first=factors[0], down=factors[1], slots_T=torch.zeros(4, dtype=torch.int32) if more else None)
    weights = torch.zeros(128, 1536, 2048, dtype=half), torch.zeros(128, 2048, 768, dtype=half)
    for config in fused_moe.LARGE_SMEM_TILE_CONFIGS if limit > 200000 else fused_moe.TILE_CONFIGS:
        fused_moe.apply_activation = fused_moe.gated_activation = lambda x, kind, interleaved: x[:, :768].contiguous()
        fused_moe.launch_with_lora(
            torch.zeros(4, 2048, dtype=half), torch.zeros(4, 8, dtype=half), torch.zeros(4, 8, dtype=torch.int64),
            *weights, (None, None), "silu", False, config, lora,
        )
assert {"plan_tiles_kernel", "expert_shrink_kernel", "expert_expand_kernel", "_expert_gemm_kernel"} <= set(names), names
"""
TARGETS = {"ampere": ("cuda", 80, 32, 163 << 10), "hopper": ("cuda", 90, 32, 227 << 10)}
TARGETS["mi300"] = ("hip", "gfx942", 64, 64 << 10)


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("name", list(TARGETS))
def test_the_kernels_compile_for(name, max_rank, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(experts.__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, (*TARGETS[name], max_rank))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
