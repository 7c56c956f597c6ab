"""Durability: a service that is killed at any moment goes on to the bit, and every request is computed exactly once."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.backends.service.live import ALICE, BOB, TENANTS, serving
from tests.backends.service.raw import Raw, read_loss

TOKENS = [5, 17, 300, 44, 8, 99, 120]


def collect(live):
    """The bits of all adapters in training."""
    loop = live.service.training
    return {
        (run_id, name): tensor.clone()
        for run_id in sorted(loop._adapters)
        for name, tensor in loop._adapters[run_id].collect_state().items()
    }


def assert_equal(one, two):
    assert one.keys() == two.keys() and one
    assert not [key for key, tensor in one.items() if not torch.equal(tensor, two[key])]


def crash(folder: Path, to: Path) -> Path:
    """What is on disk now, as a crash would leave it."""
    shutil.copytree(folder, to)
    return to


def work(client, run, first, tokens=TOKENS):
    """Some updates, with requests of two parts and a forward among them."""
    results = []
    for seq in range(first, first + 6, 3):
        results.append(client.train(run, seq, [tokens, tokens[:4], tokens[1:]]))
        results.append(client.train(run, seq + 1, [tokens[2:]], forward_only=seq == first))
        results.append(client.step(run, seq + 2))
    return [client.result(each) for each in results]


FLAGS = ("--service-batch-tokens", "10")  # a request has several parts


def test_a_crash_between_requests_loses_no_bit(model, tmp_path):
    with serving(model, tmp_path / "a", *FLAGS) as live:
        alice, bob = Raw(live.url, ALICE), Raw(live.url, BOB)
        runs = [alice.open_run(str(model), seed=1), bob.open_run(str(model), rank=2, seed=2)]
        early = work(alice, runs[0], 1)
        alice.result(alice.post("save_weights", model_id=runs[0], seq_id=7, path="saved"))
        work(bob, runs[1], 1, TOKENS[::-1])
        # Data of both in one pass: their bits depend on each other.
        both = [alice.train(runs[0], 8, [TOKENS]), bob.train(runs[1], 7, [TOKENS])]
        last = [client.result(each) for client, each in zip((alice, bob), both, strict=True)]
        loaded = alice.post(
            "load_weights", model_id=runs[0], seq_id=9, path=f"tinker://{runs[0]}/weights/saved", optimizer=True
        )
        alice.result(loaded)
        alice.send("DELETE", f"/api/v1/training_runs/{runs[0]}/checkpoints/weights/saved")
        before = collect(live)
        crash(tmp_path / "a", tmp_path / "b")
        wanted = work(alice, runs[0], 10)
        after = collect(live)
    with serving(model, tmp_path / "b", *FLAGS) as again:
        assert_equal(collect(again), before)
        alice, bob = Raw(again.url, ALICE), Raw(again.url, BOB)
        # Results of before the crash are still there, for their owner.
        assert [client.result(each) for client, each in zip((alice, bob), both, strict=True)] == last
        assert early[0] == alice.result({"request_id": f"{runs[0]}:1"})
        # A client that got no answer sends its request again: it is not computed twice.
        assert alice.train(runs[0], 8, [TOKENS])["request_id"] == both[0]["request_id"]
        assert work(alice, runs[0], 10) == wanted
        assert_equal(collect(again), after)


def test_accepted_requests_are_computed_after_a_crash(model, tmp_path):
    with serving(model, tmp_path / "a", *FLAGS) as live:
        client = Raw(live.url, ALICE)
        run = client.open_run(str(model), seed=1)
        live.call(live.service.training.stop())
        # Accepted, and not computed.
        accepted = [client.train(run, 1, [TOKENS, TOKENS[2:]]), client.step(run, 2), client.train(run, 3, [TOKENS])]
        sample = client.post(
            "asample",
            base_model=str(model),
            prompt={"chunks": [{"tokens": TOKENS}]},
            sampling_params={"max_tokens": 4},
            num_samples=2,
        )
        sampled = client.result(sample)
        crash(tmp_path / "a", tmp_path / "b")
    with serving(model, tmp_path / "c", *FLAGS) as calm:
        other = Raw(calm.url, ALICE)
        theirs = other.open_run(str(model), seed=1)
        wanted = [
            other.result(each)
            for each in (
                other.train(theirs, 1, [TOKENS, TOKENS[2:]]),
                other.step(theirs, 2),
                other.train(theirs, 3, [TOKENS]),
            )
        ]
        bits = [tensor for _, tensor in sorted(collect(calm).items())]
    with serving(model, tmp_path / "b", *FLAGS) as again:
        client = Raw(again.url, ALICE)
        assert [client.result(each) for each in accepted] == wanted
        assert all(map(torch.equal, (tensor for _, tensor in sorted(collect(again).items())), bits))
        assert client.result(sample) == sampled


def test_a_crash_inside_a_request_of_several_parts_continues_it(model, tmp_path):
    with serving(model, tmp_path / "a", *FLAGS) as live:
        client = Raw(live.url, ALICE)
        run = client.open_run(str(model), seed=1)
        training, commit = live.service.training, live.service.store.commit
        images = []

        async def commit_and_copy(*records):
            await commit(*records)
            if records[0].kind == "pass":
                images.append(crash(tmp_path / "a", tmp_path / f"image{len(images)}"))

        live.service.store.commit = commit_and_copy
        accepted = client.train(run, 1, [TOKENS, TOKENS[::-1], TOKENS])
        wanted = client.result(accepted)
        client.result(client.step(run, 2))
        bits, passes = collect(live), training.counts.passes
        live.service.store.commit = commit
    assert len(images) == passes == 3
    for image in images:
        with serving(model, image, *FLAGS) as again:
            client = Raw(again.url, ALICE)
            assert client.result(accepted) == wanted
            client.result(client.step(run, 2))
            assert_equal(collect(again), bits)


def test_a_snapshot_shortens_the_journal_and_loses_nothing(model, tmp_path):
    with serving(model, tmp_path / "a", *FLAGS) as live:
        client = Raw(live.url, ALICE)
        run = client.open_run(str(model), seed=1)
        work(client, run, 1)
        saved = client.result(client.post("save_weights", model_id=run, seq_id=7, path="one"))
        client.result(client.train(run, 8, [TOKENS]))
        client.train(run, 10, [TOKENS])  # waits for 9
        size, before = live.service.store.journal.size, collect(live)
        live.call(live.service.training.snapshot())
        assert live.service.store.journal.size < size
        crash(tmp_path / "a", tmp_path / "b")
        client.step(run, 9)
        wanted = client.result({"request_id": f"{run}:10"})
    with serving(model, tmp_path / "b", *FLAGS) as again:
        client = Raw(again.url, ALICE)
        assert_equal(collect(again), before)
        client.step(run, 9)
        assert client.result({"request_id": f"{run}:10"}) == wanted
        loaded = client.post("load_weights", model_id=run, seq_id=11, path=saved["path"], optimizer=False)
        assert client.result(loaded)["path"] == saved["path"]


def test_adapters_move_to_disk_and_back_without_losing_a_bit(model, tmp_path):
    losses = []
    for number, flags in enumerate((("--service-max-resident", "1"), ())):
        with serving(model, tmp_path / str(number), *flags) as live:
            client = Raw(live.url, ALICE)
            runs = [client.open_run(str(model), seed=seed) for seed in (1, 2)]
            found = []
            for seq in range(1, 7, 2):
                for run in runs:
                    found.append(read_loss(client.result(client.train(run, seq, [TOKENS]))))
                    client.result(client.step(run, seq + 1))
            assert len(live.service.training._adapters) == (1 if flags else 2)
            losses.append(found)
    assert losses[0] == losses[1]


# -- a real process, killed ------------------------------------------------------------------


class Process:
    """``miles serve --train`` in a process of its own, on one port."""

    def __init__(self, model: Path, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "tenants.toml").write_text(TENANTS)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "miles", "serve", str(model), "--train", "--port", str(port)]
        self._command += [
            "--service-directory",
            str(folder / "state"),
            "--service-tenants",
            str(folder / "tenants.toml"),
        ]
        self._command += ["--device", "cpu", "--engine-kv-tokens", "4096", "--num-threads", "1"]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ)
        )
        line = self.process.stdout.readline()
        assert "Training on" in line, line

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def test_a_killed_process_goes_on_where_it_was(model, tmp_path):
    """The official client sees nothing of a kill in the middle but a pause, and its results are the same."""
    tinker = pytest.importorskip("tinker", reason="pip install 'miles-rl[service]'")
    types = tinker.types

    def train(process, *, kills):
        client = tinker.ServiceClient(base_url=process.url, api_key=ALICE)
        run = client.create_lora_training_client(base_model=str(model), rank=4, seed=5)
        tokens = types.ModelInput.from_ints(TOKENS[:-1])
        data = [types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 6})]
        losses = []
        for step in range(6):
            futures = [
                run.forward_backward(data, "cross_entropy"),
                run.optim_step(types.AdamParams(learning_rate=1e-2)),
            ]
            if step in kills:
                process.kill()
                process.start()
            losses.append(futures[0].result().metrics["loss:sum"])
            futures[1].result()
        sampler = run.save_weights_and_get_sampling_client()
        sampled = sampler.sample(tokens, 1, types.SamplingParams(max_tokens=5, seed=1)).result().sequences[0]
        client.close("success").result()
        return losses, sampled.tokens, sampled.logprobs

    results = []
    for number, kills in enumerate(((), (1, 4))):
        process = Process(model, tmp_path / str(number))
        process.start()
        results.append(train(process, kills=kills))
        assert process.stop() == 0
    assert results[0] == results[1]
