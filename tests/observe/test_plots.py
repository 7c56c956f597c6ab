"""A picture comes out of whatever metrics there are."""

import math

import pytest
from PIL import Image

from miles.observe.event_records import encode_line
from miles.observe.plots import plot_curves, smooth


def write(path, rows):
    path.write_bytes(b"".join(encode_line(row) for row in rows))


def train(step, **values):
    return {"kind": "train", "step": step, **values}


CASES = {
    "long": [
        train(s, reward=0.5 + math.sin(s) / 3, parity_mean_abs=1e-7 * (1 + s % 7), entropy=1.0) for s in range(3000)
    ]
    + [{"kind": "eval", "step": s, "eval/a/reward": s / 3000, "eval/b/reward": 0.1} for s in range(0, 3000, 100)],
    "one step": [train(1, reward=0.5)],
    "only eval": [{"kind": "eval", "step": 0, "eval/a/reward": 0.5}],
    "no reward": [train(s, loss=1.0 / (1 + s), response_length=12.0) for s in range(5)],
    "not numbers": [train(s, reward=math.nan, parity_mean_abs=math.inf, entropy=math.nan) for s in range(4)],
    "exact parity": [train(s, reward=-1.0, parity_mean_abs=0.0, entropy=0.0) for s in range(4)],
}


@pytest.mark.parametrize("case", CASES)
def test_a_picture_is_drawn_and_small(tmp_path, case):
    write(tmp_path / "metrics.jsonl", CASES[case])
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "a run") is True
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 800 and picture.height > 400
        assert picture.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
    assert (tmp_path / "curves.png").stat().st_size < 150_000
    assert [p.name for p in tmp_path.glob("*.part")] == []


def test_damaged_lines_do_not_stop_the_picture(tmp_path):
    write(tmp_path / "metrics.jsonl", CASES["one step"])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"train","st')
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").exists()


def test_a_run_that_died_before_its_first_step_has_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "a run") is False
    assert not (tmp_path / "curves.png").exists()


def test_smoothing_keeps_a_straight_line_straight_and_does_not_lag():
    line_up = [float(n) for n in range(50)]
    assert smooth(line_up, 5)[5:-5] == pytest.approx(line_up[5:-5])
    assert smooth([1.0, 2.0], 100) == pytest.approx([1.5, 1.5], abs=0.01)
    assert math.isnan(smooth([math.nan], 2)[0])
