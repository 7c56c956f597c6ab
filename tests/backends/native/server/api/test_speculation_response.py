"""/generate of a server that decodes speculatively: the same tokens, and counts of drafts that a client can read."""

from pathlib import Path

import pytest
from tests.backends.native.server.live import Live, served

from miles.backends.remote.response import GenerateResponse

LONG = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}


def test_counts_of_drafts_are_those_of_sglang_and_of_the_engine(folder: Path):
    async def story(live: Live) -> None:
        first = await live.generate(sampling_params=LONG, return_logprob=True)
        again = await live.generate(sampling_params=LONG, return_logprob=True)
        assert again["output_ids"] == first["output_ids"]
        stats = live.engine.stats()
        metas = [first["meta_info"], again["meta_info"]]
        assert sum(meta["spec_verify_ct"] for meta in metas) == stats["draft_chains"]
        assert sum(meta["spec_draft_token_num"] for meta in metas) == stats["drafted_tokens"]
        assert sum(meta["spec_accept_token_num"] for meta in metas) == stats["accepted_draft_tokens"]
        meta = again["meta_info"]
        assert meta["spec_accept_token_num"] > 20  # the first response is its draft
        assert meta["spec_accept_rate"] == meta["spec_accept_token_num"] / meta["spec_draft_token_num"]
        assert meta["spec_accept_length"] == 1 + meta["spec_accept_token_num"] / meta["spec_verify_ct"]
        read = GenerateResponse(vocab_size=512, limit=48)
        read.add_event(again)
        assert read.speculation is not None
        assert read.speculation.accept_length == meta["spec_accept_length"]
        assert sum(read.speculation.histogram) == meta["spec_verify_ct"]
        _, text = await live.get("/metrics")
        accepted = stats["accepted_draft_tokens"]
        assert f'miles_engine_accepted_draft_tokens_total{{model_name="tiny"}} {accepted}' in text

    served(story, folder, speculative_algorithm="ngram")


@pytest.mark.parametrize("stream", [False, True])
def test_without_speculation_there_are_no_counts(folder: Path, stream: bool):
    async def story(live: Live) -> None:
        body = {"input_ids": [5, 17, 300], "sampling_params": LONG, "stream": stream}
        replies = await live.stream("/generate", body) if stream else [await live.generate(**body)]
        assert not any(name.startswith("spec_") for reply in replies for name in reply["meta_info"])

    served(story, folder)
