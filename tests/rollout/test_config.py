"""The rollout plane's knobs, and what they become."""

import subprocess
import sys
from dataclasses import fields

from miles.core.protocols import SamplingParams
from miles.rollout.config import RolloutConfig, resolve_context_limit
from miles.rollout.sampling import (
    build_eval_sampling,
    build_training_sampling,
    resolve_prompt_limit,
)


def test_every_knob_explains_itself_in_one_sentence():
    for knob in fields(RolloutConfig):
        help = knob.metadata["help"]
        assert help[0].isupper() and help.endswith("."), knob.name


def test_sampling_follows_the_knobs():
    config = RolloutConfig(
        rollout_temperature=0.8, rollout_top_p=0.9, rollout_top_k=20, rollout_max_response_len=64,
        rollout_stop=("</a>",), rollout_stop_token_ids=(3,),
    )  # fmt: skip
    expected = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=20, max_new_tokens=64, stop=("</a>",), stop_token_ids=(3,)
    )
    assert build_training_sampling(config) == expected
    assert build_eval_sampling(config) == expected


def test_evaluation_may_have_requests_of_its_own():
    config = RolloutConfig(eval_temperature=0.0, eval_top_p=0.5, eval_top_k=1, eval_max_response_len=8)
    assert build_eval_sampling(config) == SamplingParams(temperature=0.0, top_p=0.5, top_k=1, max_new_tokens=8)
    assert build_training_sampling(config).temperature == 1.0


def test_the_tightest_limit_counts():
    assert resolve_prompt_limit(RolloutConfig()) is None
    assert resolve_prompt_limit(RolloutConfig(rollout_max_prompt_len=8)) == 8
    assert resolve_prompt_limit(RolloutConfig(rollout_max_context_len=8)) == 7
    assert resolve_prompt_limit(RolloutConfig(rollout_max_context_len=8, rollout_max_prompt_len=8)) == 7
    assert resolve_context_limit(RolloutConfig(), 64) == 64
    assert resolve_context_limit(RolloutConfig(rollout_max_context_len=8), 64) == 8
    assert resolve_context_limit(RolloutConfig(rollout_max_context_len=100), 64) == 64


def loaded(*modules: str) -> set[str]:
    """What a fresh interpreter has loaded after importing ``modules``."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_room_loads_no_torch_and_its_knobs_not_even_numpy():
    light = loaded("miles.rollout.config", "miles.rollout.data.paths", "miles.rollout.reward.registry")
    assert not light & {"numpy", "torch", "transformers", "pyarrow"}
    room = [
        "data.dataset",
        "prompt_renderer",
        "group_rollout",
        "offline.sft",
        "filters",
        "evaluate",
        "sampling",
        "generate.single_turn",
    ]
    whole = loaded(
        *(f"miles.rollout.{name}" for name in room), "miles.rollout.reward.adapter", "miles.models.tokenizer"
    )
    assert not whole & {"torch", "transformers", "pyarrow"}
