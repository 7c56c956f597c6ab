"""The table of every metric -- its name, unit and meaning -- and those that follow from the groups alone.

``docs/metrics.md`` is this table: ``python -m miles.observe.metric > docs/metrics.md``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from miles.core.types import GIVEN, Group, Status, Trajectory, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric's name (``<set>`` and the like stand for any word), what it counts, and one sentence of meaning."""

    name: str
    unit: str
    meaning: str

    def fits(self, name: str) -> bool:
        """Is ``name`` this metric?"""
        pattern = "".join(
            "[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", self.name)
        )
        return re.fullmatch(pattern, name) is not None


MISMATCH = "session_mismatch"
MISMATCHES = ("retokenised", "boundary", "whitespace", "thinking", "tool_calls", "unknown", "refused")
"""What an audit may find of a session, under the name by which metadata and metrics tell of it."""


def _rows(text: str) -> tuple[Metric, ...]:
    cells = (tuple(cell.strip() for cell in row.split("|")) for row in text.strip().splitlines())
    return tuple(Metric(name=name, unit=unit, meaning=meaning) for name, unit, meaning in cells)


ROLLOUT = _rows(
    """
    reward              | reward   | Mean reward of the trajectories trained on.
    reward_std          | reward   | Standard deviation of the reward over the trajectories trained on.
    reward_min          | reward   | Smallest reward among the trajectories trained on.
    reward_max          | reward   | Largest reward among the trajectories trained on.
    response_length     | tokens   | Mean number of tokens the policy wrote in a trajectory.
    response_length_max | tokens   | Largest number of tokens the policy wrote in a trajectory.
    truncated_share     | share    | Share of trajectories that were cut at the length limit.
    unscored_share      | share    | Share of trajectories that earn 0 because nothing could score them.
    failed_share        | share    | Share of trajectories whose environment or agent failed (see --failed-attempts).
    reward/<part>       | reward   | Mean of a named part of the reward over the trajectories that have it.
    zero_std_share      | share    | Share of groups whose rewards are all equal, so that none is better.
    staleness           | versions | How many versions behind the trainer's the oldest token of the batch was.
    staleness_mean      | versions | Mean over trajectories of how many versions behind their oldest token was.
    rollout_tokens      | tokens   | Tokens the policy wrote in the trajectories trained on.
    session_mismatch/retokenised | share | Share of sessions with text that the tokenizer would cut into other tokens.
    session_mismatch/boundary    | share | Share of sessions with other marks around turns than the chat template's.
    session_mismatch/whitespace  | share | Share of sessions that differ from the chat template in blanks alone.
    session_mismatch/thinking    | share | Share of sessions with thoughts that the chat template leaves out or adds.
    session_mismatch/tool_calls  | share | Share of sessions with tool calls that the chat template writes otherwise.
    session_mismatch/unknown     | share | Share of sessions that differ from the chat template in another way.
    session_mismatch/refused     | share | Share of sessions with a conversation that the chat template will not write.
    groups_dropped      | groups   | Groups a filter dropped while this batch was filled.
    groups_cut          | groups   | Groups beyond those the step needed that were cut, with --over-sampling-batch-size.
    """
)

