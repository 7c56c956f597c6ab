"""Table of all metrics (name, unit, meaning), and the metrics computed from groups.

``docs/metrics.md`` is this table: ``python -m miles.observe.metric > docs/metrics.md``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from miles.core.types import DEMONSTRATION, UNSCORED, Group, Status, Trajectory, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric's name (``<set>`` and the like are placeholders), unit, and meaning in one sentence."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Return whether ``name`` is this metric."""
        pattern = "".join(
            "[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", self.name)
        )
        return re.fullmatch(pattern, name) is not None


MISMATCH = "session_mismatch"
MISMATCHES = ("retokenised", "boundary", "whitespace", "thinking", "tool_calls", "unknown", "refused")
"""Classes of template mismatch that a session audit reports, as named in metadata and metrics."""


def _parse_rows(text: str) -> tuple[Metric, ...]:
    cells = (tuple(cell.strip() for cell in row.split("|")) for row in text.strip().splitlines())
    return tuple(Metric(name=name, unit=unit, meaning=meaning) for name, unit, meaning in cells)


ROLLOUT = _parse_rows(
    """
    reward              | reward   | Mean reward of the trajectories trained on, without those that could not be scored.
    reward_std          | reward   | Standard deviation of the reward over these trajectories.
    reward_min          | reward   | Smallest reward among the trajectories trained on.
    reward_max          | reward   | Largest reward among the trajectories trained on.
    response_length     | tokens   | Mean number of tokens the policy sampled in a trajectory.
    response_length_max | tokens   | Largest number of tokens the policy sampled in a trajectory.
    truncated_ratio     | fraction | Fraction of trajectories truncated at the length limit.
    unscored_ratio      | fraction | Fraction of trajectories without a score, since they or their reward failed.
    failed_ratio        | fraction | Fraction of trajectories whose environment or agent failed.
    reward/<part>       | reward   | Mean of a named part of the reward over the trajectories that have it.
    correct_ratio       | fraction | With --log-correct-samples: share of trajectories with a reward of at least 1.
    correct_response_length | tokens | With --log-correct-samples: mean response length of these trajectories.
    correct_response_length_max | tokens | With --log-correct-samples: longest response of these trajectories.
    zero_std_ratio      | fraction | Fraction of groups whose rewards are all equal.
    staleness           | versions | How many versions behind the trainer's the oldest token of the batch was.
    staleness_mean      | versions | Mean over trajectories of how many versions their oldest token was behind.
    rollout_tokens      | tokens   | Tokens the policy sampled in the trajectories trained on.
    session_mismatch/retokenised | fraction | Fraction of sessions with text that tokenizes differently.
    session_mismatch/boundary    | fraction | Fraction of sessions with other turn delimiters than the chat template's.
    session_mismatch/whitespace  | fraction | Fraction of sessions with only whitespace differences.
    session_mismatch/thinking    | fraction | Fraction of sessions with reasoning that the chat template omits or adds.
    session_mismatch/tool_calls  | fraction | Fraction of sessions with tool calls rendered differently.
    session_mismatch/unknown     | fraction | Fraction of sessions that differ from the chat template in another way.
    session_mismatch/refused     | fraction | Fraction of sessions with a conversation that the chat template rejects.
    groups_dropped      | groups   | Groups a filter dropped while this batch was filled.
    groups_aborted      | groups   | Groups aborted by --over-sampling-batch-size.
    """
)

