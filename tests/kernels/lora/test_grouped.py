"""Grouped LoRA: every row gets what its own adapter adds to it, whatever rows are beside it.

Shapes: T rows, I inputs, N outputs, S slots, R the largest rank.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.device import DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.tiers import examples

from miles.kernels.fused.activation import gated_activation
from miles.kernels.fused.lm_head import HeadLora, compute_logits
from miles.kernels.lora import grouped
from miles.kernels.lora.grouped import LoraPlan, LoraSlots, build_tiles, count_tiles, split_columns
from miles.kernels.numerics import FAST, numerics_from_parity
from miles.kernels.runtime.triton_compat import HAVE_TRITON
from miles.models.layers.lora import add_lora
from miles.models.lora.layout import LoraLayout

EXACT = numerics_from_parity("exact")
SPANS = ((0, 40), (40, 56), (60, 70))  # a gap that no target covers
MAX_RANK = 24
RANKS = [[16, 16, 16], [3, 0, 8], [24, 24, 24], [0, 0, 0]]
SCALES = [[0.5] * 3, [2.0, 1.0, 0.25], [1.3] * 3, [1.0] * 3]


def make_slots(inputs, dtype=torch.float32, max_rank=MAX_RANK, spans=SPANS, ranks=RANKS) -> LoraSlots:
    """Slots of these ranks; beyond a slot's rank lies what must never be read."""
    outputs = sum(stop - start for start, stop in spans)
    a_SPRI = 0.1 * random(len(ranks), len(spans), max_rank, inputs, dtype=dtype)
    b_SOR = 0.1 * random(len(ranks), outputs, max_rank, dtype=dtype)
    for slot, own in enumerate(ranks):
        first = 0
        for target, (start, stop) in enumerate(spans):
            a_SPRI[slot, target, own[target] :] = float("nan")
            b_SOR[slot, first : first + stop - start, own[target] :] = float("nan")
            first += stop - start
    return LoraSlots(
        a_SPRI=a_SPRI,
        b_SOR=b_SOR,
        ranks_SP=torch.tensor(ranks, dtype=torch.int32, device=DEVICE),
        scales_SP=torch.tensor([own[: len(spans)] for own in SCALES[: len(ranks)]], device=DEVICE),
        columns_C4=torch.from_numpy(split_columns(spans)).to(DEVICE),
        spans=tuple(spans),
    )


def make_plan(slots_T, tile_rows=16, padding=0) -> LoraPlan:
    rows, tiles = build_tiles(np.array(slots_T, np.int64), tile_rows)
    tiles = np.concatenate((tiles, np.zeros((padding, 3), np.int32)))
    return LoraPlan(
        rows_T=torch.from_numpy(np.pad(rows, (0, 16))).to(DEVICE),
        tiles_G3=torch.from_numpy(tiles).to(DEVICE),
        tile_rows=tile_rows,
    )


def one_by_one(y_TN, x_TI, slots: LoraSlots, slots_T):
    """Every row by the formula, in float64."""
    out = y_TN.double().clone()
    for row, slot in enumerate(slots_T):
        first = 0
        for target, (start, stop) in enumerate(slots.spans):
            rank, last = int(slots.ranks_SP[slot, target]) if slot >= 0 else 0, first + stop - start
            if rank:
                a_rI = slots.a_SPRI[slot, target, :rank].double()
                b_Or = slots.b_SOR[slot, first:last, :rank].double()
                out[row, start:stop] += b_Or @ (a_rI @ x_TI[row].double()) * slots.scales_SP[slot, target].double()
            first = last
    return out


