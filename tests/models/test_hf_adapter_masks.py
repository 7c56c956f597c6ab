"""Masks of transformers' own modules, read off the rules they are made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils

from miles.models.hf_adapter import attention


@settings(deadline=None)
@given(window=st.integers(1, 90), positions=st.integers(2, 80), kind=st.sampled_from(["window", "chunk", "causal"]))
def test_a_mask_is_read_off_its_rule(window, positions, kind):
    rule = {
        "window": masking_utils.sliding_window_causal_mask_function(window),
        "chunk": masking_utils.chunked_causal_mask_function(window, torch.zeros(1, dtype=torch.long)),
        "causal": masking_utils.causal_mask_function,
    }[kind]
    read = attention._classify_mask(
        attention.MaskRule(rule), torch.arange(positions), window if kind == "chunk" else None
    )
    q, k = torch.arange(positions)[:, None], torch.arange(positions)
    zero = torch.zeros((), dtype=torch.long)
    wanted = torch.as_tensor(rule(zero, zero, q, k)).expand(positions, positions)
    shown = k <= q
    if read[0] is not None:
        shown = shown & (k > q - read[0])
    if read[1] is not None:
        shown = shown & (k // read[1] == q // read[1])
    assert torch.equal(shown, wanted)


@pytest.mark.parametrize(
    "rule",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k % 2 == q % 2),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k >= q // 7 * 5),
        lambda b, h, q, k: torch.zeros(3)[k] == 0,
    ],
)
def test_a_mask_that_is_something_else_is_refused(rule):
    with pytest.raises(attention.UnsupportedModelError, match="mask"):
        attention._classify_mask(attention.MaskRule(rule), torch.arange(64), None)
