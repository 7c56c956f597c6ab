"""Export of checkpoints of any format in the precision of the engine."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.launch.small_run import flags, write_inputs

from miles.launch.build.models import build_hf_conversion
from miles.launch.main import main
from miles.launch.read_config import read


def test_a_checkpoint_of_megatron_is_quantized_as_one_of_hugging_face(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    assert main(["convert", str(inputs), str(tmp_path / "dist"), "--format", "torch_dist"]) == 0
    how = ("--rollout-precision", "fp8", "--save-hf", str(tmp_path / "out"), "--save-hf-precision", "rollout")
    found: list[dict[str, torch.Tensor]] = []
    for name, checkpoint, more in (
        ("hf", inputs, ()),
        ("megatron", tmp_path / "dist" / "release", ("--train-backend", "megatron", "--ckpt-format", "torch_dist")),
    ):
        convert = build_hf_conversion(read("plan", flags(inputs, tmp_path / "run", *how, *more))[0])
        assert convert is not None
        convert(checkpoint, tmp_path / "out" / name)
        found.append(load_file(tmp_path / "out" / name / "model.safetensors"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["hf", "megatron"]
    assert found[0].keys() == found[1].keys()
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in found[0].values())
    for name, tensor in found[0].items():
        assert torch.equal(tensor.view(torch.uint8), found[1][name].view(torch.uint8)), name
