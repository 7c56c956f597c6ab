"""What a server says of tokens is read as SGLang writes it, and nothing else is believed."""

import copy

import numpy as np
import pytest

from miles.rollout.distill.wire import ScoreRequest, build_request_body, parse_scores
from miles.rollout.reward.types import GradingError

TOKENS = (5, 17, 300, 44)
# Numbers and form of SGLang 0.5.18's, of these tokens with logprob_start_len 1, two tops and two watched tokens.
ANSWER = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 0},
        "input_token_logprobs": [
            [None, 17, None],
            [-4.9139404296875, 300, None],
            [-7.133440017700195, 44, None],
        ],
        "input_top_logprobs": [
            None,
            [[-4.539914608001709, 96, None], [-4.736606597900391, 457, None]],
            [[-4.853565216064453, 468, None], [-4.882537364959717, 337, None]],
        ],
        "input_token_ids_logprobs": [
            None,
            [[-5.80980920791626, 1, None], [-6.497632026672363, 7, None]],
            [[-5.172946453094482, 1, None], [-5.418056011199951, 7, None]],
        ],
    },
}
WISH = ScoreRequest(tokens=TOKENS, start=2, top_k=2, query_ids=(1, 7))


def test_an_answer_of_sglangs_is_read():
    said = parse_scores(WISH, ANSWER)
    assert said.logprob_n.tolist() == np.float32([-4.9139404296875, -7.133440017700195]).tolist()
    assert said.top_nk.tolist() == [[96, 457], [468, 337]] and said.top_logprob_nk.shape == (2, 2)
    assert said.queried_nu[:, 1].tolist() == np.float32([-6.497632026672363, -5.418056011199951]).tolist()
    bare = parse_scores(ScoreRequest(tokens=TOKENS, start=2), ANSWER)
    assert bare.top_nk.shape == (2, 0) and bare.queried_nu.shape == (2, 0)


def test_what_is_posted_draws_nothing_and_asks_about_the_place_before():
    body = build_request_body([WISH, ScoreRequest(tokens=(1, 2), start=1)], temperature=0.7)
    assert body["sampling_params"] == {"temperature": 0.7, "max_new_tokens": 0} and body["return_logprob"]
    assert body["logprob_start_len"] == [1, 0] and body["top_logprobs_num"] == [2, 0]
    assert body["token_ids_logprob"] == [[1, 7], []] and body["input_ids"] == [[5, 17, 300, 44], [1, 2]]
    bare = build_request_body([ScoreRequest(tokens=(1, 2), start=1)], temperature=1.0)
    assert "top_logprobs_num" not in bare and "token_ids_logprob" not in bare


def spoilt(change):
    answer = copy.deepcopy(ANSWER)
    change(answer["meta_info"])
    return answer


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ([], "has no meta_info"),
        ({"text": ""}, "has no meta_info"),
        (spoilt(lambda m: m.pop("input_token_logprobs")), "has no input_token_logprobs for 3 tokens"),
        (spoilt(lambda m: m["input_token_logprobs"].pop()), "has 2 input_token_logprobs for 3 tokens"),
        (spoilt(lambda m: m["input_token_logprobs"][1].__setitem__(1, 301)), "are of other tokens than were sent"),
        (spoilt(lambda m: m["input_token_logprobs"].__setitem__(1, [None, 300, None])), "where a log-prob and a token"),
        (
            spoilt(lambda m: m["input_token_logprobs"][1].__setitem__(0, float("nan"))),
            "gives token 300 the log-prob nan",
        ),
        (spoilt(lambda m: m["input_token_logprobs"][1].__setitem__(0, 0.5)), "gives token 300 the log-prob 0.5"),
        (spoilt(lambda m: m["input_top_logprobs"][1].pop()), "not as many at each place"),
        (spoilt(lambda m: m["input_top_logprobs"][1][0].__setitem__(1, 457)), "not all different"),
        (spoilt(lambda m: m["input_top_logprobs"].__setitem__(2, None)), "input_top_logprobs are not lists"),
        (spoilt(lambda m: m["input_token_ids_logprobs"][1][0].__setitem__(1, 2)), "not of the tokens that were asked"),
        (spoilt(lambda m: m.update(finish_reason={"type": "abort", "message": "too long"})), r"aborted \(too long\)"),
    ],
)
def test_an_answer_about_anything_else_is_not_believed(answer, complaint):
    with pytest.raises(GradingError, match=complaint):
        parse_scores(WISH, answer)
