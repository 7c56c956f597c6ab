"""The proof of the engine's device code: kernels that are right agree with torch, and one that is not is named."""

import pytest
import torch
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import CARD, DEVICE, DTYPES, needs_triton

from miles.kernels.fused import activation, gemv, qk_norm_rope, rms_norm
from miles.kernels.lora import grouped
from miles.kernels.moe import fused_moe, moe_gemv, topk_router
from miles.kernels.runtime import graph_inputs, selftest, selftest_cases
from miles.kernels.runtime.selftest import compute_relative_error, run_selftest
from miles.kernels.runtime.selftest_cases import SelfTestShapes, list_cases
from miles.kernels.runtime.triton_compat import HAVE_TRITON
from miles.kernels.sampling import sample

# The interpreter's own, of divisions by nothing that nobody reads.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SMALL = SelfTestShapes(
    features=24,
    inner=16,
    products=((40, 6),),
    experts=3,
    tokens=(3,),
    routed=24,
    heads=2,
    kv_heads=1,
    widths=(16,),
    latent=(2, 40, 32),
    lengths=(70, 66, 1),
    shared=64,
    window=30,
    vocabulary=100,
)
NAMES = [case.name for case in list_cases(SMALL)]


@pytest.fixture
def on_device(monkeypatch):
    """Device code without a card too; float64 is torch's everywhere."""
    if not CARD:
        for module in (
            graph_inputs,
            sample,
            fused_moe,
            activation,
            rms_norm,
            qk_norm_rope,
            topk_router,
            gemv,
            moe_gemv,
            grouped,
        ):
            monkeypatch.setattr(module, "use_triton_inference", lambda x: x.dtype != torch.float64)


@pytest.fixture
def launches(monkeypatch):
    """One entry for each launch in the interpreter; None where there is a card."""
    if CARD or not HAVE_TRITON:
        return None
    from triton.runtime.interpreter import GridExecutor

    seen, launch = [], GridExecutor.__call__

    def counted(self, *given, **more):
        seen.append(self.fn)
        return launch(self, *given, **more)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return seen


def only(monkeypatch, *names):
    """Try these alone: others take their time in the interpreter."""
    monkeypatch.setattr(
        selftest, "list_cases", lambda shapes: (case for case in list_cases(shapes) if case.name in names)
    )


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_runs_and_agrees_with_torch(on_device, launches, dtype):
    tried = []
    for outcome in run_selftest(DEVICE, dtype, SMALL):
        assert outcome.has_passed and outcome.error is None, outcome
        assert outcome.dtype == str(dtype).removeprefix("torch."), outcome
        assert launches is None or launches, f"{outcome.name} launched nothing"
        tried.append(outcome.name)
        if launches:
            launches.clear()
    assert tried == NAMES == list(dict.fromkeys(NAMES))


@pytest.mark.skipif(not CARD, reason="needs an accelerator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_card_kernels_agree_in_the_shapes_of_models(dtype):
    assert not [outcome for outcome in run_selftest(DEVICE, dtype) if not outcome.has_passed]


@needs_triton
def test_one_row_that_is_a_little_off_is_found_and_named(on_device, monkeypatch):
    def nudged(x, *rest, **more):
        out = rms_norm.rms_norm(x, *rest, **more)
        if x.dtype != torch.float64:
            out[3] *= 1.03
        return out

    only(monkeypatch, "norm", "gemv")
    monkeypatch.setattr(selftest_cases, "rms_norm", nudged)
    off, right = run_selftest(DEVICE, DTYPES[1], SMALL)
    assert (off.name, off.has_passed, off.error) == ("norm", False, None) and off.relative_error == pytest.approx(
        0.03, rel=0.1
    )
    assert right.has_passed


@needs_triton
def test_an_expert_that_is_not_the_best_and_a_token_that_was_not_drawn_are_found(on_device, monkeypatch):
    def second_best(logits, *rest, **more):
        weights, chosen = topk_router.route_topk(logits, *rest, **more)
        return weights, chosen.flip(1) if logits.dtype != torch.float64 else chosen

    def late(logits, *rest, tokens_out_B, **more):
        sample.sample_tokens(logits, *rest, tokens_out_B=tokens_out_B, **more)
        tokens_out_B += logits.dtype != torch.float64

    only(monkeypatch, "router", "sampling")
    monkeypatch.setattr(selftest_cases, "route_topk", second_best)
    monkeypatch.setattr(selftest_cases, "sample_tokens", late)
    router, drawing = run_selftest(DEVICE, DTYPES[1], SMALL)
    assert not router.has_passed and router.relative_error > 0.5
    assert not drawing.has_passed and drawing.relative_error == 1


def test_a_kernel_that_fails_is_named_with_what_was_said_and_the_others_are_tried(monkeypatch):
    class CompilationError(Exception):
        pass

    def refused(*_given, **_how):
        try:
            raise CompilationError("at 3:11:\n    x = tl.dot(a, b)\n        ^\nValueError('no such tile')")
        except CompilationError as error:
            raise CompilationError("at 9:4:\n    y = product(a, b)") from error

    def full(*_given, **_how):
        raise RuntimeError("out of resource: shared memory\n\nat a place")

    only(monkeypatch, "norm", "activation", "gemv")
    monkeypatch.setattr(selftest_cases, "rms_norm", refused)
    monkeypatch.setattr(selftest_cases, "gated_activation_inference", full)
    first, second, third = run_selftest(torch.device("cpu"), torch.float32, SMALL)
    assert (first.name, first.error) == ("norm", "CompilationError: ValueError('no such tile')")
    assert (second.name, second.error) == ("activation", "RuntimeError: out of resource: shared memory")
    assert not first.has_passed and not second.has_passed and third.has_passed


def test_nothing_is_tried_on_a_card_that_a_kernel_was_too_much_for(monkeypatch):
    def stray(*_given, **_how):
        raise RuntimeError("an illegal memory access was encountered")

    answers = iter([True, False, False])
    monkeypatch.setattr(selftest, "_is_responding", lambda device: next(answers))
    monkeypatch.setattr(selftest_cases, "rms_norm", stray)
    (outcome,) = run_selftest(torch.device("cpu"), torch.float16, SMALL)
    behind = f"({len(NAMES) - 1} further tests were skipped: the GPU no longer responds)"
    assert outcome.error == f"RuntimeError: an illegal memory access was encountered {behind}"
    assert not list(run_selftest(torch.device("cpu"), torch.float32, SMALL))


def test_distance_is_that_of_the_worst_row():
    wanted = torch.ones(100, 4)
    got = wanted.clone()
    got[7] *= 1.5
    assert compute_relative_error(got, wanted) == pytest.approx(0.5) and compute_relative_error(wanted, wanted) == 0
    assert compute_relative_error(got.flatten(), wanted.flatten()) == pytest.approx(0.05)
    assert compute_relative_error(torch.full((2, 2), float("nan")), torch.ones(2, 2)) == float("inf")
    assert compute_relative_error(torch.ones(2, 2), torch.full((2, 2), float("nan"))) == float("inf")
    assert compute_relative_error(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 4, 4])) == 0.25
    with pytest.raises(AssertionError, match="expected"):
        compute_relative_error(torch.ones(2), torch.ones(3))