TRAIN = _parse_rows(
    """
    loss                | nats     | Total loss, all terms together.
    pg_loss             | nats     | The clipped policy-gradient term of the loss.
    pg_clipfrac         | fraction | Fraction of trained tokens whose ratio was clipped.
    ratio               | ratio    | Mean probability ratio of the current to the old policy.
    ppo_kl              | nats     | Mean of old minus new log-prob of the trained tokens.
    opsm_clipfrac       | fraction | Fraction of trained tokens dropped by off-policy sequence masking.
    rm_accuracy         | fraction | Fraction of pairs whose chosen response the reward model scores higher.
    rm_margin           | reward   | Mean score of the chosen responses minus that of the rejected ones.
    rm_chosen_score     | reward   | Mean score of the chosen responses.
    rm_rejected_score   | reward   | Mean score of the rejected responses.
    dpo_accuracy        | fraction | Fraction of pairs whose chosen response gained more over the reference.
    dpo_margin          | nats     | Mean implicit reward of the chosen responses minus that of the rejected ones.
    dpo_chosen_reward   | nats     | Mean over chosen responses of beta times the log-prob gained over the reference.
    dpo_rejected_reward | nats     | Mean over rejected responses of beta times the log-prob gained over the reference.
    kl                  | nats     | KL of the policy from the reference model.
    entropy             | nats     | Mean entropy of the policy's next-token distribution at trained tokens.
    distill_kl          | nats     | KL of the policy and its teacher, estimated on the sampled tokens or exact.
    teacher_logp        | nats     | Mean log-prob of the sampled tokens under the teacher.
    grad_norm           | norm     | Global gradient norm before clipping.
    lr                  | rate     | Learning rate of the last optimizer step.
    advantage_mean      | reward   | Mean advantage over the trained tokens, before the teacher's term.
    advantage_std       | reward   | Standard deviation of the advantage, before the teacher's term.
    reward_kl           | nats     | KL from the reference in the token rewards.
    return_mean         | reward   | Mean return of the trained tokens.
    return_std          | reward   | Standard deviation of the return of the trained tokens.
    value_mean          | reward   | Mean value of the critic over the trained tokens.
    explained_variance  | fraction | Fraction of the returns' variance that the critic explains.
    value_loss          | reward²  | Clipped squared error of the critic.
    value_clipfrac      | fraction | Fraction of trained tokens whose value moved beyond the clip range.
    critic_grad_norm    | norm     | Global gradient norm of the critic before clipping.
    critic_lr           | rate     | Learning rate of the critic's last optimizer step.
    draft_loss          | nats     | Loss of the draft model: mean over its steps and the trained tokens they predict.
    draft_agreement_<step> | fraction | Share of tokens at which draft and policy have the same most likely one.
    draft_grad_norm     | norm     | Gradient norm of the draft model before clipping, with --mtp-loss-scaling-factor.
    draft_lr            | rate     | Learning rate of the draft model.
    samples             | samples  | Training samples in the batch; a trajectory with several branches yields several.
    micro_batches       | passes   | Packed forward and backward passes of the step.
    tokens              | tokens   | Tokens of the batch, prompts included.
    train_tokens        | tokens   | Input tokens of the trainer's forward passes, prompts included.
    tokens_shared       | tokens   | Input tokens saved by shared prefixes (--share-prefix).
    trained_tokens      | tokens   | Tokens of the batch that are trained on.
    parity_mean_abs     | nats     | Mean absolute gap between engine's and trainer's log-prob under one version.
    parity_max_abs      | nats     | Largest absolute gap between engine's and trainer's log-prob under one version.
    parity_k1           | nats     | Mean of engine's minus trainer's log-prob under one version.
    parity_k3           | nats     | Divergence of the engine from the trainer under one version, never below 0.
    parity_ppl_ratio    | ratio    | Mean over samples of the trainer's perplexity over the engine's, one version.
    parity_ess          | fraction | Effective sample size of the unbounded importance weights, per token.
    parity_tokens       | tokens   | Number of tokens that the parity metrics are computed over.
    tis                 | ratio    | Mean importance ratio of trainer to engine at --tis-level, before bounds.
    tis_weight          | ratio    | Mean importance weight after bounds and rejection, before normalisation.
    tis_clipfrac        | fraction | Fraction of trained tokens whose importance weight was truncated.
    tis_maskfrac        | fraction | Fraction of trained tokens whose importance weight was masked.
    tis_ess             | fraction | Effective sample size of the importance weights, per trained token.
    tis_auto_mode       | index    | Correction chosen by --tis-mode auto: 0 none, 1 truncate, 2 icepop.
    rs_maskfrac         | fraction | Fraction of trained tokens dropped by --use-rs.
    rs_vetofrac         | fraction | Fraction of trained tokens in samples dropped by --rs-veto-threshold.
    parity_mean_abs_no_replay | nats | The mean absolute gap of one micro-batch without the engine's replay.
    routing_mismatch_ratio | fraction | Fraction of replayed experts that the trainer's router would not have chosen.
    indexer_mismatch_ratio | fraction | Fraction of replayed tokens that the trainer's indexers would not have selected.
    expert_imbalance    | ratio    | Load of the busiest expert relative to the mean, averaged over layers.
    policy/<name>/version  | versions | Weight version of an additional policy.
    policy/<name>/<metric> | its own  | The metric of that name, of an additional policy.
    """
)

