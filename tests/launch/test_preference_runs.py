"""Training on preferences through the front door."""

import json
import random
import signal
from pathlib import Path

import pytest
import torch
from tests.launch.small_run import everything, miles, write_inputs
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from miles.launch.main import main
from miles.launch.read_config import read
from miles.observe.metric import list_undocumented


def write_pairs(path: Path, words: list[str]) -> None:
    """The reversed word is preferred to the word as it was asked."""
    turned = [word for word in words if word != word[::-1]]
    path.write_text("".join(json.dumps({"input": w, "chosen": w[::-1], "rejected": w}) + "\n" for w in turned))


def write_ranked(path: Path, words: list[str]) -> None:
    """Of two words, the one whose letters come later in the alphabet is preferred."""
    rows = []
    for one, other in zip(words[::2], words[1::2], strict=True):
        low, high = sorted((one, other), key=lambda word: sum(map(ord, word)) / len(word))
        rows.append({"input": "q", "chosen": high, "rejected": low})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["chosen"] != row["rejected"]))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    words = [json.loads(line)["input"] for line in (folder / "train.jsonl").read_text().splitlines()]
    write_pairs(folder / "pairs.jsonl", words)
    return folder


def flags(inputs: Path, run: Path, *more: str) -> list[str]:
    return [
        *("--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "pairs.jsonl"), "--save", str(run)),
        *("--apply-chat-template", "--loss-type", "dpo_loss", "--rollout-batch-size", "8", "--rollout-shuffle"),
        *("--device", "cpu", "--view", "plain", "--num-threads", "1", *more),
    ]


def rows(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == "train"]


def test_three_steps_on_pairs_need_no_engine_and_start_at_log_two(inputs, tmp_path):
    run = tmp_path / "run"
    cut = ("--num-rollout", "3", "--num-steps-per-rollout", "2", "--max-tokens-per-gpu", "40", "--lr", "1e-3")
    done = miles("train", *flags(inputs, run, *cut, "--dpo-beta", "0.5", "--dpo-label-smoothing", "0.1"))
    assert done.returncode == 0, done.stderr
    found = rows(run)
    assert len(found) == 3 and found[0]["loss"] == pytest.approx(0.69, abs=0.05)
    assert found[-1]["loss"] < found[0]["loss"] and found[-1]["dpo_margin"] > 0
    for row in found:
        assert row["samples"] == 16 and row["micro_batches"] > 2 and row["grad_norm"] > 0
        assert row["dpo_margin"] == pytest.approx(row["dpo_chosen_reward"] - row["dpo_rejected_reward"], abs=1e-5)
        assert not list_undocumented(row.keys() - {"kind", "step", "version"})


def test_a_plan_says_what_is_maximised_and_what_with(inputs, tmp_path, capsys):
    argv = flags(inputs, tmp_path / "run", "--num-rollout", "3", "--dpo-label-smoothing", "0.1")
    assert main(["plan", *argv]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "maximise mean over 8 pairs of 0.9·log σ(m) + 0.1·log σ(−m); m = 0.1·(Σ log π/π_ref" in said
    _, plan, _ = read("plan", argv)
    assert plan.reference == inputs and not plan.samples and plan.samples_per_step == 8


def test_a_bad_row_stops_a_run_with_its_file_and_line(inputs, tmp_path):
    good = {"input": "ab", "chosen": "ba", "rejected": "ab"}
    lines = [json.dumps(row) for row in (good, good | {"chosen": "ab"})]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    argv = flags(inputs, tmp_path / "run", "--num-rollout", "1")
    argv[argv.index("--prompt-data") + 1] = str(tmp_path / "bad.jsonl")
    done = miles("train", *argv)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "bad.jsonl, line 2: chosen and rejected are the same" in done.stderr


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("--rm-type exact", "--loss-type dpo_loss trains on pairs of responses, so --rm-type has no effect"),
        ("--use-kl-loss", "trains on pairs of responses, so --use-kl-loss has no effect"),
        ("--gamma 0.9", "trains on pairs of responses, so --gamma has no effect"),
        ("--use-opsm", "trains on pairs of responses, so --use-opsm has no effect"),
        ("--calculate-per-token-loss", "is the mean over pairs, so --calculate-per-token-loss has no effect"),
        ("--entropy-coef 0.1", "is the mean over pairs, so --entropy-coef has no effect"),
        ("--chosen-key rejected", "--chosen-key and --rejected-key are both rejected"),
        ("--micro-batch-size 3", "--micro-batch-size 3 would split a pair of replies; make it even"),
        ("--dpo-beta 0", "--dpo-beta must be above 0, not 0"),
        ("--dpo-label-smoothing 0.5", "--dpo-label-smoothing must be at least 0 and below 0.5, not 0.5"),
        ("--loss-type sft_loss --dpo-beta 0.2", "--dpo-beta needs --loss-type dpo_loss"),
        (
            "--loss-type sft_loss --rejected-key x",
            "--rejected-key needs --loss-type dpo_loss or rm_loss",
        ),
    ],
)
def test_what_means_nothing_to_pairs_is_refused(inputs, tmp_path, capsys, more, complaint):
    argv = flags(inputs, tmp_path / "run", "--num-rollout", "3")
    words = more.split()
    if words[0] == "--loss-type":
        at = argv.index("--loss-type")
        argv = argv[:at] + argv[at + 2 :]
    assert main(["plan", *argv, *words]) != 0
    assert complaint in " ".join(capsys.readouterr().err.split())


