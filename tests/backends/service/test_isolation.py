"""Tenants: each sees, names and lists only its own, shares passes with others, and stays within its quotas."""

import json
import urllib.request

import pytest
from tests.backends.service.live import ALICE, BOB, serving
from tests.backends.service.raw import Raw, encode_train, read_loss

TOKENS = [5, 17, 300, 44, 8, 99, 120]


@pytest.fixture(scope="module")
def alice(live):
    return Raw(live.url, ALICE)


@pytest.fixture(scope="module")
def bob(live):
    return Raw(live.url, BOB)


@pytest.fixture(scope="module")
def owned(alice, model):
    """What Alice has: a run, its session, a checkpoint, a sampler, and the ids of requests."""
    run = alice.open_run(str(model))
    session = run.partition(":")[0]
    trained = alice.train(run, 1, [TOKENS])
    alice.result(trained)
    alice.result(alice.post("save_weights", model_id=run, seq_id=2, path="mine"))
    saved = alice.post("save_weights_for_sampler", model_id=run, seq_id=3, sampling_session_seq_id=0)
    sampler = alice.result(saved)["sampling_session_id"]
    return {
        "run": run,
        "session": session,
        "sampler": sampler,
        "path": f"tinker://{run}/weights/mine",
        "request": trained["request_id"],
    }


def sample_body(**more):
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    return {"prompt": prompt, "sampling_params": {"max_tokens": 2}, "num_samples": 1} | more


def list_attempts(owned, session):
    run, path = owned["run"], owned["path"]
    yield "POST", "retrieve_future", {"request_id": owned["request"]}
    yield "POST", "cancel_future", {"request_id": owned["request"]}
    yield "POST", "get_info", {"model_id": run}
    yield "POST", "optim_step", {"model_id": run, "seq_id": 4, "adam_params": {}}
    yield "POST", "save_weights", {"model_id": run, "seq_id": 4, "path": "stolen"}
    yield "POST", "unload_model", {"model_id": run, "seq_id": 4}
    yield "POST", "weights_info", {"tinker_path": path}
    yield (
        "POST",
        "create_model",
        {
            "session_id": owned["session"],
            "model_seq_id": 5,
            "base_model": "any",
            "lora_config": {"rank": 4},
        },
    )
    yield "POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 3, "model_path": path}
    yield "POST", "create_sampling_session", {"session_id": owned["session"], "sampling_session_seq_id": 3}
    yield "POST", "join_sampling_session", {"sampling_session_id": owned["sampler"]}
    yield "POST", "asample", sample_body(sampling_session_id=owned["sampler"], seq_id=0)
    yield "POST", "asample", sample_body(model_path=path)
    yield "POST", "session_heartbeat", {"session_id": owned["session"]}
    yield "POST", f"sessions/{owned['session']}/finish", {}
    yield "GET", f"sessions/{owned['session']}", None
    yield "GET", f"samplers/{owned['sampler']}", None
    yield "GET", f"training_runs/{run}", None
    yield "GET", f"training_runs/{run}/checkpoints", None
    yield "GET", f"training_runs/{run}/checkpoints/weights/mine/external_weights_urls", None
    yield "DELETE", f"training_runs/{run}/checkpoints/weights/mine", None
    yield "PUT", f"training_runs/{run}/checkpoints/weights/mine/ttl", {"ttl_seconds": 3600}


def test_nothing_of_another_tenant_exists(owned, alice, bob):
    session = bob.post("create_session", tags=[], user_metadata={}, sdk_version="")["session_id"]
    for method, path, body in list_attempts(owned, session):
        status, reply = bob.send(method, f"/api/v1/{path}", body)
        assert status == 404 and "there is no" in reply["detail"], (method, path, status, reply)
    body = encode_train(owned["run"], 4, [TOKENS])
    status, reply = bob.send("POST", "/api/v1/forward_backward", body, "application/x-protobuf")
    assert status == 404, reply
    # Names that do not exist for anybody are refused in the same words.
    other = owned["run"].replace(owned["run"][:4], "0000")
    replies = [bob.send("GET", f"/api/v1/training_runs/{run}")[1]["detail"] for run in (owned["run"], other)]
    assert replies[0].replace(owned["run"], "RUN") == replies[1].replace(other, "RUN")


def test_lists_have_the_tenants_own_only(owned, alice, bob):
    for path, key in (("training_runs", "training_runs"), ("checkpoints", "checkpoints"), ("sessions", "sessions")):
        (_, mine), (_, theirs) = alice.send("GET", f"/api/v1/{path}"), bob.send("GET", f"/api/v1/{path}")
        assert owned["session"] in json.dumps(mine[key]) and owned["session"] not in json.dumps(theirs)
    # Bob loads Alice's state into a run of his own: it does not exist.


def test_a_state_of_another_tenant_cannot_be_loaded(owned, bob, model):
    run = bob.open_run(str(model))
    accepted = bob.post("load_weights", model_id=run, seq_id=1, path=owned["path"], optimizer=True)
    assert "there is no checkpoint" in bob.result(accepted)["error"]


