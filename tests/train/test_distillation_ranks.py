"""Distillation with policy and teachers sharded over ranks, against one process that holds them all."""

import numpy as np
from tests.launch.test_memory_layouts import DENSE, small
from tests.pool import ranks
from tests.train.distillation_ranks import alone, among

from miles.cluster.parallel_dims import ParallelDims


def test_a_lesson_over_ranks_has_the_gradient_of_one_process():
    spec = small(DENSE)
    layouts = [
        ParallelDims(world=4, shard=2, tensor=2),
        ParallelDims(world=4, context=2, tensor=2),
        ParallelDims(world=4, shard=2, context=2),
    ]
    wanted = alone(spec)
    for layout, found in zip(layouts, ranks(4, among, spec, layouts)[0], strict=True):
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            apart = np.linalg.norm(found[name] - grad) / np.linalg.norm(grad)
            assert apart < 2e-5, (layout, name, apart)
