"""Where a server does otherwise than the suite expects, and why; a difference that has gone is a failure too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Which server fails which test. ``fatal``: the test would end that server, so it is not run there."""

    test: str
    server: str
    why: str
    fatal: bool = False


SEEDS = "SGLang heeds seeds only with --enable-deterministic-inference, which its CPU path does not have"
CUDA = "SGLang counts and compares weights on CUDA only"
DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        test="test_the_name_of_a_batch_aborts_all_of_it",
        server="sglang",
        why="SGLang knows only the names it made of it, such as both_0",
    ),
    Difference(
        test="test_what_waits_for_the_end_of_a_pause_can_be_aborted",
        server="sglang",
        why="SGLang holds it back where an abort does not look, and answers it after the pause",
    ),
    Difference(test="test_a_seed_draws_the_same_again_alone_and_among_others", server="sglang", why=SEEDS),
    Difference(test="test_a_seed_gives_the_same_chat_again", server="sglang", why=SEEDS),
    Difference(
        test="test_tensors_of_a_wrong_shape_change_nothing", server="sglang", why="SGLang's process ends", fatal=True
    ),
    Difference(
        test="test_tensors_of_an_unknown_name_are_refused",
        server="sglang",
        why="SGLang leaves them out and says that all went well",
    ),
    Difference(test="test_checksums_tell_weights_apart", server="sglang", why=CUDA),
    Difference(test="test_weights_are_compared_with_a_snapshot", server="sglang", why=CUDA),
    Difference(
        test="test_a_tensor_can_be_looked_at", server="sglang", why="SGLang's Qwen3 does not know its tensors by name"
    ),
)


def difference_of(test: str, server: str) -> Difference | None:
    return next((each for each in DIFFERENCES if (each.test, each.server) == (test, server)), None)
