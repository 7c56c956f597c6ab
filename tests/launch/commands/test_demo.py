"""The demo, as a newcomer types it."""

import json

import pytest
from tests.launch.small_run import Command, miles

from miles.launch.commands import demo, demo_task
from miles.launch.commands.demo import WARMUP_REWARD
from miles.launch.main import main
from miles.models.tokenizer import load_tokenizer


def heldout(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["eval/heldout/reward"] for row in lines if row["kind"] == "eval"]


def test_a_demo_whose_gate_stands_open_warms_up_once_trains_and_shows_before_and_after(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "WARMUP_REWARD", 0.0)
    place = tmp_path / "demo"
    line = ["demo", "--plain", "--steps", "2", "--save", str(place)]
    assert main(line) == 0
    said = capsys.readouterr().out
    for words in ("Warm-up", "step 2/2", "held-out reward", "before and after", f"miles chat {place / 'grpo'}"):
        assert words in said
    assert len(heldout(place / "warmup")) == 1 and len(heldout(place / "grpo")) == 2
    assert main(line) == 0
    assert "Warm-up" not in capsys.readouterr().out, "what was done is not done again"


@pytest.mark.slow
def test_the_demo_warms_up_trains_and_shows_before_and_after(tmp_path):
    place = tmp_path / "demo"
    first = Command("demo", "--plain", "--steps", "3", "--save", str(place))
    first.wait_to_hear("step 1/3")
    first.interrupt()
    stopped = first.done()
    assert stopped.returncode == 130 and f"miles demo --steps 3 --save {place}" in stopped.stdout, stopped.stderr
    done = miles("demo", "--plain", "--steps", "3", "--save", str(place), drawn=True)
    assert done.returncode == 0, done.stderr
    assert "Warm-up" not in done.stdout, "what was done is not done again"
    for words in ("step 3/3", "held-out reward", "before and after", f"miles chat {place / 'grpo'}"):
        assert words in done.stdout
    rewards = heldout(place / "grpo")
    assert len(rewards) == 2 and 0.5 * WARMUP_REWARD < rewards[0] < 0.5, "enough to reinforce, and room to double"
    assert (place / "grpo" / "curves.png").exists()


def test_no_held_out_word_is_ever_trained_on(tmp_path):
    demo_task.write_task(tmp_path, demo_task.Task(), seed=3)
    words = {
        name: [json.loads(line)["input"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("warmup", "train", "heldout")
    }
    assert not set(words["heldout"]) & (set(words["warmup"]) | set(words["train"]))
    assert len(set(words["heldout"])) == 128
    assert {len(word) for word in words["train"]} == {3, 4, 5}


def test_every_question_of_the_demo_stands_alone(tmp_path):
    demo_task.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    asked = [{"role": "user", "content": "abc"}]
    shown = [*asked, {"role": "assistant", "content": "cba"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(asked, add_generation_prompt=True)) == "abc>"
    assert tokenizer.decode(tokenizer.apply_chat_template(shown)) == "abc>cba<eos>"
    again = [*shown, {"role": "user", "content": "xy"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(again, add_generation_prompt=True)) == "xy>"


@pytest.mark.slow
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("seed", range(5))
def test_the_demo_learns_with_every_seed(tmp_path, seed, moe):
    place = tmp_path / "demo"
    done = miles(
        "demo", "--plain", "--seed", str(seed), "--save", str(place), *(["--moe"] if moe else []), patience=1200
    )
    assert done.returncode == 0, done.stderr
    rewards = heldout(place / "grpo")
    assert rewards[-1] >= 0.8 and rewards[-1] >= 2 * rewards[0]
