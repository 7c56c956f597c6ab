"""The names table: a bijection between our tensors and Hugging Face's."""

import torch
from tests.models.each_kind import each_kind
from tests.models.oracle import hf_model, published, saved, twin, used

from miles.models.checkpoint import param_map
from miles.models.checkpoint.hf import iter_hf_tensors


@each_kind
def test_pieces_tile_each_of_our_tensors_exactly_once(kind):
    spec = twin(hf_model(kind)).spec
    for ours, pieces in param_map.build_param_map(spec).items():
        covered = torch.zeros(param_map.param_shape(pieces))
        for piece in pieces:
            part = piece.view(covered)
            assert part.shape == piece.shape, ours
            part += 1
        assert torch.equal(covered, torch.ones_like(covered)), ours


@each_kind
def test_hf_tensors_are_transformers_own_tensors_by_name_and_value(kind):
    model = hf_model(kind)
    spec = twin(model).spec
    theirs = published(spec, used(spec, saved(model)))
    if spec.tie_embeddings:
        del theirs[next(name for name in theirs if name.endswith("head.weight"))]
    ours = dict(iter_hf_tensors(twin(model)))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_hf_tensors_are_views_of_the_live_parameters():
    decoder = twin(hf_model("qwen3 moe"))
    with torch.no_grad():
        decoder.layers[0].moe.gate_up.zero_()
    tensors = dict(iter_hf_tensors(decoder))
    assert not tensors["model.layers.0.mlp.experts.3.up_proj.weight"].any()
