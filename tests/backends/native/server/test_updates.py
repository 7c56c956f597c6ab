"""New weights for a running server: from disk, a body, or ranks; all or nothing, stamped, and nothing unpickled."""

import asyncio
import base64
import itertools
import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from tests.backends.native.server.api.test_sglang_response import theirs
from tests.backends.native.server.live import PROMPT, Live, served
from tests.backends.native.server.test_control_endpoints import begun

from miles.backends.native.server.admin import MAX_JOINS
from miles.backends.native.server.weights.update import build_spec_index, get_tensor, merge_tensors
from miles.core.errors import SyncError
from miles.models.checkpoint import hf


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


async def outputs(live: Live) -> tuple[list[int], str]:
    reply = await live.generate()
    return reply["output_ids"], reply["meta_info"]["weight_version"]


def test_the_weights_of_another_checkpoint_answer_as_its_own_server_would(folder: Path, other: Path):
    async def story(live: Live) -> None:
        assert await outputs(live) == (theirs(folder, PROMPT, 8)[0], "default")
        reported = {"message": "Succeeded to update model weights. Weight version updated to b1.", "success": True}
        body = {"model_path": str(other), "weight_version": "b1"}
        assert await live.post("/update_weights_from_disk", body) == (200, {**reported, "num_paused_requests": 0})
        assert await outputs(live) == (theirs(other, PROMPT, 8)[0], "b1")
        _, info = await live.get("/model_info")
        assert (info["model_path"], info["weight_version"]) == (str(other), "b1")
        assert (await live.post("/update_weights_from_disk", {"model_path": str(folder)}))[0] == 200
        assert await outputs(live) == (theirs(folder, PROMPT, 8)[0], "b1")

    served(story, folder)


def test_a_checkpoint_that_does_not_fit_changes_nothing(folder: Path, tmp_path: Path):
    async def story(live: Live) -> None:
        before = await outputs(live)
        for path in (tmp_path / "none", tmp_path):
            status, response = await live.post("/update_weights_from_disk", {"model_path": str(path)})
            assert status == 400 and not response["success"] and str(path) in response["message"]
        assert await outputs(live) == before

    served(story, folder)


@pytest.mark.parametrize("raw", [False, True])
def test_tensors_in_a_body_take_the_place_of_those_they_name(folder: Path, other: Path, raw: bool):
    async def story(live: Live) -> None:
        file = save(tensors_of(other))
        if raw:
            response = await live.post(
                "/update_weights_from_tensor",
                raw=file,
                headers={"Content-Type": "application/octet-stream"},
                params={"weight_version": "t1"},
            )
        else:
            text = base64.b64encode(file).decode()
            body = {"serialized_named_tensors": [text], "load_format": "safetensors", "weight_version": "t1"}
            response = await live.post("/update_weights_from_tensor", body)
        assert response[0] == 200 and response[1]["success"], response
        assert await outputs(live) == (theirs(other, PROMPT, 8)[0], "t1")
        back = save({"lm_head.weight": tensors_of(folder)["lm_head.weight"]})
        await live.post("/update_weights_from_tensor", raw=back, headers={"Content-Type": "application/octet-stream"})
        _, shown = await live.post("/get_weights_by_name", {"name": "lm_head.weight", "truncate_size": 2})
        np.testing.assert_array_equal(shown, tensors_of(folder)["lm_head.weight"][:2].tolist())
        _, kept = await live.post("/get_weights_by_name", {"name": "model.layers.1.self_attn.k_proj.weight"})
        np.testing.assert_array_equal(kept, tensors_of(other)["model.layers.1.self_attn.k_proj.weight"].tolist())

    served(story, folder)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was opened",))


