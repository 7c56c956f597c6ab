"""``/weights_checker``: checksums of the weights, and weights that are overwritten with noise."""

import pytest
from safetensors.torch import load_file
from tests.server_api.exchanges import GREEDY, PROMPT
from tests.server_api.live_servers import Wire
from tests.server_api.oracle import Oracle


def check(server: Wire, action: str) -> dict:
    return server.ok("/weights_checker", action=action)


def written(server: Wire) -> list[int]:
    return server.generate(input_ids=PROMPT, sampling_params=GREEDY | {"ignore_eos": True})["output_ids"]


@pytest.mark.endpoint("/weights_checker")
def test_checksums_tell_weights_apart(restored: Wire, folders):
    first = check(restored, "checksum")
    assert first["success"] is True and len(first["ranks"]) == 1
    rank = first["ranks"][0]
    assert rank.keys() == {"checksums", "per_gpu_checksum", "parallelism_info"}
    assert rank["parallelism_info"]["tp_size"] == 1
    assert rank["checksums"].keys() == load_file(folders.a / "model.safetensors").keys()
    assert all(len(number) == 16 and int(number, 16) >= 0 for number in rank["checksums"].values())
    restored.ok("/update_weights_from_disk", model_path=str(folders.b))
    other = check(restored, "checksum")
    assert other["per_engine_checksum"] != first["per_engine_checksum"]
    assert not set(rank["checksums"].values()) & set(other["ranks"][0]["checksums"].values())
    restored.ok("/update_weights_from_disk", model_path=str(folders.a))
    assert check(restored, "checksum") == first == restored.get_json("/weights_checker")


@pytest.mark.endpoint("/weights_checker")
def test_weights_are_compared_with_a_snapshot(restored: Wire, folders):
    check(restored, "snapshot")
    assert check(restored, "compare")["success"] is True
    restored.ok("/update_weights_from_disk", model_path=str(folders.b))
    found = restored.post("/weights_checker", {"action": "compare"})
    assert found.status_code == 400 and "model.embed_tokens.weight" in found.json()["message"]
    restored.ok("/update_weights_from_disk", model_path=str(folders.a))
    assert check(restored, "compare")["success"] is True


@pytest.mark.endpoint("/weights_checker")
def test_weights_made_noise_are_noise_until_others_come(restored: Wire, folders):
    calm = Oracle(folders.a).greedy(PROMPT, 8)
    assert written(restored) == calm
    version = restored.get_json("/model_info")["weight_version"]
    assert check(restored, "reset_tensors") == {"success": True, "message": "Success."}
    assert written(restored) != calm and restored.get_json("/model_info")["weight_version"] == version
    assert restored.ok("/update_weights_from_disk", model_path=str(folders.a))["success"]
    restored.post("/flush_cache")
    assert written(restored) == calm