def right_share(checkpoint: Path, pairs: Path) -> float:
    """How often transformers finds the chosen word likelier than the rejected one, or scores it higher."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    scores = "SequenceClassification" in json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = kind.from_pretrained(checkpoint)

    def worth(asked: str, reply: str) -> float:
        ids = tokenizer(f"{asked}>{reply}<eos>", return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits
        if scores:
            return float(logits)
        logp = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return float(logp[len(asked) :].sum())

    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    return sum(worth(r["input"], r["chosen"]) > worth(r["input"], r["rejected"]) for r in rows) / len(rows)


def last_of(run: Path) -> Path:
    """The folder of the run's last model."""
    last = max((run / "checkpoints").iterdir())
    return next(p.parent for p in last.rglob("config.json"))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo_loss", "rm_loss"])
def test_the_right_word_comes_to_be_preferred(inputs, tmp_path, loss):
    chance, alphabet = random.Random(3), "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(alphabet, k=chance.choice((3, 4)))) for _ in range(2400)]
    write = write_pairs if loss == "dpo_loss" else write_ranked
    write(tmp_path / "words.jsonl", words[400:])
    write(tmp_path / "unseen.jsonl", words[:400])
    run = tmp_path / "run"
    argv = flags(inputs, run, "--num-rollout", "80", "--lr", "3e-3")
    data = str(tmp_path / "words.jsonl")
    for flag, value in (("--prompt-data", data), ("--rollout-batch-size", "32"), ("--loss-type", loss)):
        argv[argv.index(flag) + 1] = value
    done = miles("train", *argv)
    assert done.returncode == 0, done.stderr
    before = right_share(inputs, tmp_path / "unseen.jsonl")
    after = right_share(last_of(run), tmp_path / "unseen.jsonl")
    found, accuracy = rows(run), f"{loss.removesuffix('_loss')}_accuracy"
    reported = f"unseen pairs {before:.3f} -> {after:.3f}, loss {found[0]['loss']:.3f} -> {found[-1]['loss']:.3f}"
    assert after > max(before, 0.5) + 0.2 and found[-1][accuracy] > 0.8, reported


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo_loss", "rm_loss"])
def test_a_killed_run_on_pairs_continues_to_the_bit(inputs, tmp_path, loss):
    def command(run: Path) -> list[str]:
        argv = flags(inputs, run, "--num-rollout", "4", "--save-interval", "2", "--lr", "1e-3")
        argv[argv.index("--loss-type") + 1] = loss
        return ["train", *argv]

    assert miles(*command(tmp_path / "calm")).returncode == 0
    killed = miles(*command(tmp_path / "run"), kill_at="miles.train.optim.optimizer:Optimizer.step:4")
    assert killed.returncode == -signal.SIGKILL
    again = miles(*command(tmp_path / "run"))
    assert again.returncode == 0, again.stderr
    assert everything(tmp_path / "calm") == everything(tmp_path / "run")


@pytest.mark.parametrize(
    "more",
    [(), ("--lora-rank", "4"), ("--lora-rank", "4", "--actor-num-gpus-per-node", "2")],
    ids=["weights", "adapters", "adapters over ranks"],
)
def test_a_reward_model_trains_and_is_a_classifier(inputs, tmp_path, more):
    run = tmp_path / "run"
    argv = flags(inputs, run, "--num-rollout", "3", "--lr", "3e-3", "--max-tokens-per-gpu", "60", *more)
    argv[argv.index("dpo_loss")] = "rm_loss"
    done = miles("train", *argv)
    assert done.returncode == 0, done.stderr
    found = rows(run)
    assert found[0]["loss"] == pytest.approx(0.693, abs=1e-3) and all(row["grad_norm"] > 0 for row in found)
    assert not list_undocumented(found[0].keys() - {"kind", "step", "version"})
    folder = last_of(run)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("abc>cba<eos>", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 1) and model.score.weight.abs().max() > 0
    assert (folder / "adapter" / "adapter_model.safetensors").exists() == bool(more)


def test_a_reward_model_is_planned_without_reference_engine_or_evaluation(inputs, tmp_path, capsys):
    argv = flags(inputs, tmp_path / "run", "--num-rollout", "3")
    argv[argv.index("dpo_loss")] = "rm_loss"
    _, plan, _ = read("plan", argv)
    assert plan.reference is None and not plan.samples
    assert main(["plan", *argv]) == 0
    assert "log σ(score of the chosen − score of the rejected)" in " ".join(capsys.readouterr().out.split())
    held = ("--eval-prompt-data", "held", str(inputs / "heldout.jsonl"), "--rm-type", "exact")
    assert main(["plan", *argv, *held, "--dpo-beta", "0.3"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "trains a model that cannot generate; remove --eval-prompt-data" in said
    assert "--dpo-beta needs --loss-type dpo_loss" in said
