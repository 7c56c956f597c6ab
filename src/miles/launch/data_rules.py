"""Rules about what is read: prompts, held-out sets, and the order they come in."""

from collections.abc import Callable, Iterator

from miles.launch.config import Config
from miles.launch.found import prompts_in, told, why_not_data
from miles.rollout.files import entries_of, named_paths


def a_run_reads_prompts(c: Config) -> Iterator[str]:
    if c.observe.load_debug_rollout_data is not None:
        return
    if not c.rollout.prompt_data and c.plug.data_source_path is None:
        yield "--prompt-data is missing: name a .jsonl, .parquet or .arrow file of prompts, or a folder of them."
    problems = [problem for word in c.rollout.prompt_data for problem in why_not_data("--prompt-data", word)]
    yield from problems or told(entries_of, c.rollout.prompt_data)


def the_prompts_fill_at_least_one_step(c: Config) -> Iterator[str]:
    if c.schedule.num_epoch is None or not c.rollout.prompt_data:
        return
    prompts, size = prompts_in(c.rollout.prompt_data), c.rollout.rollout_batch_size
    if prompts and prompts * c.schedule.num_epoch < size:
        named = " and ".join(c.rollout.prompt_data)
        have = f"The {prompts} prompts of {named} read --num-epoch {c.schedule.num_epoch} times"
        yield f"{have} do not fill one step of --rollout-batch-size {size}; lower it, or read them more often."


def held_out_sets_are_pairs_of_a_name_and_a_file(c: Config) -> Iterator[str]:
    problems = list(told(named_paths, c.rollout.eval_prompt_data))
    yield from problems
    for name, path in {} if problems else named_paths(c.rollout.eval_prompt_data).items():
        yield from why_not_data(f"--eval-prompt-data {name}", path)


def a_curriculum_hears_of_groups_in_their_order(c: Config) -> Iterator[str]:
    if c.rollout.curriculum_path is not None and c.schedule.shelf_window > 1:
        yield (
            f"--curriculum-path chooses prompts by what became of earlier ones, and with --shelf-window "
            f"{c.schedule.shelf_window} groups overtake each other; leave one of them out."
        )


DATA: tuple[Callable[[Config], Iterator[str]], ...] = (
    a_run_reads_prompts,
    the_prompts_fill_at_least_one_step,
    a_curriculum_hears_of_groups_in_their_order,
)
