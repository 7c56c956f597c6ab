"""Runs on images: the same tokens and pixels in both planes, recorded once, shown, and replayed to the bit."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.models.small_aya_vision import write_aya_checkpoint
from tests.models.small_vision import draw_png, write_processor, write_vision_checkpoint
from tests.rollout.generate.scripted_engine import Scripted, call

from miles.core.events import BatchTaken
from miles.core.media_store import MediaStore
from miles.core.protocols import SamplingParams
from miles.core.types import Batch, Group, Prompt, Reward
from miles.launch.main import main
from miles.models.processor import load_processor
from miles.observe.rollouts import write_step
from miles.rollout.generate.multi_turn import MultiTurn
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.tools.env_registry import EnvironmentFactory
from miles.rollout.tools.tool import ToolLimits
from miles.rollout.tools.toolbox import ToolRegistry, ToolResources


def write_rows(folder, *, images=5):
    (folder / "pictures").mkdir(parents=True)
    for seed in range(images):
        (folder / "pictures" / f"{seed}.png").write_bytes(draw_png(seed))
    rows = [{"input": "<image>What?", "images": f"pictures/{seed}.png", "label": "a"} for seed in range(images)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder, *more: str) -> int:
    return main(
        [
            *("train", "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "data.jsonl")),
            *("--multimodal-keys", '{"image": "images"}', "--label-key", "label", "--apply-chat-template"),
            *("--rm-type", "f1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "2"),
            *("--num-steps-per-rollout", "1", "--rollout-max-response-len", "6", "--lr", "1e-3"),
            *("--save", str(folder / "run"), "--device", "cpu", "--num-threads", "1", "--view", "plain"),
            *("--parity", "exact", *more),
        ]
    )


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_run_on_images_has_parity_0_and_is_replayed_to_the_bit(kind, tmp_path, capsys):
    write_vision_checkpoint(tmp_path / "model", kind)
    write_rows(tmp_path)
    assert train(tmp_path) == 0
    assert "worst parity     0 mean" in capsys.readouterr().out
    assert len(list((tmp_path / "run" / "media").iterdir())) == 4
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "preprocessor_config.json").is_file()
    assert main(["show", str(tmp_path / "run"), "--sample", "0"]) == 0
    shown = capsys.readouterr().out
    assert "<|vision_start|>[image " in shown and str(tmp_path / "run" / "media") in shown
    assert main(["replay", str(tmp_path / "run"), "2"]) == 0
    assert "equal bit for bit" in capsys.readouterr().out


def test_a_run_on_videos_has_parity_0_and_is_replayed_to_the_bit(tmp_path, capsys):
    write_vision_checkpoint(tmp_path / "model", "qwen3_vl")
    write_rows(tmp_path)
    rows = [
        {"input": "<video>What? <image>", "label": "a", "images": ["pictures/0.png"], "frames": frames}
        for frames in [["pictures/1.png", "pictures/2.png", "pictures/3.png"], ["pictures/4.png", "pictures/1.png"]]
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(tmp_path, "--multimodal-keys", '{"image": "images", "video": "frames"}') == 0
    assert "worst parity     0 mean" in capsys.readouterr().out
    kept = sorted(path.suffixes[0] for path in (tmp_path / "run" / "media").iterdir())
    assert kept == 5 * [".png"] + 2 * [".video"]
    assert main(["replay", str(tmp_path / "run"), "2"]) == 0
    assert "equal bit for bit" in capsys.readouterr().out


def test_a_printed_conversation_has_its_calls_and_the_image_of_each_turn(tmp_path, capsys):
    """Turns are numbered; below a turn are its calls, and below the prompt and each result the image they hold."""
    run = tmp_path / "run"
    processor = load_processor(write_processor(tmp_path / "model", "qwen3_vl"), media=MediaStore(run / "media"))
    part = {"type": "image", "image": processor.media.put(draw_png(0, 64, 64))}
    messages = ({"role": "user", "content": [part, {"type": "text", "text": "Which?"}]},)
    script = [call("zoom", x=1, y=0.25, factor=4), call("crop", left=0, top=0, right=0.5, bottom=0.25), "B"]
    factory = EnvironmentFactory(ToolRegistry(ToolResources(media=processor.media), ["crop", "zoom"]), ToolLimits())
    generate = MultiTurn(build_renderer(processor), factory)
    prompt = Prompt(id=1, messages=messages)
    trajectory = asyncio.run(generate(prompt, Scripted(processor, script), SamplingParams(max_new_tokens=2000)))
    group = Group(prompt=prompt, trajectories=(replace(trajectory, reward=Reward(value=1.0)),))
    taken = BatchTaken(step=1, tickets=(0,), groups=(group,), batch=Batch(step=1, samples=(), num_groups=1))
    (run / "rollouts").mkdir()
    write_step(run / "rollouts" / "step-000001.parquet", taken)
    (run / "config.toml").write_text(f'[models]\nhf_checkpoint = "{tmp_path / "model"}"\n')
    assert main(["show", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    placed = [each.image.source for span in trajectory.spans for each in span.images]
    sizes = ("64 x 64", "64 x 64", "32 x 16")
    images = [
        f"  image {source[:12]}: {size} pixels, PNG, {run / 'media' / source}.png"
        for source, size in zip(placed, sizes, strict=True)
    ]
    calls = ["  call zoom(x=1, y=0.25, factor=4)", "  call crop(left=0, top=0, right=0.5, bottom=0.25)"]
    assert [line for line in lines if line.startswith("  ")] == [images[0], calls[0], images[1], calls[1], images[2]]
    titles = [line.split(" (")[0] for line in lines if line.startswith(("prompt (", "policy", "environment ("))]
    turns = [[f"policy, version {version}, turn {turn}" for version in (1, 2)] for turn in (1, 2, 3)]
    assert titles == ["prompt", *turns[0], "environment", *turns[1], "environment", *turns[2]]
    (run / "media" / f"{placed[1]}.png").unlink()
    assert main(["show", str(run)]) == 0
    assert f"  image {placed[1][:12]}: not in {run / 'media'}" in capsys.readouterr().out.splitlines()


def test_served_engines_get_the_images(tmp_path, capsys):
    write_vision_checkpoint(tmp_path / "model", "qwen2_5_vl")
    write_rows(tmp_path)
    assert train(tmp_path, "--rollout-backend", "served") == 0
    assert "worst parity     0 mean" in capsys.readouterr().out


def test_a_model_that_transformers_runs_trains_on_images(tmp_path, capsys):
    write_aya_checkpoint(tmp_path / "model")
    write_rows(tmp_path)
    assert train(tmp_path, "--model-impl", "transformers", "--parity", "fast") == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["parity_mean_abs"] for row in rows if "parity_mean_abs" in row) < 1e-5
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", saved))
    name = next(name for name in before if "vision_tower" in name and name.endswith("q_proj.weight"))
    assert before.keys() == after.keys() and not torch.equal(before[name], after[name])


def test_images_are_refused_if_transformers_cannot_place_them(tmp_path, capsys, monkeypatch):
    write_vision_checkpoint(tmp_path / "model", "qwen2_5_vl")
    write_rows(tmp_path)
    assert train(tmp_path, "--model-impl", "transformers", "--parity", "fast") != 0
    assert "positions in several axes (M-RoPE); remove one of them." in capsys.readouterr().err
    part = {"type": "image", "image": "pictures/0.png"}
    row = {"input": [{"role": "user", "content": [part]}], "label": "a"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("miles.models.hf_adapter.checkpoint.load", None)  # nothing is loaded before
    words = ("--model-impl", "transformers", "--parity", "fast", "--multimodal-keys", "{}")
    assert train(tmp_path, *words) != 0
    assert "line 1: a message has images, but the model reads text only" in capsys.readouterr().err


def test_a_truncated_image_is_found_before_the_model_is_loaded(tmp_path, capsys):
    write_vision_checkpoint(tmp_path / "model", "qwen2_5_vl")
    write_rows(tmp_path)
    path = tmp_path / "pictures" / "3.png"
    path.write_bytes(path.read_bytes()[:-40])
    assert train(tmp_path) != 0
    error = capsys.readouterr().err
    assert "line 4, column images, image 1 (3.png): the image is" in error and "--skip-bad-rows" in error
    assert train(tmp_path, "--skip-bad-rows") == 0