TRAIN = _rows(
    """
    loss                | nats     | The loss the optimizer descends, all terms together.
    pg_loss             | nats     | The clipped policy-gradient term of the loss.
    pg_clipfrac         | share    | Share of trained tokens whose ratio a clip held back.
    ratio               | ratio    | Mean probability ratio of the policy now to the policy that is taken as old.
    ppo_kl              | nats     | Mean of old minus new log-prob of the trained tokens.
    opsm_share          | share    | Share of trained tokens that off-policy sequence masking left out of the loss.
    rm_accuracy         | share    | Share of pairs whose chosen reply the reward model scores above the other.
    rm_margin           | reward   | Mean score of the chosen replies less that of the rejected ones.
    rm_chosen_score     | reward   | Mean score of the chosen replies.
    rm_rejected_score   | reward   | Mean score of the rejected replies.
    dpo_accuracy        | share    | Share of pairs whose chosen reply gained more over the reference than the other.
    dpo_margin          | nats     | Mean reward of the chosen replies less that of the rejected ones.
    dpo_chosen_reward   | nats     | Mean over chosen replies of beta times the log-prob gained over the reference.
    dpo_rejected_reward | nats     | Mean over rejected replies of beta times the log-prob gained over the reference.
    kl                  | nats     | Divergence of the policy from the reference model.
    entropy             | nats     | Mean entropy of the policy's next-token distribution where it is trained.
    distill_kl          | nats     | KL of the policy and its teacher, estimated on the drawn tokens or exact.
    teacher_logp        | nats     | Mean log-prob that the teacher gives the tokens the policy drew.
    grad_norm           | norm     | Norm of the whole gradient before clipping.
    lr                  | rate     | Learning rate of the last optimizer step.
    advantage_mean      | reward   | Mean advantage over the trained tokens, before a teacher adds to it.
    advantage_std       | reward   | Standard deviation of the advantage over the trained tokens, before a teacher adds.
    reward_kl           | nats     | Divergence from the reference that the tokens' rewards are charged with.
    return_mean         | reward   | Mean over the trained tokens of what was earned from each on.
    return_std          | reward   | Standard deviation of what was earned from each trained token on.
    value_mean          | reward   | Mean over the trained tokens of what the critic expected.
    explained_variance  | share    | How much of the returns' variance the critic foresaw; 1 is all of it.
    value_loss          | reward²  | The critic's squared error with its clip, which its optimizer descends.
    value_clipfrac      | share    | Share of trained tokens whose value moved further than the clip.
    critic_grad_norm    | norm     | Norm of the critic's whole gradient before clipping.
    critic_lr           | rate     | Learning rate of the critic's last optimizer step.
    samples             | rows     | Training rows in the batch; a trajectory with several branches gives several.
    micro_batches       | passes   | Packed forward and backward passes the step took.
    tokens              | tokens   | Tokens of the batch, prompts included.
    train_tokens        | tokens   | Tokens the trainer's forward passes read, prompts included.
    tokens_shared       | tokens   | Tokens of these that --share-prefix left to another sample of the prompt to read.
    trained_tokens      | tokens   | Tokens of the batch that the policy wrote and is trained on.
    parity_mean_abs     | nats     | Mean absolute gap between engine's and trainer's log-prob under one version.
    parity_max_abs      | nats     | Largest absolute gap between engine's and trainer's log-prob under one version.
    parity_k1           | nats     | Mean of engine's minus trainer's log-prob under one version.
    parity_k3           | nats     | Divergence of the engine from the trainer under one version, never below 0.
    parity_ppl_ratio    | ratio    | Mean over samples of the trainer's perplexity over the engine's, one version.
    parity_ess          | share    | Effective share of the tokens if each weighed its ratio of trainer to engine.
    parity_tokens       | tokens   | How many tokens the parity figures are taken over.
    tis                 | ratio    | Mean ratio of trainer to engine at the level of the weights, before bounds.
    tis_weight          | ratio    | Mean weight of a token after bounds and rejection, before normalisation.
    tis_clipfrac        | share    | Share of trained tokens whose importance weight was held at a bound.
    tis_maskfrac        | share    | Share of trained tokens whose importance weight beyond a bound was made 0.
    tis_ess             | share    | Effective share of the trained tokens under the weights in use.
    tis_rung            | rung     | What the parity called for: 0 no weights, 1 truncated ones, 2 masked ones.
    rs_maskfrac         | share    | Share of trained tokens that --use-rs left out.
    rs_vetofrac         | share    | Share of trained tokens in samples left out for one impossible token.
    parity_mean_abs_no_replay | nats | The mean absolute gap of one micro-batch read without routing replay.
    routing_flip_share  | share    | Share of replayed expert choices the trainer's router would not have made.
    expert_imbalance    | ratio    | How often the busiest expert is chosen against the mean one, mean over layers.
    policy/<name>/version  | versions | Publications that the weights of a policy beside the main one have seen.
    policy/<name>/<metric> | its own  | The metric of that name, of a policy beside the main one.
    """
)

EVAL = _rows(
    """
    eval/<set>/reward          | reward | Mean reward over the held-out set.
    eval/<set>/response_length | tokens | Mean number of tokens in an attempt at the held-out set.
    eval/<set>/truncated       | share  | Share of attempts at the held-out set that were cut at the length limit.
    eval/<set>/unscored        | share  | Share of attempts at the held-out set that nothing could score.
    eval/<set>/reward/<role>   | reward | Mean reward of a role over the attempts at the held-out set it had a part in.
    eval/<set>/pass@<k>        | share  | Chance that one of k attempts at a held-out prompt earns 1 or more.
    """
)