MIXED = [0, -1, 2, 1, 0, 3, -1, 2, *[1] * 20, -1, 0]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "splits"), [(48, None), (1100, None), (1100, 1)])
def test_each_row_gets_the_product_of_its_own_adapter(dtype, inputs, splits, poisoned):
    slots, x_TI, y_TN = make_slots(inputs, dtype), random(30, inputs, dtype=dtype), random(30, 72, dtype=dtype)
    wanted = one_by_one(y_TN, x_TI, slots, MIXED)
    plan = make_plan(MIXED, padding=3)
    kernel = grouped.launch_grouped_lora(y_TN.clone(), x_TI, slots, plan, splits=splits)
    reference = grouped.add_grouped_lora_reference(y_TN.clone(), x_TI, slots, plan, numerics=FAST)
    assert apart(reference, wanted) < ROUNDING[dtype]
    assert apart(kernel, wanted) < ROUNDING[dtype]
    without = [row for row, slot in enumerate(MIXED) if slot in (-1, 3)]
    assert torch.equal(kernel[without], y_TN[without]) and torch.equal(reference[without], y_TN[without])
    assert torch.equal(kernel[:, 56:60], y_TN[:, 56:60]) and torch.equal(kernel[:, 70:], y_TN[:, 70:])


@needs_triton
@pytest.mark.parametrize("splits", [None, 1])
def test_a_row_comes_out_the_same_whatever_rows_are_beside_it(splits):
    slots, x_TI, y_TN = make_slots(1024), random(30, 1024), random(30, 72)
    together = grouped.launch_grouped_lora(y_TN.clone(), x_TI, slots, make_plan(MIXED), splits=splits)
    for row in (0, 2, 12, 29):
        alone = grouped.launch_grouped_lora(
            y_TN[row : row + 1].clone(), x_TI[row : row + 1], slots, make_plan([MIXED[row]]), splits=splits
        )
        assert torch.equal(alone[0], together[row])


@needs_triton
def test_logits_get_the_product_in_float32(poisoned):
    """Of factors in half precision only the low-rank rows are rounded, as where a trainer computes log-probs."""
    dtype = torch.float16
    slots = make_slots(48, dtype, spans=((0, 200),), ranks=[[16], [3], [24], [0]])
    x_TI, y_TN = random(30, 48, dtype=dtype), random(30, 200)
    plan = make_plan(MIXED, padding=3)
    kernel = grouped.launch_grouped_lora(y_TN.clone(), x_TI, slots, plan)
    reference = grouped.add_grouped_lora_reference(y_TN.clone(), x_TI, slots, plan, numerics=FAST)
    wanted = y_TN.clone()
    for slot, rank in enumerate((16, 3, 24)):
        rows = [row for row, own in enumerate(MIXED) if own == slot]
        head = HeadLora(
            a_rD=slots.a_SPRI[slot, 0, :rank],
            b_Vr=slots.b_SOR[slot, :, :rank].contiguous(),
            scale=SCALES[slot][0],
            numerics=FAST,
        )
        wanted[rows] = head(wanted[rows], x_TI[rows])
    assert kernel.dtype == torch.float32
    assert apart(kernel, wanted) < 1e-4 and apart(reference, wanted) < 1e-4
    without = [row for row, slot in enumerate(MIXED) if slot in (-1, 3)]
    assert torch.equal(kernel[without], y_TN[without])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_exact_parity_logits_have_the_bits_of_the_trainer(dtype):
    slots = make_slots(48, dtype, spans=((0, 200),), ranks=[[16], [3], [24], [0]])
    x_TI, head_VD = random(30, 48, dtype=dtype), random(200, 48, dtype=dtype)
    with torch.inference_mode():
        served = compute_logits(
            x_TI,
            head_VD,
            7.0,
            numerics=EXACT,
            adapter=lambda y, x: grouped.add_grouped_lora(y, x, slots, make_plan(MIXED), numerics=EXACT),
        )
    a_rD, b_Vr = slots.a_SPRI[1, 0, :3].contiguous(), slots.b_SOR[1, :, :3].contiguous()
    head = HeadLora(a_rD=a_rD, b_Vr=b_Vr, scale=SCALES[1][0], numerics=EXACT)
    rows = [row for row, slot in enumerate(MIXED) if slot == 1]
    with torch.no_grad():
        assert torch.equal(served[rows], compute_logits(x_TI[rows], head_VD, 7.0, numerics=EXACT, adapter=head))