def test_metrics_and_status_page_name_no_tenant(live, owned):
    for path, word in (("/metrics", "miles_service_passes_total"), ("/", "trained tokens"), ("/health", "ok")):
        with urllib.request.urlopen(live.url + path) as response:
            text = response.read().decode()
        assert word in text
        assert not any(secret in text for secret in ("alice", "bob", ALICE, owned["run"], owned["session"]))


def test_signed_urls_cannot_be_changed(owned, alice, live):
    _, reply = alice.send("GET", f"/api/v1/training_runs/{owned['run']}/checkpoints/weights/mine/external_weights_urls")
    url = reply["urls"]["adapter_config.json"]
    path = url.removeprefix(live.url)
    anonymous = Raw(live.url, "")
    assert anonymous.send("GET", path)[0] == 200
    assert anonymous.send("GET", path.replace("adapter_config.json", "state.safetensors"))[0] == 403
    parts = path.split("/")
    assert anonymous.send("GET", "/".join([*parts[:4], str(int(parts[4]) + 9), *parts[5:]]))[0] == 403
    assert anonymous.send("GET", "/".join([*parts[:-1], "..%2F..%2Furl_key"]))[0] in (403, 404)


def test_data_of_tenants_that_arrive_together_share_a_pass(model, tmp_path):
    with serving(model, tmp_path, "--service-coalesce-seconds", "0.2") as live:
        clients = [Raw(live.url, key) for key in (ALICE, BOB)]
        runs = [client.open_run(str(model), seed=number) for number, client in enumerate(clients)]
        accepted = [c.train(run, 1, [TOKENS, TOKENS[:4]]) for c, run in zip(clients, runs, strict=True)]
        together = [read_loss(c.result(each)) for c, each in zip(clients, accepted, strict=True)]
        assert live.service.training.counts.shared_passes == 1 and live.service.training.counts.passes == 1
        alone = [
            read_loss(c.result(c.train(run, 2, [TOKENS, TOKENS[:4]]))) for c, run in zip(clients, runs, strict=True)
        ]
        assert together == pytest.approx(alone, rel=1e-6)


def test_a_backlog_of_one_tenant_delays_another_by_one_turn(model, tmp_path):
    flags = ("--service-batch-tokens", "12", "--service-quantum", "12")
    with serving(model, tmp_path, *flags) as live:
        busy, late = Raw(live.url, ALICE), Raw(live.url, BOB)
        runs = [client.open_run(str(model)) for client in (busy, late)]
        live.call(live.service.training.stop())
        for seq in range(1, 31):
            busy.train(runs[0], seq, [TOKENS])
        accepted = late.train(runs[1], 1, [TOKENS])
        computed, commit = [], live.service.store.commit

        async def commit_and_note(*records):
            computed.extend(part[0] for record in records if record.kind == "pass" for part in record.content["parts"])
            await commit(*records)

        live.service.store.commit = commit_and_note
        live.loop.call_soon_threadsafe(live.service.training.start)
        late.result(accepted)
        assert computed.index(accepted["request_id"]) <= 4
        busy.result({"request_id": f"{runs[0]}:30"})
        live.service.store.commit = commit


def test_quotas(model, tmp_path):
    tenants = """
    [tenants.small]
    key = "tml-small-key-of-sixteen"
    max_adapters = 1
    max_queued = 2
    max_stored_bytes = 1000
    """
    with serving(model, tmp_path, tenants=tenants) as live:
        client = Raw(live.url, "tml-small-key-of-sixteen")
        run = client.open_run(str(model))
        session = client.post("create_session", tags=[], user_metadata={}, sdk_version="")["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": str(model), "lora_config": {"rank": 4}}
        status, reply = client.send("POST", "/api/v1/create_model", body)
        assert status == 403 and "1 adapters in training" in reply["detail"]
        # Requests beyond a gap in the sequence wait.
        accepted = [client.train(run, seq, [TOKENS]) for seq in (2, 3)]
        status, reply = client.send(
            "POST", "/api/v1/forward_backward", encode_train(run, 4, [TOKENS]), "application/x-protobuf"
        )
        assert status == 429 and "2 requests waiting" in reply["detail"]
        assert live.service.store.state.count_pending("small") == 2
        # The same request again is no new one.
        assert client.train(run, 2, [TOKENS]) == accepted[0]
        live.call(live.service.end_session("small", session))
        assert client.send("POST", "/api/v1/session_heartbeat", {"session_id": session})[0] == 410
        # What waits for a request that never came ends with its session, and the adapter is freed.
        live.call(live.service.end_session("small", run.partition(":")[0]))
        assert live.service.store.state.count_runs("small") == 1
        live.call(live.service.remove_expired())
        assert "never came" in client.result(accepted[0])["error"]
        assert live.service.store.state.count_runs("small") == live.service.store.state.count_pending("small") == 0
        assert client.send("POST", "/api/v1/optim_step", {"model_id": run, "seq_id": 9, "adam_params": {}})[0] == 410


