"""A generate function whose turns are appended to the sample, scored by the DAPO grader, under slime's names."""

from slime.rollout.rm_hub.math_dapo_utils import compute_score as math_dapo_compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    sample.rollout_log_probs = None
    sample.response, sample.response_length, sample.loss_mask = "", 0, []
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = list(state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
    for turn in range(2):
        output = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params})
        entries = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in entries],
            log_probs=[item[0] for item in entries],
            trainable=True,
            meta_info=output["meta_info"],
        )
        sample.response += output["text"]
        if turn == 0:
            result = state.tokenizer("ab", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=result, trainable=False)
            sample.response += "ab"
    sample.validate()
    sample.tool_call_count = 1
    return sample


async def reward_func(args, sample, **kwargs):
    result = math_dapo_compute_score(sample.response, sample.label, strict_box_verify=True)
    assert result["pred"] is not None
    return {"score": result["score"] + 0.1 * getattr(sample, "tool_call_count", 0) + len(set(sample.response)), **{}}
