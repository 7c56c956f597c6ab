"""Multi-turn runs: how many tokens are trained on, row by row and turn by turn."""

import json
import shutil

import pytest
from tests.launch.small_run import miles, write_inputs

from miles.launch.commands import demo_task
from miles.models.tokenizer import load_tokenizer

# The demo's own forgets earlier turns.
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ '<eos>' if m['role'] == 'assistant' else '>' }}{% endfor %}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    words = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    talks = []
    for a, b in zip(words[0::2], words[1::2], strict=True):
        talks.append([turn for row in (a, b) for turn in (*asked(row), {"role": "assistant", "content": row["label"]})])
    talks[0][1]["weight"] = 0
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    (folder / "talks.jsonl").write_text("".join(json.dumps({"input": talk}) + "\n" for talk in talks))
    return folder


def asked(row):
    return row["input"] if isinstance(row["input"], list) else [{"role": "user", "content": row["input"]}]


def learn(inputs, run, *more):
    done = ran(inputs, run, *more)
    assert done.returncode == 0, done.stderr
    (row,) = [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if r["kind"] == "train"]
    return row


def ran(inputs, run, *more):
    return miles(
        "train",
        *("--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "talks.jsonl"), "--save", str(run)),
        *("--apply-chat-template", "--loss-type", "sft_loss", "--rollout-batch-size", "8", "--num-rollout", "1"),
        *("--calculate-per-token-loss", "--num-threads", "1", "--device", "cpu", "--view", "plain", *more),
    )


def test_all_turns_are_learned_in_one_row_or_each_in_its_own(inputs, tmp_path):
    every, each, last = (learn(inputs, tmp_path / how, "--loss-mask-type", how) for how in ("all", "each", "last"))
    talks = [json.loads(line)["input"] for line in (inputs / "talks.jsonl").read_text().splitlines()][:8]
    tokenizer = load_tokenizer(inputs)
    lengths = [[len(tokenizer.encode(t["content"])) + 1 for t in talk if t["role"] == "assistant"] for talk in talks]
    taught = sum(map(sum, lengths)) - lengths[0][0]
    assert every["trained_tokens"] == each["trained_tokens"] == taught
    assert last["trained_tokens"] == sum(two[1] for two in lengths)
    assert (every["samples"], each["samples"], last["samples"]) == (8, 15, 8)
    # A template that only appends gives a turn the same context in either way.
    assert each["loss"] == pytest.approx(every["loss"], rel=1e-5) and each["grad_norm"] == pytest.approx(
        every["grad_norm"], rel=1e-3
    )


def test_a_template_that_forgets_earlier_turns_is_refused_before_anything_starts(inputs, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(inputs, own)
    settings = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": demo_task.TEMPLATE}))
    done = ran(own, tmp_path / "run")
    assert done.returncode == 1 and "it rewrites earlier turns instead of appending to them" in done.stderr
    assert learn(own, tmp_path / "each", "--loss-mask-type", "each")["samples"] == 15