def test_pickles_are_refused_unopened(folder: Path):
    async def story(live: Live) -> None:
        before = await outputs(live)
        bomb = base64.b64encode(pickle.dumps(Bomb())).decode()
        for how in (None, "flattened_bucket", "direct"):
            body = {"serialized_named_tensors": [bomb], "load_format": how}
            status, response = await live.post("/update_weights_from_tensor", body)
            assert status == 400 and "unpickles nothing" in response["message"] and response["success"] is False
        body = {"serialized_named_tensors": [bomb], "load_format": "safetensors"}
        status, response = await live.post("/update_weights_from_tensor", body)
        assert status == 400 and "safetensors" in response["message"]
        assert await outputs(live) == before

    served(story, folder)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nowhere.weight": torch.zeros(2)}, "nowhere.weight is not a tensor of this model."),
        ({"lm_head.weight": torch.zeros(2, 2)}, "lm_head.weight has shape (2, 2), but this model's has (512, 64)."),
        (
            {"model.norm.weight": torch.zeros(64, dtype=torch.int64)},
            "model.norm.weight is torch.int64, but weights are",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(folder: Path, given: dict[str, torch.Tensor], says: str):
    async def story(live: Live) -> None:
        before = await outputs(live)
        status, response = await live.post(
            "/update_weights_from_tensor",
            raw=save({**given, "model.embed_tokens.weight": torch.zeros(512, 64)}),
            headers={"Content-Type": "application/octet-stream"},
        )
        assert status == 400 and response["message"].startswith(says)
        assert await outputs(live) == before

    served(story, folder)


def test_an_update_waits_for_what_is_under_way_unless_paused(folder: Path, other: Path):
    async def story(live: Live) -> None:
        undisturbed = await live.generate(sampling_params={"temperature": 0, "max_new_tokens": 120, "ignore_eos": True})
        task = await begun(live)
        update = asyncio.create_task(live.post("/update_weights_from_disk", {"model_path": str(other)}))
        await live.until(lambda: not live.server.handler.lock._readable.is_set())
        late = asyncio.create_task(live.generate())
        assert (await task)["output_ids"] == undisturbed["output_ids"]
        assert (await update)[0] == 200
        assert (await late)["output_ids"] == theirs(other, PROMPT, 8)[0]
        task = await begun(live)
        await live.post("/pause_generation", {"mode": "in_place"})
        body = {"model_path": str(folder), "weight_version": "back"}
        assert (await live.post("/update_weights_from_disk", body))[0] == 200 and not task.done()
        await live.post("/continue_generation", {})
        reply = await task
        assert reply["meta_info"]["weight_version"] == "back" and len(reply["output_ids"]) == 120
        task = await begun(live)
        body = {"model_path": str(other), "abort_all_requests": True}
        assert (await live.post("/update_weights_from_disk", body))[0] == 200
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"

    served(story, folder)


def test_weights_can_be_called_by_another_name(folder: Path):
    async def story(live: Live) -> None:
        reported = {"success": True, "message": "Weight version updated to v9", "new_version": "v9"}
        assert await live.post("/update_weight_version", {"new_version": "v9"}) == (200, reported)
        assert (await outputs(live))[1] == "v9"

    served(story, folder)


SENDER = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from safetensors.torch import load_file

port, file = sys.argv[1:]
store, _, _ = next(iter(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2)))
group, _ = c10d._new_process_group_helper(
    2,
    0,
    [],
    dist.Backend("gloo"),
    c10d.PrefixStore("trainer", store),
    group_name="trainer",
    timeout=c10d.default_pg_timeout,
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
tensors = load_file(file)
for tensor in tensors.values():
    dist.broadcast(tensor.contiguous(), 0, group)
whole = torch.cat([-t.contiguous().view(-1) for t in tensors.values()]).view(torch.uint8)
dist.broadcast(whole, 0, group)
print("sent")
"""
"""Rank 0 of a group, made as a trainer for SGLang makes it: the tensors one by one, then their negatives in one."""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_a_group_of_ranks_sends_weights(folder: Path, other: Path):
    async def story(live: Live) -> None:
        port, file = _free_port(), str(other / "model.safetensors")
        command = [sys.executable, "-c", SENDER, str(port), file]
        sender = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        group = {"group_name": "trainer"}
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        status, response = await live.post("/init_weights_update_group", {**group, **place, "backend": "gloo"})
        assert status == 200 and response["success"], response
        tensors = load_file(file)
        body = {
            **group,
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "weight_version": "g1",
        }
        status, response = await live.post("/update_weights_from_distributed", body)
        assert status == 200 and response["success"], response
        assert await outputs(live) == (theirs(other, PROMPT, 8)[0], "g1")
        body |= {"load_format": "flattened_bucket", "weight_version": "g2"}
        status, response = await live.post("/update_weights_from_distributed", body)
        assert status == 200 and response["success"], response
        _, shown = await live.post("/get_weights_by_name", {"name": "model.norm.weight"})
        np.testing.assert_array_equal(shown, (-tensors["model.norm.weight"]).tolist()[:100])
        assert (await outputs(live))[1] == "g2"
        assert (await sender.communicate())[0] == b"sent\n"
        assert (await live.post("/destroy_weights_update_group", group))[0] == 200
        assert (await live.post("/destroy_weights_update_group", group))[0] == 400

    served(story, folder)


def test_a_group_that_is_not_there_is_named(folder: Path):
    async def story(live: Live) -> None:
        body = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[512, 64]], "group_name": "g"}
        status, response = await live.post("/update_weights_from_distributed", body)
        assert status == 400 and "'g'" in response["message"]
        wrong = body | {"dtypes": ["int8"]}
        assert (await live.post("/update_weights_from_distributed", wrong))[0] == 400
        huge = body | {"shapes": [[1 << 40, 64]]}
        assert (await live.post("/update_weights_from_distributed", huge))[0] == 400
        place = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "nccl"}
        status, response = await live.post("/init_weights_update_group", place)
        assert status == 400 and "gloo" in response["message"]

    served(story, folder)


def test_peers_that_never_speak_hold_neither_generation_nor_other_updates(folder: Path, other: Path):
    async def story(live: Live) -> None:
        before = await outputs(live)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(64)
            place = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "backend": "gloo"}
            bodies = [{**place, "rank_offset": 1, "world_size": 2, "group_name": f"g{i}"} for i in range(40)]
            joins = [asyncio.create_task(live.post("/init_weights_update_group", body)) for body in bodies]
            refused = [await done for done in itertools.islice(asyncio.as_completed(joins), len(joins) - MAX_JOINS)]
            assert {status for status, _ in refused} == {400}
            assert all("wait for their peers already" in reported["message"] for _, reported in refused)
            assert await outputs(live) == before
            update = {"model_path": str(other), "weight_version": "b1"}
            assert (await live.post("/update_weights_from_disk", update))[0] == 200
            long = {"text": "word " * 40, "sampling_params": {"max_new_tokens": 1}}
            assert (await live.post("/generate", long))[0] == 200
            for join in joins:
                join.cancel()

    served(story, folder)


async def _begin_publication(live: Live, tensors: dict[str, torch.Tensor]) -> None:
    entries = [{"name": name, "shape": list(tensor.shape), "dtype": "float32"} for name, tensor in tensors.items()]
    status, response = await live.post("/weights_publication", {"action": "begin", "entries": entries})
    assert status == 200, response


def test_a_publication_is_loaded_from_regular_files_of_the_announced_size(folder: Path, other: Path, tmp_path: Path):
    async def story(live: Live) -> None:
        tensors = {"lm_head.weight": tensors_of(other)["lm_head.weight"]}
        content = save(tensors)
        endless, pipe, large, linked = (tmp_path / name for name in ("endless", "pipe", "large", "linked"))
        for each in (endless, pipe, large, linked):
            each.mkdir()
        (endless / "a.safetensors").symlink_to("/dev/zero")
        os.mkfifo(pipe / "a.safetensors")
        with (large / "a.safetensors").open("wb") as file:
            file.truncate(1 << 40)
        (tmp_path / "blob").write_bytes(content)
        (linked / "a.safetensors").symlink_to(tmp_path / "blob")
        for where, says in ((endless, "not a regular file"), (pipe, "not a regular file"), (large, "bytes, more than")):
            await _begin_publication(live, tensors)
            status, response = await live.post("/weights_publication", {"action": "load", "folder": str(where)})
            assert status == 400 and says in response["message"], response
        await _begin_publication(live, tensors)
        assert (await live.post("/weights_publication", {"action": "load", "folder": str(linked)}))[0] == 200
        (endless / "config.json").symlink_to(folder / "config.json")
        status, response = await live.post("/update_weights_from_disk", {"model_path": str(endless)})
        assert status == 400 and "not a regular file" in response["message"], response

    served(story, folder)


def test_more_numbers_of_a_tensor_than_fit_a_response_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles.backends.native.server.admin.MAX_SHOWN_NUMBERS", 640)

    async def story(live: Live) -> None:
        asked = {"name": "lm_head.weight", "truncate_size": 10}
        status, rows = await live.post("/get_weights_by_name", asked)
        assert status == 200 and (len(rows), len(rows[0])) == (10, 64)
        status, response = await live.post("/get_weights_by_name", asked | {"truncate_size": 11})
        assert status == 400 and "704 numbers, but the limit is 640" in response["error"]["message"]

    served(story, folder)


def test_every_tensor_of_a_checkpoint_has_its_place(folder: Path, other: Path):
    decoder, given = hf.load(folder, device="cpu"), tensors_of(other)
    current = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    assert set(build_spec_index(decoder.spec)) == set(given)
    ours = merge_tensors(decoder.spec, current, given)
    wanted = dict(hf.load(other, device="cpu").named_parameters())
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    one = merge_tensors(decoder.spec, current, {"model.norm.weight": given["model.norm.weight"]})
    assert one["embedding.weight"].data_ptr() == current["embedding.weight"].data_ptr()
    shown = get_tensor(decoder.spec, ours, "model.layers.0.mlp.up_proj.weight")
    assert shown is not None and torch.equal(shown, given["model.layers.0.mlp.up_proj.weight"])
    assert get_tensor(decoder.spec, ours, "nowhere") is None
    with pytest.raises(SyncError, match="nowhere"):
        merge_tensors(decoder.spec, current, {"nowhere": torch.zeros(1)})
