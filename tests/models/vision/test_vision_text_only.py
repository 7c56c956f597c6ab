"""Text-only use of vision-language models: the engine samples with the tower loaded, and refuses nothing."""

import numpy as np
import pytest
from tests.backends.native.conftest import Tiny
from tests.backends.native.test_oracle import KNOBS, REQUESTS, logits_of_each, whole
from tests.models.vision.small_vision import vision_model, vision_twin


@pytest.mark.parametrize("kind", ["qwen3_vl", "llama4"])
def test_an_engine_samples_text_from_a_model_with_a_tower(kind):
    model, tiny = vision_model(kind), Tiny()
    answers = tiny.generate_all(tiny.engine(vision_twin(model), **KNOBS), REQUESTS)
    finished = whole(tiny, REQUESTS, answers)
    for i, logits in logits_of_each(model, finished):
        start = len(REQUESTS[i][0])
        expected = logits[start - 1 : -1].log_softmax(-1).gather(1, finished[i][start:, None]).squeeze(1)
        assert np.abs(tiny.logprobs(answers[i]) - expected.detach().numpy()).max() <= 1e-4
