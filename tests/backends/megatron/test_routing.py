"""Routing replay: the experts of an earlier forward, replayed by Megatron's routers in every parallel layout."""

from pathlib import Path
from typing import Any

import pytest
from tests.backends.megatron import cases
from tests.backends.megatron.test_model import AGAIN, layout
from tests.pool import ranks

pytestmark = pytest.mark.megatron
OWN = {"use_routing_replay": True, "use_tis": True, "tis_batch_normalize": True}
"""With weights of mean 1 log-probs are read before the step, and experts along with them."""


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ({"pipeline": 2}, AGAIN),
        ({"context": 2, "expert": 2}, ()),
        ({"tensor": 2, "sequence": True, "expert_tensor": 1}, ()),
    ],
    ids=["pipeline", "context", "sequence"],
)
def test_what_a_first_look_used_is_used_again_token_by_token(tmp_path: Path, sizes: dict[str, Any], flags: Any):
    folder, batch = cases.written(tmp_path / "model", "qwen3_moe"), cases.samples("qwen3_moe")
    wanted = cases.alone(folder, batch, OWN)
    where = layout(sizes)
    for found in ranks(where.world, cases.shared, folder, where, flags, batch, OWN, None):
        assert found["metrics"]["routing_mismatch_ratio"] == wanted["metrics"]["routing_mismatch_ratio"] == 0
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)


def test_the_engines_experts_and_its_own_go_together(tmp_path: Path):
    folder, batch = cases.written(tmp_path / "model", "qwen3_moe"), cases.samples("qwen3_moe")
    algo, where = OWN | {"use_rollout_routing_replay": True}, layout({"context": 2})
    wanted = cases.alone(folder, batch, algo)
    for found in ranks(2, cases.shared, folder, where, (), batch, algo, None):
        assert found["metrics"]["routing_mismatch_ratio"] == wanted["metrics"]["routing_mismatch_ratio"] > 0.1
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