GATED = ((0, 36), (36, 72))
GATED_RANKS = [[16, 16], [3, 0], [24, 24], [0, 0]]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "tile_rows"), [(48, 16), (1100, 16), (1100, 64)])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_the_gated_activation_behind_the_adapters_is_that_of_their_sum(dtype, inputs, tile_rows, kind, poisoned):
    slots = make_slots(inputs, dtype, spans=GATED, ranks=GATED_RANKS)
    x_TI, y_TN = random(30, inputs, dtype=dtype), random(30, 72, dtype=dtype)
    plan = make_plan(MIXED, tile_rows, padding=3)
    apart_TN = grouped.launch_grouped_lora(y_TN.clone(), x_TI, slots, plan)
    with torch.inference_mode():
        fused = grouped.launch_gated_lora(y_TN, x_TI, slots, plan, kind)
    assert apart(fused, gated_activation(apart_TN, kind)) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_exact_parity_a_row_has_the_bits_of_an_adapter_beside_its_own_weight(dtype):
    slots, x_TI, y_TN = make_slots(48, dtype), random(30, 48, dtype=dtype), random(30, 72, dtype=dtype)
    with torch.inference_mode():
        out = grouped.add_grouped_lora(y_TN.clone(), x_TI, slots, make_plan(MIXED), numerics=EXACT)
    a_XI = slots.a_SPRI[0, :, :16].reshape(-1, 48).contiguous()
    layout = LoraLayout(rows=SPANS, rank=16, scale=SCALES[0][0])
    with torch.no_grad():
        alone = add_lora(y_TN, x_TI, a_XI, slots.b_SOR[0, :, :16].contiguous(), layout, numerics=EXACT)
    rows = [row for row, slot in enumerate(MIXED) if slot == 0]
    assert torch.equal(out[rows], alone[rows])


@needs_triton
def test_the_same_buffers_serve_other_rows_and_other_adapters():
    """As a CUDA graph replays: the launches are those of the first call, only what lies in the buffers has changed."""
    slots, x_TI, y_TN = make_slots(48), random(30, 48), random(30, 72)
    plan = LoraPlan(
        rows_T=torch.zeros(30, dtype=torch.int32, device=DEVICE),
        tiles_G3=torch.zeros(count_tiles(30, 4, 16), 3, dtype=torch.int32, device=DEVICE),
        tile_rows=16,
    )
    for chosen in (MIXED, [-1] * 30, [2] * 30, MIXED[::-1]):
        rows, tiles = build_tiles(np.array(chosen, np.int64), 16)
        plan.rows_T[: len(rows)] = torch.from_numpy(rows).to(DEVICE)
        plan.tiles_G3.zero_()[: len(tiles)] = torch.from_numpy(tiles).to(DEVICE)
        slots.a_SPRI[1, 0, :3] = random(3, 48)
        wanted = one_by_one(y_TN, x_TI, slots, chosen)
        assert apart(grouped.launch_grouped_lora(y_TN.clone(), x_TI, slots, plan), wanted) < 1e-5


@settings(max_examples=examples(60), deadline=None)
@given(slots_T=st.lists(st.integers(-1, 5), min_size=1, max_size=90), tile_rows=st.sampled_from([16, 64]))
def test_tiles_hold_every_row_once_under_its_slot(slots_T, tile_rows):
    rows, tiles = build_tiles(np.array(slots_T, np.int64), tile_rows)
    found = [(int(row), int(slot)) for slot, first, count in tiles for row in rows[first : first + count]]
    assert sorted(found) == list(enumerate(slots_T))
    ends = [slot for slot, _, _ in tiles if slot < 0]
    assert ends == [slot for slot, _, _ in tiles[len(tiles) - len(ends) :]], "rows without an adapter are last"
    assert len(tiles) <= count_tiles(len(slots_T), 6, tile_rows)
    assert all(0 < count <= tile_rows for _, _, count in tiles)


