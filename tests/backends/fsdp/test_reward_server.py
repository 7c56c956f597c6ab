"""A reward model behind HTTP gives what transformers gives, to graders that ask as they ask SGLang or vLLM."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.backends.native.server.tiny import VOCABULARY, write_model
from transformers import AutoModelForSequenceClassification

from miles.backends.fsdp.reward_inference import BatchedScorer
from miles.backends.fsdp.reward_model import SCORE, RewardModel, load_reward_model
from miles.backends.fsdp.reward_server import RewardServer
from miles.cluster.executor import InlineExecutor
from miles.core.errors import CheckpointError
from miles.core.types import Prompt, Status, Trajectory
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import INDEX, read_config, read_json
from miles.models.tokenizer import load_tokenizer
from miles.rollout.reward.context import HTTPEndpoint, RewardModelEndpoint
from miles.rollout.reward.remote import ModelReward
from miles.rollout.reward.types import GradingError

TEXTS = ["the quick brown fox", "a lazy dog", "0123456789 and then some more text", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A reward model as training leaves it, with a score that tells texts apart."""
    base, out = write_model(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("reward")
    model = RewardModel(hf.load(base, device="cpu"), config=read_config(base), like=base)
    torch.manual_seed(3)
    with torch.no_grad():
        model.parameters()[SCORE].normal_()
    model.save(out)
    return out


@torch.no_grad()
def oracle(folder: Path, sequences) -> list[float]:
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return [float(theirs(torch.tensor([list(sequence)])).logits[0, 0]) for sequence in sequences]


@asynccontextmanager
async def serving(folder: Path, *, most: int = 16384, **how):
    model = load_reward_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    scorer = BatchedScorer(model, run=InlineExecutor(), most=most)
    server = RewardServer(scorer, load_tokenizer(folder), model.spec, name="tiny", **how)
    port = await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()
        await scorer.close()


def asked(folder, story, **how):
    async def report_value():
        async with serving(folder, **how) as url, aiohttp.ClientSession() as session:

            async def post(body, **more):
                async with session.post(f"{url}/classify", json=body, **more) as response:
                    return response.status, await response.json()

            return await story(url, post)

    return asyncio.run(report_value())


@pytest.mark.parametrize("most", [16384, 1], ids=["together", "one by one"])
def test_every_form_of_asking_gives_transformers_scores(folder, most):
    tokens = [load_tokenizer(folder).encode(text) for text in TEXTS]
    expected = oracle(folder, tokens)

    async def story(url, post):
        forms = ({"text": TEXTS}, {"input_ids": tokens}, {"input": TEXTS, "model": "tiny"}, {"input": tokens})
        return [(await post(body))[1] for body in forms], (await post({"text": TEXTS[0]}))[1]

    several, one = asked(folder, story, most=most)
    for rows in several[:2]:
        assert [row["embedding"][0] for row in rows] == pytest.approx(expected, rel=1e-4)
    for answer in several[2:]:
        assert [row["probs"][0] for row in answer["data"]] == pytest.approx(expected, rel=1e-4)
    assert one["embedding"] == pytest.approx(expected[:1], rel=1e-4)


@pytest.mark.parametrize("api", ["sglang", "openai"])
@pytest.mark.parametrize("template", [True, False], ids=["conversations", "text"])
def test_the_grader_gets_its_reward_from_it(folder, api, template):
    tokenizer = load_tokenizer(folder)

    def tokens_of(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=False)

    async def story(url, post):
        settings = RewardModelEndpoint(
            server=HTTPEndpoint(url=url, batch=3, concurrency=2),
            api=api,
            render_tokens=tokens_of if template else None,
        )
        reward, prompt = ModelReward(settings), Prompt(id=1, messages=({"role": "user", "content": "the fox "},))
        tries = [Trajectory(branches=(), status=Status.COMPLETED, metadata={"text": text}) for text in TEXTS]
        return [each.value for each in await asyncio.gather(*(reward(prompt, one) for one in tries))]

    found = asked(folder, story)
    ask = {"role": "user", "content": "the fox "}
    if template:
        read = [tokens_of([ask, {"role": "assistant", "content": text}]) for text in TEXTS]
    else:
        read = [tokenizer.encode("the fox " + text) for text in TEXTS]
    assert found == pytest.approx(oracle(folder, read), rel=1e-4) and len(set(found)) == len(found)


def test_what_cannot_be_scored_is_refused_in_a_sentence_and_takes_nothing_with_it(folder):
    async def story(url, post):
        wrong = {
            "exactly one of text": {"text": "a", "input": "b"},
            "non-empty": {"input_ids": []},
            "each input must be": {"text": [3.5]},
            f"outside the model's vocabulary of {VOCABULARY}": {"input_ids": [1, VOCABULARY]},
            "longer than the model's 512 positions": {"input_ids": [1] * 513},
        }
        for said, body in wrong.items():
            status, answer = await post(body)
            assert status == 400 and said in answer["error"]["message"]
        reward = ModelReward(
            RewardModelEndpoint(server=HTTPEndpoint(url=url, retries=0), render_tokens=lambda messages: [VOCABULARY])
        )
        with pytest.raises(GradingError, match="status 400"):
            await reward(Prompt(id=1, messages=({"role": "user", "content": ""},)), _tried("x"))
        assert (await post({"text": "fine"}))[0] == 200

    asked(folder, story)


def _tried(text):
    return Trajectory(branches=(), status=Status.COMPLETED, metadata={"text": text})


def test_a_key_is_wanted_where_there_is_one(folder):
    async def story(url, post):
        assert (await post({"text": "a"}))[0] == 401
        assert (await post({"text": "a"}, headers={"Authorization": "Bearer wrong"}))[0] == 401
        assert (await post({"text": "a"}, headers={"Authorization": "Bearer s3cret"}))[0] == 200
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            assert response.status == 200

    asked(folder, story, api_key="s3cret")


def test_it_says_what_it_is(folder):
    async def story(url, post):
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/model_info") as response:
                about = await response.json()
            async with session.get(f"{url}/v1/models") as response:
                return about, await response.json()

    about, models = asked(folder, story)
    assert about["is_generation"] is False and about["vocab_size"] == VOCABULARY
    assert models["data"][0]["max_model_len"] == 512


def test_a_model_without_an_output_weight_is_served_too(folder, tmp_path):
    """As others write them: transformers' own classifiers hold none."""
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    theirs.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_reward_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    found = asyncio.run(BatchedScorer(model, run=InlineExecutor()).scores([[5, 6, 7], [9]]))
    assert found == pytest.approx(oracle(folder, [[5, 6, 7], [9]]), rel=1e-4)


def test_what_is_no_reward_model_is_refused(folder, tmp_path):
    base = write_model(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"has no score\.weight"):
        load_reward_model(base, device=torch.device("cpu"), dtype=torch.float32)
    stored = folder / read_json(folder / INDEX)["weight_map"][SCORE]
    whole = tmp_path / "two"
    whole.mkdir()
    for file in folder.iterdir():
        (whole / file.name).write_bytes(file.read_bytes())
    save_file({SCORE: load_file(stored)[SCORE].repeat(2, 1)}, whole / stored.name)
    with pytest.raises(CheckpointError, match="has 2 scores"):
        load_reward_model(whole, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.slow
def test_miles_serve_serves_it(folder):
    command = [sys.executable, "-m", "miles.launch.main", "serve", str(folder), "--port", "0", "--device", "cpu"]
    environment = os.environ | {"MILES_API_KEY": "hush", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--served-model-name", "judge"], env=environment, **pipes) as server:
        line = server.stdout.readline()
        assert line.startswith("Serving judge at http://127.0.0.1:"), line + server.stderr.read()
        body = json.dumps({"text": TEXTS}).encode()
        ask = urllib.request.Request(f"{line.split()[3]}/classify", body, {"Authorization": "Bearer hush"})
        with urllib.request.urlopen(ask) as response:
            found = [row["embedding"][0] for row in json.load(response)]
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
    assert server.returncode == 0 and "hush" not in line + out + err, err
    assert found == pytest.approx(oracle(folder, [load_tokenizer(folder).encode(text) for text in TEXTS]), rel=1e-4)
