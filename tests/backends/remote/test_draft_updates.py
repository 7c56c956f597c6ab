"""Draft models in weight updates: their names, what stock SGLang's draft worker is sent, and what servers verify."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.test_draft_heads import SPEC, make_engine

from miles.backends.native.server.weights.staging import WeightStaging
from miles.backends.native.server.weights.update import WeightUpdater, list_tensors
from miles.backends.remote.client import RequestRejected, SglangClient
from miles.backends.remote.sglang_flags import get_flag_value
from miles.backends.remote.transports.buckets import iter_hf_named, pack_bucket
from miles.backends.remote.update_protocols import InPlaceUpdate
from miles.core.errors import SyncError
from miles.models.draft.spec import DRAFT_PREFIX
from miles.sync.manifest import ManifestEntry, compute_digests


def test_a_head_travels_behind_the_policy_under_its_own_names_or_those_of_a_checkpoint():
    decoder = Tiny().decoder(spec=SPEC)
    policy = dict(decoder.named_parameters())
    drafts = {"draft.model.layers.2.eh_proj.weight": torch.ones(2, 4)}
    ours = dict(iter_hf_named(SPEC, policy | drafts))
    theirs = dict(iter_hf_named(SPEC, policy | drafts, "checkpoint"))
    plain = dict(iter_hf_named(SPEC, policy))
    assert list(ours) == [*plain, "draft.model.layers.2.eh_proj.weight"]
    assert list(theirs) == [*plain, "model.layers.2.eh_proj.weight"]


# -- miles serve ----------------------------------------------------------------------------


def test_a_server_verifies_the_digests_of_a_head_and_commits_it_with_the_policy():
    tiny = Tiny()
    decoder = tiny.decoder(spec=SPEC, scale=6.0)
    engine, head = make_engine(tiny, decoder, 2)
    with torch.no_grad():
        fresh = {DRAFT_PREFIX + name: parameter * 0.5 for name, parameter in head.named_parameters()}
        sent = dict(iter_hf_named(SPEC, dict(decoder.named_parameters()) | fresh))
    entries = [ManifestEntry(name=n, shape=tuple(t.shape), dtype="float32", digest=0) for n, t in sent.items()]
    staging, digests = WeightStaging(engine), compute_digests(sent)
    staging.begin(entries, whole=True)
    staging.add_tensors({name: tensor.detach() for name, tensor in sent.items()})
    with pytest.raises(SyncError, match=r"draft\.norm\.weight has digest"):
        staging.verify(digests | {"draft.norm.weight": 1})
    assert staging.verify(digests) == len(sent)
    tensors, _ = staging.take_verified()
    asyncio.run(WeightUpdater(engine, 1).update_from_tensors(tensors))
    served = list_tensors(engine.spec, engine.weights())
    assert served.keys() == sent.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in sent.items())

    wrong = [*entries[:-1], ManifestEntry(name="draft.norm.weight", shape=(3,), dtype="float32", digest=0)]
    with pytest.raises(SyncError, match=r"draft\.norm\.weight has shape \(3,\)"):
        staging.begin(wrong, whole=True)
    staging.begin([each for each in entries if not each.name.startswith(DRAFT_PREFIX)], whole=True)  # it may stay
    with pytest.raises(SyncError, match=r"draft\.x is not a tensor of this model"):
        staging.begin([*entries, ManifestEntry(name="draft.x", shape=(3,), dtype="float32", digest=0)], whole=True)


def test_an_engine_without_a_head_refuses_one():
    tiny = Tiny()
    with pytest.raises(SyncError, match=r"draft\.norm\.weight is not a tensor of this model"):
        WeightStaging(tiny.engine(tiny.decoder(spec=SPEC))).begin(
            [ManifestEntry(name="draft.norm.weight", shape=(32,), dtype="float32", digest=0)], whole=False
        )


# -- stock SGLang ---------------------------------------------------------------------------


class Recorder:
    """A client that keeps what it would send."""

    name = "engine 0"

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    async def request(self, method: str, path: str, body: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        self.sent.append((path, body))
        return {}


@pytest.mark.parametrize("foreign", [False, True])
def test_only_mtp_layers_of_the_policys_checkpoint_take_its_tensors(foreign: bool):
    client: Any = Recorder()
    slot: Any = SimpleNamespace(name="engine 0")
    update = InPlaceUpdate(slot, client, 1.0, model_path="/policy", ranks=1, has_foreign_draft=foreign)
    asyncio.run(update.send_bucket(pack_bucket([("model.norm.weight", torch.ones(2))])))
    assert client.sent[0][1]["disable_draft_model"] is foreign
    if foreign:
        with pytest.raises(RequestRejected, match="would load the policy from disk into its draft model"):
            asyncio.run(update.load_from_disk(Path("/new")))
    else:
        asyncio.run(update.load_from_disk(Path("/new")))


@pytest.mark.parametrize(
    ("info", "foreign"),
    [
        ({}, False),
        ({"speculative_algorithm": "NGRAM"}, False),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": None}, False),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/policy"}, False),
        ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/head"}, True),
    ],
)
def test_a_client_knows_the_draft_model_of_its_server(info: dict[str, Any], foreign: bool):
    client = SglangClient("http://none", "engine 0", vocab_size=8)
    model = {"model_path": "/policy", "weight_version": "0"}
    replies = {"/server_info": info, "/model_info": model, "/v1/models": {"data": [{"owned_by": "sglang"}]}}

    async def reply(method: str, path: str, body: Any = None, **more: Any) -> Any:
        return replies[path]

    client.request = reply
    assert asyncio.run(client.fetch_info()).has_foreign_draft is foreign
    model["model_path"] = "/from-disk"  # as after an update from there
    assert asyncio.run(client.fetch_info()).has_foreign_draft is foreign


def test_the_last_value_of_a_passed_flag_counts():
    words = ["--speculative-algorithm", "EAGLE", "--speculative_algorithm=NEXTN", "--log-requests"]
    assert get_flag_value(words, "speculative-algorithm") == "NEXTN"
    assert get_flag_value(words, "speculative-draft-model-path") is None
