"""New weights by every road: the next answers are theirs, stamped with their version, and a failure changes nothing."""

import base64
import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file, save
from tests.server_api.exchanges import GREEDY, PROMPT, SHORT
from tests.server_api.live_servers import ROOT, Wire
from tests.server_api.oracle import Oracle

LONG = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="session")
def oracles(folders) -> dict[str, Oracle]:
    return {"a": Oracle(folders.a), "b": Oracle(folders.b)}


def written(server: Wire, prompt: list[int] = PROMPT) -> tuple[list[int], str]:
    """Greedy tokens, and the version that wrote them."""
    answer = server.generate(input_ids=prompt, sampling_params=GREEDY | {"ignore_eos": True})
    return answer["output_ids"], answer["meta_info"]["weight_version"]


@pytest.mark.endpoint("/update_weights_from_disk")
def test_weights_from_disk_write_the_next_answer(restored: Wire, folders, oracles):
    reported = restored.ok("/update_weights_from_disk", model_path=str(folders.b), weight_version="b1")
    assert reported["success"] is True and "b1" in reported["message"] and reported["num_paused_requests"] == 0
    assert written(restored) == (oracles["b"].greedy(PROMPT, 8), "b1")
    assert restored.get_json("/model_info")["weight_version"] == "b1"
    assert restored.get_json("/model_info")["model_path"] == str(folders.b)


@pytest.mark.endpoint("/update_weights_from_disk")
def test_new_weights_answer_from_no_old_prefix(restored: Wire, folders, oracles):
    prompt = [*range(30, 130)]
    written(restored, prompt)
    restored.ok("/update_weights_from_disk", model_path=str(folders.b))
    assert written(restored, prompt)[0] == oracles["b"].greedy(prompt, 8)


@pytest.mark.endpoint("/update_weights_from_disk")
def test_an_answer_without_tokens_is_stamped_too(restored: Wire, folders):
    restored.ok("/update_weights_from_disk", model_path=str(folders.b), weight_version="b0")
    answer = restored.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 0})
    assert answer["meta_info"]["weight_version"] == "b0"


@pytest.mark.endpoint("/update_weights_from_disk")
def test_without_a_name_the_version_keeps_its_own(restored: Wire, folders):
    restored.ok("/update_weights_from_disk", model_path=str(folders.b), weight_version="b2")
    restored.ok("/update_weights_from_disk", model_path=str(folders.a))
    assert written(restored)[1] == "b2"


@pytest.mark.endpoint("/update_weights_from_disk")
def test_weights_that_cannot_be_read_change_nothing(restored: Wire, oracles):
    response = restored.post("/update_weights_from_disk", {"model_path": "/no/such/folder", "weight_version": "no"})
    assert response.status_code == 400 and response.json()["success"] is False
    assert written(restored) == (oracles["a"].greedy(PROMPT, 8), "default")


@pytest.mark.endpoint("/update_weights_from_disk")
def test_an_update_waits_for_what_is_under_way(restored: Wire, folders, oracles):
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": SHORT, "sampling_params": LONG}
        sent = pool.submit(restored.http.post, "/generate", json=body)
        restored.until(lambda: restored.busy() or sent.done())
        restored.ok("/update_weights_from_disk", model_path=str(folders.b), weight_version="b3")
        answer = sent.result().json()
    assert answer["output_ids"][:8] == oracles["a"].greedy(SHORT, 8) and len(answer["output_ids"]) == 150
    assert answer["meta_info"]["weight_version"] == "default"
    assert written(restored)[1] == "b3"


@pytest.mark.endpoint("/update_weights_from_disk")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_request_goes_on_with_the_new_weights(restored: Wire, folders, mode: str):
    whole = restored.generate(input_ids=SHORT, sampling_params=LONG)["output_ids"]
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": SHORT, "sampling_params": LONG, "return_logprob": True}
        sent = pool.submit(restored.http.post, "/generate", json=body)
        restored.until(lambda: restored.busy() or sent.done())
        restored.ok("/pause_generation", mode=mode)
        # SGLang would end if it had to flush while retracted requests wait.
        update = {"model_path": str(folders.b), "weight_version": "b4", "flush_cache": False}
        assert restored.ok("/update_weights_from_disk", **update)["success"]
        restored.ok("/continue_generation")
        answer = sent.result().json()
    assert answer["meta_info"]["weight_version"] == "b4"
    tokens = answer["output_ids"]
    common = next((i for i, (a, b) in enumerate(zip(tokens, whole, strict=True)) if a != b), len(whole))
    assert len(tokens) == 150 and common < 150


