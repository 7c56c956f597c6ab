"""The benchmark of images runs in all its parts on a CPU, and its check compares what two engines compute."""

import pytest
from benchmarks.bench_vision_gpu import DESCRIBE, TINY, measure_part


@pytest.mark.parametrize("part", ["check", "tower", "profile", "rollout", "train"])
def test_each_part_of_the_benchmark_gives_its_numbers(part: str) -> None:
    found = measure_part(part, "tiny", "cpu", TINY)
    assert DESCRIBE[part](found)
    if part == "check":
        assert found["ok"] and max(value for name, value in found.items() if name != "ok") > 0
    if part == "rollout":
        # Samples of a prompt share what is prefilled; the text has as many tokens as the prompt with its image.
        assert found["images"]["encoded_images"] == TINY.prompts and not found["text"]["encoded_images"]
        assert found["images"]["prefilled_tokens"] == found["text"]["prefilled_tokens"]
    if part == "train":
        assert found["planned_gib"] > found["planned_parts_gib"]["activations"] > 0