SECONDS = _rows(
    """
    rollout             | seconds  | Waiting for the batch's groups.
    train               | seconds  | The training step, all its optimizer steps together.
    publish             | seconds  | Giving the new weights to the engines.
    step                | seconds  | The whole step, from the first wait to the new version being live.
    evaluate            | seconds  | Answering and scoring every held-out set.
    train/own_per_token | seconds | What a token took the first rank itself: its layers forward, and the loss.
    train/own_per_token_median | seconds | The same, in the median over the ranks.
    train/slowest_rank  | ratio    | What the slowest rank took for a token itself, in times of the others' median.
    train/<part>   | seconds | A part of the training step, by the trainer's own clock.
    publish/bytes  | bytes   | Weights that each server was sent: those that it did not have already.
    publish/<part> | seconds | A part of the publication, by its own clock.
    """
)

SECTIONS = {
    "Rollout": (ROLLOUT, "In `metrics.jsonl`, `kind` `train`: about the trajectories a step was trained on."),
    "Training": (TRAIN, "In `metrics.jsonl`, `kind` `train`: about the update, as means over the step."),
    "Evaluation": (
        EVAL,
        "In `metrics.jsonl`, `kind` `eval`; `step` is how many steps the policy had been trained for.",
    ),
    "Seconds": (SECONDS, "In `timings.jsonl`, and nowhere else: wall-clock readings never repeat."),
}


def describe(name: str) -> Metric | None:
    """The table's entry for a metric of ``metrics.jsonl``, or None."""
    if (other := re.fullmatch(r"policy/[^/]+/(.+)", name)) and other[1] != "version":
        return describe(other[1])
    return next((metric for metric in (*ROLLOUT, *TRAIN, *EVAL) if metric.fits(name)), None)


def unexplained(names: Iterable[str]) -> list[str]:
    """Those of the names that no entry of the table explains."""
    return sorted(name for name in names if describe(name) is None)


def group_metrics(groups: Sequence[Group], version: Version) -> dict[str, float]:
    """What a batch's groups tell by themselves; ``version`` is the trainer's before the step."""
    tries = [t for group in groups for t in group.trajectories]
    rewards = [reward for group in groups for reward in group.rewards]
    if tries and all(_is_demonstration(t) for t in tries):  # nothing was sampled, nothing earned
        return {}
    ages = [version.number - number for t in tries if (number := _oldest(t, version.policy)) is not None]
    measured: dict[str, float] = {}
    if rewards:
        measured |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
        measured |= {"reward_min": min(rewards), "reward_max": max(rewards)}
        measured |= {f"reward/{name.replace('/', '.')}": value for name, value in _parts(tries).items()}
    if tries:
        lengths = [t.response_length for t in tries]
        measured |= {"response_length": fmean(lengths), "response_length_max": float(max(lengths))}
        measured |= {"rollout_tokens": float(sum(lengths))}
        measured["truncated_share"] = fmean(t.status is Status.TRUNCATED for t in tries)
        measured["unscored_share"] = fmean("unscored" in t.metadata for t in tries)
        measured["failed_share"] = fmean(t.status is Status.FAILED for t in tries)
        measured |= _mismatches(tries)
        measured["zero_std_share"] = fmean(len(set(group.rewards)) <= 1 for group in groups)
    if ages:
        measured |= {"staleness": float(max(ages)), "staleness_mean": fmean(ages)}
    return {name: float(value) for name, value in measured.items()}


def _parts(tries: Iterable[Trajectory]) -> dict[str, float]:
    """The mean of every named part of the rewards."""
    found: dict[str, list[float]] = {}
    for trajectory in tries:
        for name, part in (trajectory.reward.parts if trajectory.reward is not None else {}).items():
            found.setdefault(name, []).append(float(part))
    return {name: fmean(values) for name, values in sorted(found.items())}


def _mismatches(tries: Iterable[Trajectory]) -> dict[str, float]:
    """In what share of the sessions that were audited each class of difference was found."""
    audited: list[Mapping[str, int]] = [t.metadata[MISMATCH] for t in tries if MISMATCH in t.metadata]
    return {f"{MISMATCH}/{kind}": fmean(kind in found for found in audited) for kind in MISMATCHES if audited}


def _is_demonstration(trajectory: Trajectory) -> bool:
    written = [span.version for span in trajectory.spans if span.version is not None]
    return bool(written) and all(version == GIVEN for version in written)


def _oldest(trajectory: Trajectory, policy: str) -> int | None:
    written = (span.version for span in trajectory.spans if span.version is not None)
    return min((version.number for version in written if version.policy == policy), default=None)


def page() -> str:
    """The text of ``docs/metrics.md``."""
    parts = [
        "# Metrics",
        "Every metric a run writes, what it counts and what it means. This page is made from "
        "`miles/observe/metric.py` by `python -m miles.observe.metric > docs/metrics.md`.",
    ]
    for title, (metrics, where) in SECTIONS.items():
        rows = [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in metrics]
        parts += [f"## {title}", where, "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