@pytest.mark.endpoint("/update_weight_version")
def test_weights_can_be_called_by_another_name(restored: Wire):
    reported = restored.ok("/update_weight_version", new_version="v9")
    assert reported["success"] is True and reported["new_version"] == "v9"
    assert written(restored)[1] == "v9"


@pytest.mark.endpoint("/update_weights_from_tensor")
def test_weights_as_tensors_write_the_next_answer(restored: Wire, folders, oracles):
    reported = restored.ok(
        "/update_weights_from_tensor", weight_version="t1", **packed(restored, load_file(of(folders.b)))
    )
    assert reported["success"] is True
    assert written(restored) == (oracles["b"].greedy(PROMPT, 8), "t1")


@pytest.mark.endpoint("/update_weights_from_tensor")
def test_tensors_of_a_wrong_shape_change_nothing(restored: Wire, oracles):
    wrong = {"lm_head.weight": torch.zeros(3, 3)}
    response = restored.post("/update_weights_from_tensor", packed(restored, wrong))
    assert response.status_code == 400 and response.json()["success"] is False
    assert written(restored)[0] == oracles["a"].greedy(PROMPT, 8)


@pytest.mark.endpoint("/update_weights_from_tensor")
def test_tensors_of_an_unknown_name_are_refused(restored: Wire):
    response = restored.post("/update_weights_from_tensor", packed(restored, {"nobody": torch.zeros(3)}))
    assert response.status_code == 400


@pytest.mark.endpoint("/update_weights_from_distributed")
def test_weights_from_a_group_write_the_next_answer(restored: Wire, folders, oracles):
    tensors = load_file(of(folders.b))
    announced = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": "trainer",
        "weight_version": "g1",
    }
    with trainer(folders.b) as (say, port), ThreadPoolExecutor(1) as pool:
        joined = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        assert restored.ok("/init_weights_update_group", **joined, group_name="trainer", backend="gloo")["success"]
        updated = pool.submit(restored.ok, "/update_weights_from_distributed", **announced)
        say("send")
        assert updated.result()["success"] is True
        assert restored.ok("/destroy_weights_update_group", group_name="trainer")["success"]
    assert written(restored) == (oracles["b"].greedy(PROMPT, 8), "g1")


@pytest.mark.endpoint("/get_weights_by_name")
def test_a_tensor_can_be_looked_at(server: Wire, folders):
    rows = server.ok("/get_weights_by_name", name="model.embed_tokens.weight", truncate_size=2)
    expected = load_file(of(folders.a))["model.embed_tokens.weight"][:2]
    assert torch.allclose(torch.tensor(rows), expected)


def of(folder: Any) -> Any:
    return folder / "model.safetensors"


def packed(server: Wire, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Tensors as a server takes them: SGLang pickled and shared by their files, ours as safetensors."""
    if server.kind == "miles":
        return {"serialized_named_tensors": [base64.b64encode(save(tensors)).decode()], "load_format": "safetensors"}
    torch.multiprocessing.set_sharing_strategy(
        "file_system"
    )  # SGLang ends on tensors that come as descriptors of this process
    out = io.BytesIO()
    ForkingPickler(out).dump(list(tensors.items()))
    return {"serialized_named_tensors": [base64.b64encode(out.getvalue()).decode()]}


@contextmanager
def trainer(folder: Any) -> Iterator[tuple[Any, int]]:
    """A program that holds a group's store and sends the checkpoint on request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tests.server_api.sender", str(folder), str(port), "trainer"]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        pipe = process.stdin
        assert pipe is not None

        def say(line: str) -> None:
            pipe.write(line + "\n")
            pipe.flush()

        try:
            yield say, port
            say("end")
        finally:
            process.kill()