TARGETS = {"ampere": ("cuda", 80, 32), "hopper": ("cuda", 90, 32), "blackwell": ("cuda", 100, 32)}
TARGETS["mi300"] = ("hip", "gfx942", 64)
LIMITS = {"ampere": 163 * 1024, "hopper": 227 * 1024, "blackwell": 227 * 1024, "mi300": 64 * 1024}
PROGRAM = """
import sys
import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

family, arch, wave, limit, max_rank, tile_rows = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget(family, int(arch) if family == "cuda" else arch, wave)

driver.set_active(Card())
launch, names = JITFunction.run, []

def compile_only(self, *args, grid, warmup, **more):
    kernel = launch(self, *args, grid=grid, warmup=True, **more)
    assert kernel.metadata.shared <= limit, kernel.metadata
    text = kernel.asm["ptx"] if family == "cuda" else kernel.asm["amdgcn"]
    assert ("mma" if family == "cuda" else "mfma") in text
    names.append(self.fn.__name__)
    return kernel

JITFunction.run = compile_only
from miles.kernels.runtime import triton_compat
if family == "cuda" and int(arch) >= 90:
    triton_compat.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}
from miles.kernels.lora.grouped import LoraPlan, LoraSlots, build_tiles, split_columns
from miles.kernels.lora.grouped import launch_gated_lora, launch_grouped_lora

half, spans = torch.bfloat16, ((0, 4096), (4096, 5120), (5120, 6144))
rows, tiles = build_tiles(np.array([0, -1, 1, 1]), tile_rows)
slots = LoraSlots(
    a_SPRI=torch.zeros(2, 3, max_rank, 4096, dtype=half),
    b_SOR=torch.zeros(2, 6144, max_rank, dtype=half),
    ranks_SP=torch.ones(2, 3, dtype=torch.int32),
    scales_SP=torch.ones(2, 3),
    columns_C4=torch.from_numpy(split_columns(spans)),
    spans=spans,
)
plan = LoraPlan(rows_T=torch.from_numpy(rows), tiles_G3=torch.from_numpy(tiles), tile_rows=tile_rows)
launch_grouped_lora(torch.zeros(4, 6144, dtype=half), torch.zeros(4, 4096, dtype=half), slots, plan)
assert names == ["shrink_kernel", "expand_kernel"], names
launch_grouped_lora(torch.zeros(4, 6144), torch.zeros(4, 4096, dtype=half), slots, plan)  # logits
names = names[2:]
assert names == ["shrink_kernel", "expand_kernel"], names
slots = LoraSlots(
    a_SPRI=torch.zeros(2, 2, max_rank, 4096, dtype=half),
    b_SOR=torch.zeros(2, 6144, max_rank, dtype=half),
    ranks_SP=torch.ones(2, 2, dtype=torch.int32),
    scales_SP=torch.ones(2, 2),
    columns_C4=torch.zeros(0, 4, dtype=torch.int32),
    spans=((0, 3072), (3072, 6144)),
)
launch_gated_lora(torch.zeros(4, 6144, dtype=half), torch.zeros(4, 4096, dtype=half), slots, plan, "silu")
assert names[2:] == ["shrink_kernel", "expand_gated_kernel"], names
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
@pytest.mark.parametrize(("max_rank", "tile_rows"), [(16, 16), (64, 64), (256, 16)])
@pytest.mark.parametrize("name", list(TARGETS))
def test_the_kernels_compile_for(name, max_rank, tile_rows, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(grouped.__file__).parents[3])}
    given = map(str, (*TARGETS[name], LIMITS[name], max_rank, tile_rows))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