def test_unnamed_versions_beyond_the_limit_are_removed(model, tmp_path):
    with serving(model, tmp_path, "--service-sampler-versions", "2") as live:
        client = Raw(live.url, ALICE)
        run = client.open_run(str(model))
        samplers = []
        for number in range(4):
            body = {"model_id": run, "seq_id": number + 1, "sampling_session_seq_id": number}
            samplers.append(client.result(client.post("save_weights_for_sampler", **body))["sampling_session_id"])
            sampled = client.post("asample", **sample_body(sampling_session_id=samplers[-1], seq_id=0))
            assert isinstance(client.result(sampled), bytes)
        assert len(live.service.store.state.checkpoints) == 2
        assert len(live.service.engine._engine.lora.adapters) == 2
        status, reply = client.send("POST", "/api/v1/asample", sample_body(sampling_session_id=samplers[0], seq_id=1))
        assert status == 404 and "there is no checkpoint" in reply["detail"]


def test_a_disk_that_fails_stops_the_service_and_says_so(model, tmp_path):
    with serving(model, tmp_path) as live:
        client = Raw(live.url, ALICE)
        run = client.open_run(str(model))

        def fail(data):
            raise OSError(28, "No space left on device")

        live.service.store.journal._write = fail
        body = encode_train(run, 1, [TOKENS])
        for _ in range(2):
            status, reply = client.send("POST", "/api/v1/forward_backward", body, "application/x-protobuf")
            assert status == 503 and "No space left" in reply["detail"]
        assert client.send("GET", "/health")[0] == 503
        assert live.service.store.state.count_pending("alice") == 0


def test_stored_bytes_are_limited(model, tmp_path):
    tenants = '[tenants.small]\nkey = "tml-small-key-of-sixteen"\nmax_stored_bytes = 1000\n'
    with serving(model, tmp_path, tenants=tenants) as live:
        client = Raw(live.url, "tml-small-key-of-sixteen")
        run = client.open_run(str(model))
        first = client.result(client.post("save_weights", model_id=run, seq_id=1, path="one"))
        second = client.result(client.post("save_weights", model_id=run, seq_id=2, path="two"))
        assert first["path"].endswith("/weights/one") and "delete some" in second["error"]


def test_a_sequence_number_is_one_request(alice, model):
    run = alice.open_run(str(model))
    alice.train(run, 1, [TOKENS])
    status, reply = alice.send(
        "POST", "/api/v1/forward_backward", encode_train(run, 1, [TOKENS[:3]]), "application/x-protobuf"
    )
    assert status == 422 and "was used for another request" in reply["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("create_model", {"session_id": 3}, 422, "must be a text"),
        ("create_session", [], 422, "must be a JSON object"),
        ("optim_step", {"seq_id": 1}, 422, "has no model_id"),
        ("retrieve_future", {"request_id": "nothing"}, 404, "there is no request"),
        ("asample", sample_body(base_model="other"), 422, "is not served"),
        ("copy_weights", {}, 404, "is not offered"),
        ("unknown", {}, 404, "Not Found"),
    ],
)
def test_errors_have_one_sentence_and_a_status(alice, path, body, status, words):
    found, reply = alice.send("POST", f"/api/v1/{path}", body)
    assert found == status and words in reply["detail"]


def test_an_adapter_without_any_target_is_refused(alice, model):
    _, session = alice.send("POST", "/api/v1/create_session", {"tags": [], "sdk_version": "0"})
    assert session["info_message"] == "Adapters cover attention, MLPs, the output layer."
    lora = {"rank": 2, "train_attn": False, "train_mlp": False, "train_unembed": False}
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": str(model), "lora_config": lora}
    status, reply = alice.send("POST", "/api/v1/create_model", body)
    assert status == 422 and "nothing would be trained" in reply["detail"]


def test_bodies_that_cannot_be_read_are_refused(alice):
    for body, kind, status in (
        (b"\xff\xff", "application/x-protobuf", 400),
        (b"{}", "application/json", 415),
    ):
        assert alice.send("POST", "/api/v1/forward_backward", body, kind)[0] == status
    assert alice.send("POST", "/api/v1/optim_step", b"{")[0] == 400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must have a table"),
        ("[tenants.a]\nkey = 'tml-short'", "at least 16"),
        ("[tenants.a]\nkey = 'a-key-without-the-prefix'", "does not start with tml-"),
        ("[tenants.a]\nkey = 'tml-0123456789abcdef'\nbananas = 1", "has bananas"),
        ("[tenants.a]\nkey = 'tml-0123456789abcdef'\n[tenants.b]\nkey = 'tml-0123456789abcdef'", "the same key"),
    ],
)
def test_files_of_tenants_are_checked(tmp_path, text, words):
    from miles.backends.service.tenants import Quota, read_tenants
    from miles.core.errors import UsageError

    file = tmp_path / "tenants.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_tenants(file, Quota())