EVAL = _parse_rows(
    """
    eval/<set>/reward          | reward | Mean reward over the held-out set.
    eval/<set>/reward_stderr   | reward | Standard error of that mean, over the prompts of the set.
    eval/<set>/response_length | tokens | Mean response length on the held-out set.
    eval/<set>/truncated       | fraction | Fraction of trajectories of the held-out set truncated at the length limit.
    eval/<set>/unscored        | fraction | Fraction of trajectories of the held-out set that could not be scored.
    eval/<set>/reward/<role>   | reward | Mean reward of a role over its trajectories of the held-out set.
    eval/<set>/pass@<k>        | fraction | Probability that one of k trajectories of a prompt reaches a reward of 1.
    """
)

SECONDS = _parse_rows(
    """
    rollout             | seconds  | Waiting for the batch's groups.
    offload             | seconds  | Handing the device to the engines and back; next to nothing if planes share none.
    train               | seconds  | The training step, all its optimizer steps together.
    publish             | seconds  | Weight update of the engines.
    step                | seconds  | The whole step, until the new version is live: the sum of these four.
    evaluate            | seconds  | Generation and scoring of all held-out sets.
    train/compute_per_token | seconds | Compute time per token of rank 0, without waiting: forward pass and loss.
    train/compute_per_token_median | seconds | Compute time per token, median over the ranks.
    train/straggler_ratio | ratio   | Compute time per token of the slowest rank relative to the median of the others.
    train/<part>   | seconds | A phase of the training step.
    offload/to_rollout | seconds | Before the wait for groups: trainers offload their state, engines take their memory.
    offload/to_train | seconds | Before the training step: engines release their memory, trainers take their state.
    publish/bytes  | bytes   | Bytes of weights sent to each server.
    publish/<part> | seconds | A phase of the weight update.
    start/total    | seconds | In the first step of a process: from the start of the process to the end of that step.
    start/<phase>  | seconds | Phases of the start, in order: they add up to the total.
    start/kernel_seconds | seconds | Time in which this process compiled Triton kernels, inside of phases.
    start/kernels_compiled | kernels | Triton kernels that this process compiled.
    start/kernels_cached | kernels | Triton kernels that were found in Triton's cache.
    start/compile/<kernel> | seconds | Time in which this process compiled the variants of one kernel.
    start/graphs_captured | graphs | CUDA graphs captured by engines of this process until the end of the first step.
    start/graph_seconds | seconds | Time in which they were captured, kernels compiled on the way included.
    limit/<part>/<bound> | seconds | Least time of a part of the step at the device's peak of compute, memory or link.
    """
)

RATES = _parse_rows(
    """
    perf/train_tflops          | TFLOP/s  | FLOPs per second and device that training needs, without recomputation.
    perf/train_mfu             | fraction | The same relative to the peak of the device (model FLOPs utilisation).
    perf/rollout_tflops        | TFLOP/s  | FLOPs per second and device of generation and prefill.
    perf/rollout_mfu           | fraction | The same relative to the peak of the device.
    perf/rollout_gb_per_second | GB/s     | Weights and KV cache that decoding reads, per device.
    perf/rollout_mbu           | fraction | The same relative to the device's memory bandwidth.
    """
)

SPECULATION = _parse_rows(
    """
    speculative/accept_length | tokens   | Mean number of tokens that a verification of drafts samples.
    speculative/accept_rate   | fraction | Fraction of the drafted tokens that were accepted.
    speculative/accepted_<n>  | fraction | Fraction of the verifications that accepted their first n drafted tokens.
    speculative/token_share   | fraction | Fraction of the sampled tokens that verifications sampled.
    """
)

SECTIONS = {
    "Rollout": (ROLLOUT, "In `metrics.jsonl`, `kind` `train`: the trajectories that a step was trained on."),
    "Training": (TRAIN, "In `metrics.jsonl`, `kind` `train`: the update, as means over the step."),
    "Evaluation": (
        EVAL,
        "In `metrics.jsonl`, `kind` `eval`; `step` is how many steps the policy had been trained for.",
    ),
    "Seconds": (SECONDS, "In `timings.jsonl`, and nowhere else: wall-clock times are not deterministic."),
    "Utilisation": (
        RATES,
        "In `timings.jsonl`: over the training step, and over the time in which engines generate (the wait for "
        "rollouts, or the whole step where they overlap). A CPU, and a device that the table of "
        "`cluster/device_peaks.py` lacks, has no peak, so only the rates are there; `--mfu-peak-tflops` gives "
        "one. Bytes are known of engines in the same process.",
    ),
    "Speculative decoding": (
        SPECULATION,
        "In `timings.jsonl`, since a resumed run makes other drafts of the same tokens; over the completions that "
        "ended during a step, where engines decode speculatively.",
    ),
}


def find_metric(name: str) -> Metric | None:
    """Return the table's entry for a metric of ``metrics.jsonl``, or None."""
    if (other := re.fullmatch(r"policy/[^/]+/(.+)", name)) and other[1] != "version":
        return find_metric(other[1])
    return next((metric for metric in (*ROLLOUT, *TRAIN, *EVAL) if metric.matches(name)), None)


def list_undocumented(names: Iterable[str]) -> list[str]:
    """Return the names that have no entry in the table."""
    return sorted(name for name in names if find_metric(name) is None)


def group_metrics(groups: Sequence[Group], version: Version) -> dict[str, float]:
    """Compute the metrics of a batch's groups; ``version`` is the trainer's before the step."""
    trajectories = [t for group in groups for t in group.trajectories]
    scored = [t for t in trajectories if UNSCORED not in t.metadata] or trajectories
    rewards = [t.reward.value for t in scored if t.reward is not None]
    if trajectories and all(_is_demonstration(t) for t in trajectories):  # nothing was sampled
        return {}
    ages = [version.number - number for t in trajectories if (number := _oldest(t, version.policy)) is not None]
    metrics: dict[str, float] = {}
    if rewards:
        metrics |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
        metrics |= {"reward_min": min(rewards), "reward_max": max(rewards)}
        metrics |= {f"reward/{name.replace('/', '.')}": value for name, value in _mean_reward_parts(scored).items()}
    if trajectories:
        lengths = [t.response_length for t in trajectories]
        metrics |= {"response_length": fmean(lengths), "response_length_max": float(max(lengths))}
        metrics |= {"rollout_tokens": float(sum(lengths))}
        metrics["truncated_ratio"] = fmean(t.status is Status.TRUNCATED for t in trajectories)
        metrics["unscored_ratio"] = fmean(UNSCORED in t.metadata for t in trajectories)
        metrics["failed_ratio"] = fmean(t.status is Status.FAILED for t in trajectories)
        metrics |= _mismatch_ratios(trajectories)
        metrics["zero_std_ratio"] = fmean(_has_equal_rewards(group) for group in groups)
    if ages:
        metrics |= {"staleness": float(max(ages)), "staleness_mean": fmean(ages)}
    return {name: float(value) for name, value in metrics.items()}


def correct_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Share and response length of correct trajectories; without any, no length."""
    trajectories = [t for group in groups for t in group.trajectories if t.reward is not None]
    correct = [t.response_length for t in trajectories if t.reward is not None and t.reward.value >= 1]
    metrics = {"correct_ratio": len(correct) / max(1, len(trajectories))}
    if correct:
        metrics |= {"correct_response_length": fmean(correct), "correct_response_length_max": float(max(correct))}
    return metrics


def _has_equal_rewards(group: Group) -> bool:
    return len({t.reward.value for t in group.scored_trajectories or group.trajectories if t.reward is not None}) <= 1


def _mean_reward_parts(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the mean of every named part of the rewards."""
    values_by_part: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, part in (trajectory.reward.parts if trajectory.reward is not None else {}).items():
            values_by_part.setdefault(name, []).append(float(part))
    return {name: fmean(values) for name, values in sorted(values_by_part.items())}


def _mismatch_ratios(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the fraction of audited sessions with each class of template mismatch."""
    audited: list[Mapping[str, int]] = [t.metadata[MISMATCH] for t in trajectories if MISMATCH in t.metadata]
    return {f"{MISMATCH}/{kind}": fmean(kind in found for found in audited) for kind in MISMATCHES if audited}


def _is_demonstration(trajectory: Trajectory) -> bool:
    versions = [span.version for span in trajectory.spans if span.version is not None]
    return bool(versions) and all(version == DEMONSTRATION for version in versions)


def _oldest(trajectory: Trajectory, policy: str) -> int | None:
    versions = (span.version for span in trajectory.spans if span.version is not None)
    return min((version.number for version in versions if version.policy == policy), default=None)


def render_docs() -> str:
    """Render ``docs/metrics.md``."""
    parts = [
        "# Metrics",
        "All metrics that a run writes, with unit and meaning. This page is generated from "
        "`miles/observe/metric.py` by `python -m miles.observe.metric > docs/metrics.md`.",
    ]
    for title, (metrics, where) in SECTIONS.items():
        rows = [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in metrics]
        parts += [f"## {title}", where, "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_docs())
