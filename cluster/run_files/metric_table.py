"""Table of the metrics in metrics.jsonl: name, unit and meaning of each, in sections.

The report shows the meanings next to its charts, and docs/metrics.md is generated from this table.
Words in capitals in a name stand for any text: `eval/pass@K`. In the meanings, p_T is the student
and q_T the teacher at temperature T, and r is the ratio of learner to server probability. A
"version" is a weight version.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """A metric or a family of metrics."""

    name: str
    unit: str
    meaning: str


METRICS: dict[str, tuple[Metric, ...]] = {
    "Step": (
        Metric("step", "", "number of the optimizer step; 0 before the first"),
        Metric("weight_version", "", "version of the weights after the step"),
        Metric(
            "tokens_per_s", "tokens/s", "trained tokens (of kept groups: sampled) per `time/step`"
        ),
    ),
    "Teacher and divergence": (
        Metric(
            "opd/reverse_kl",
            "nats",
            "mean of log p_T - log q_T over the sampled tokens of the groups that the teacher's "
            "engine scored (with `estimator=full` a part of them), with p_T of the policy that "
            "sampled them: its KL(p_T || q_T) per token",
        ),
        Metric(
            "opd/reverse_kl_vs_q1",
            "nats",
            "`opd/reverse_kl` towards the teacher's distribution at T = 1",
        ),
        Metric(
            "opd/bias",
            "nats",
            "`opd/reverse_kl_vs_q1` - `opd/reverse_kl`: error of a system that scores the teacher "
            "at temperature 1",
        ),
        Metric("opd/reverse_kl/teacher=NAME", "nats", "`opd/reverse_kl` of one teacher's groups"),
        Metric("opd/reverse_kl/tag=NAME", "nats", "`opd/reverse_kl` of the groups of one tag"),
        Metric("opd/reverse_kl/source=NAME", "nats", "`opd/reverse_kl` of one source's groups"),
        Metric(
            "opd/reverse_kl/turn=N",
            "nats",
            "`opd/reverse_kl` of the N-th trained turn, up to 8; for episodes of several turns",
        ),
        Metric(
            "opd/divergence",
            "nats",
            "mean of the divergence that the learner computed (`estimator=full` or `top_k`; the "
            "top k alone where `top_k` has a reverse KL)",
        ),
        Metric(
            "opd/kl_top_share",
            "share",
            "share of the sum of |log p - log q| that is due to the tokens with the largest "
            "gaps, one hundredth of each group's tokens",
        ),
        Metric(
            "opd/clipped_share",
            "share",
            "tokens whose log p - log q, with the learner's present p, is beyond `kl_clip`",
        ),
        Metric(
            "opd/teacher_age",
            "versions",
            "versions between the teacher's score and the training of a token with "
            "`teacher=policy`; of an average, the newest weights in it count",
        ),
        Metric(
            "opd/unhinted_segments",
            "share",
            "segments in which the teacher does not see the privileged context: they do not "
            "begin with the prompt, or the feedback does not fit",
        ),
        Metric("reference/kl", "nats", "mean of log p_T - log ref_T over the sampled tokens"),
    ),
    "Groups that the teacher sampled": (
        Metric("teacher_samples/share", "share", "groups of the step that the teacher sampled"),
        Metric("teacher_samples/tokens", "tokens", "trained tokens of the teacher's samples"),
        Metric(
            "teacher_samples/reward",
            "reward",
            "mean reward of the teacher's samples, which is not trained on",
        ),
        Metric("teacher_samples/response_length", "tokens", "mean length of the teacher's samples"),
        Metric("teacher_samples/eos_share", "share", "teacher's samples that end by a stop token"),
        Metric("teacher_samples/nll", "nats", "mean of -log p_T of the teacher's samples"),
        Metric(
            "teacher_samples/forward_kl",
            "nats",
            "mean of log q_T - log p_T of the teacher's samples: KL(q_T || p_T) per token; not of "
            "texts from an endpoint",
        ),
    ),
    "Rewards and advantages": (
        Metric("reward/mean", "reward", "mean reward of a trajectory"),
        Metric("reward/mean/teacher=NAME", "reward", "`reward/mean` of one teacher's groups"),
        Metric("reward/mean/tag=NAME", "reward", "`reward/mean` of the groups of one tag"),
        Metric("reward/mean/source=NAME", "reward", "`reward/mean` of one source's groups"),
        Metric(
            "reward/mean_of_all",
            "reward",
            "`reward/mean`, including the groups that `constant_groups=replace` replaced",
        ),
        Metric("reward/bonus", "reward", "mean sum of a trajectory's rewards of single tokens"),
        Metric("reward/constant_groups", "share", "groups whose members all have the same reward"),
        Metric(
            "advantage/mean",
            "",
            "mean of the advantages of trained tokens, with the sampler's log-probs; absent "
            "where there are none (`estimator=full` without rewards, bonuses or a reference)",
        ),
        Metric("advantage/std", "", "standard deviation of these advantages"),
        Metric("advantage/min", "", "smallest advantage"),
        Metric("advantage/max", "", "largest advantage"),
    ),
    "Rollouts and environments": (
        Metric(
            "rollout/response_length", "tokens", "mean number of sampled tokens of a trajectory"
        ),
        Metric("rollout/eos_share", "share", "trajectories that end by a stop token"),
        Metric("rollout/turns", "turns", "mean number of turns of a trajectory"),
        Metric(
            "rollout/failed_episodes",
            "share",
            "episodes that failed (`env=Agent`: without a result) and are not trained",
        ),
        Metric("rollout/segments", "segments", "mean number of segments of a trajectory"),
        Metric(
            "rollout/stop/REASON",
            "share",
            "trajectories that end for this reason: eos, length (cut), turns, time, ...",
        ),
        Metric(
            "rollout/repeated_share",
            "share",
            "sampled tokens of a response that end a run of eight tokens which occurred before in "
            "it, mean over responses",
        ),
        Metric(
            "rollout/equal_groups",
            "share",
            "groups whose members are the same tokens, although their log-probs make that less "
            "likely than 1e-6",
        ),
        Metric(
            "rollout/cached_share",
            "share",
            "tokens before second and later turns that engines had in their caches (SGLang)",
        ),
        Metric(
            "rollout/ahead_share",
            "share",
            "trained trajectories that learner workers had fetched before the step",
        ),
        Metric("rollout/share/source=NAME", "share", "groups of the step from one source"),
        Metric("rollout/tokens", "tokens", "tokens that a run with `rollout_only=True` sampled"),
        Metric(
            "env/NAME",
            "",
            "metric of the environment, mean over the trajectories that have it "
            "(docs/environments/turns.md)",
        ),
        Metric(
            "env/agent/rewritten",
            "requests",
            "`env=Agent`: requests of an episode in which the agent changed its history before "
            "its last answer; each begins a segment (`rollout/segments`)",
        ),
        Metric(
            "env/agent/unmatched",
            "requests",
            "`env=Agent`: requests of an episode with an assistant message that the policy did "
            "not write; each begins a segment",
        ),
        Metric("env/overlong", "reward", "mean reward that `overlong_buffer=` subtracted"),
    ),
    "Staleness and accounting of groups": (
        Metric(
            "staleness/mean",
            "versions",
            "from the sampling of a token to its training, mean over tokens; with `train_from=` "
            "from the version of the run that sampled",
        ),
        Metric(
            "staleness/max",
            "versions",
            "from the sampling of a token to its training, largest over tokens",
        ),
        Metric(
            "staleness/start_max",
            "versions",
            "from the first lease of the step's oldest group to its training; at most "
            "`max_staleness`, except with `on_stale=train_late`",
        ),
        Metric("groups/first", "", "id of the step's first group"),
        Metric("groups/last", "", "id of the step's last group"),
        Metric("groups/watermark", "", "id below which all groups are trained or set aside"),
        Metric(
            "groups/queued",
            "groups",
            "groups in the queue, besides the step's own, when the step took them",
        ),
        Metric("groups/overdue", "groups", "trained groups older than `max_staleness`"),
        Metric(
            "groups/begun_again", "groups", "restarts of the step's groups (`on_stale=restart`)"
        ),
        Metric(
            "groups/set_aside",
            "groups",
            "groups that failed and were set aside, since the start of the run",
        ),
        Metric("groups/replaced", "groups", "groups that `constant_groups=replace` replaced"),
    ),
    "Learner": (
        Metric("train/loss", "", "loss"),
        Metric("train/grad_norm", "", "norm of the gradient before clipping"),
        Metric("train/lr", "", "learning rate"),
        Metric("train/tokens", "tokens", "trained tokens"),
        Metric("train/groups", "groups", "groups of the step"),
        Metric("train/updates", "updates", "optimizer updates of the step"),
        Metric("train/entropy", "nats", "mean entropy of p_T at the trained positions"),
        Metric("train/ratio", "", "mean of r over trained tokens"),
        Metric("train/ratio_min", "", "smallest r"),
        Metric("train/ratio_max", "", "largest r"),
        Metric(
            "train/logprob_gap",
            "nats",
            "mean of |log learner - log server|: 0 up to rounding on fresh weights",
        ),
        Metric(
            "train/logprob_gap_unreplayed",
            "nats",
            "`train/logprob_gap` without routing replay, of one micro-batch in every tenth update "
            "(docs/models.md#routing-replay)",
        ),
        Metric(
            "train/routing_mismatch",
            "share",
            "routings of a mixture-of-experts model in which the learner would have chosen others "
            "(docs/models.md#routing-replay)",
        ),
        Metric("train/router_aux", "", "load-balancing loss of the routers (`router_aux_coef=`)"),
        Metric(
            "train/approx_kl_k1", "nats", "mean of -log r: an estimate of KL(server || learner)"
        ),
        Metric("train/approx_kl_k2", "nats", "mean of (log r)² / 2: another estimate of it"),
        Metric("train/approx_kl_k3", "nats", "mean of r - 1 - log r: another estimate of it"),
        Metric(
            "train/ess",
            "share",
            "effective sample size, (sum r)² / (n sum r²): 1 if all ratios agree",
        ),
        Metric(
            "train/clip_share",
            "share",
            "tokens whose gradient a bound of the loss removes or weakens",
        ),
        Metric("train/clip_low_share", "share", "tokens of `train/clip_share` with r below 1"),
        Metric("train/clip_high_share", "share", "tokens of `train/clip_share` with r above 1"),
        Metric(
            "train/correction_share",
            "share",
            "tokens whose learner/server weight is cut or dropped (`correction=`)",
        ),
        Metric(
            "train/padding_share", "share", "padding in the micro-batches; 0 with `packing=True`"
        ),
        Metric(
            "train/tflops_per_s",
            "TFLOP/s",
            "operations that the model requires (Kaplan et al. 2020; Chowdhery et al. 2022, "
            "appendix B), of all workers; recomputation and padding do not count",
        ),
    ),
    "Supervised training, DPO and reward models": (
        Metric("train/nll", "nats", "mean of -log p of the supervised tokens"),
        Metric("train/nll/source=NAME", "nats", "`train/nll` of one of several sources"),
        Metric("train/share/source=NAME", "share", "rows or pairs of the batch from one source"),
        Metric("sft/nll", "nats", "mean of -log p of `sft.data=` beside rollouts"),
        Metric(
            "dpo/accuracy", "share", "pairs whose chosen response has the higher implicit reward"
        ),
        Metric("dpo/margin", "", "mean difference of the implicit rewards"),
        Metric("dpo/chosen_reward", "", "mean of beta (log pi - log ref) of chosen responses"),
        Metric("dpo/rejected_reward", "", "mean of beta (log pi - log ref) of rejected responses"),
        Metric(
            "dpo/chosen_nll",
            "nats",
            "mean of -log pi per token of chosen responses (the term of `sft_coef=`)",
        ),
        Metric("reward_model/accuracy", "share", "pairs whose chosen response scores higher"),
        Metric("reward_model/margin", "", "mean difference of the scores"),
        Metric("reward_model/chosen_mean", "", "mean score of chosen responses"),
        Metric(
            "reward_model/chosen_std", "", "standard deviation of the scores of chosen responses"
        ),
        Metric("reward_model/rejected_mean", "", "mean score of rejected responses"),
        Metric(
            "reward_model/rejected_std",
            "",
            "standard deviation of the scores of rejected responses",
        ),
        Metric(
            "validation/NAME",
            "",
            "loss, or metric NAME of the loss (nll, accuracy, margin, ...), on held-out rows "
            "(docs/data.md#held-out-rows)",
        ),
        Metric("validation/NAME/source=SOURCE", "", "`validation/NAME` on the rows of one source"),
    ),
    "Evaluations": (
        Metric(
            "eval/accuracy",
            "reward",
            "mean reward on held-out prompts with the decoder of `eval.temperature=`",
        ),
        Metric(
            "eval/accuracy/source=NAME", "reward", "`eval/accuracy` on the prompts of one source"
        ),
        Metric("eval/accuracy_low", "reward", "lower end of the 95 % interval of `eval/accuracy`"),
        Metric("eval/accuracy_high", "reward", "upper end of the 95 % interval of `eval/accuracy`"),
        Metric("eval/reverse_kl", "nats", "KL(p_T || q_T) per token on held-out prompts"),
        Metric(
            "eval/reverse_kl_low", "nats", "lower end of the 95 % interval of `eval/reverse_kl`"
        ),
        Metric(
            "eval/reverse_kl_high", "nats", "upper end of the 95 % interval of `eval/reverse_kl`"
        ),
        Metric("eval/pass@K", "reward", "expected best reward of K responses (`eval.samples=`)"),
        Metric(
            "eval/majority@N",
            "reward",
            "reward of the most frequent answer of N responses, for rewards that extract an answer",
        ),
        Metric("eval/response_length", "tokens", "mean response length"),
        Metric("eval/eos_share", "share", "responses that end by a stop token"),
        Metric("eval/turns", "turns", "mean number of turns of an episode"),
        Metric("eval/version", "", "version that a concurrent evaluation evaluated"),
        Metric("eval/teacher/NAME", "", "`eval/NAME` of the teacher"),
        Metric("eval/teacher=TEACHER/NAME", "", "`eval/NAME` of one of several teachers"),
        Metric("eval/NAME", "", "metric of the environment in evaluations"),
    ),
    "Weight push": (
        Metric(
            "push/bytes",
            "bytes",
            "size of all tensors in the precision of the engines, not multiplied by the engines",
        ),
        Metric(
            "push/engines",
            "engines",
            "engines that acknowledged the push; this, seconds and pause are those of the push "
            "before if it overlapped the step",
        ),
        Metric(
            "push/seconds", "s", "from the start of the push until the last engine has acknowledged"
        ),
        Metric("push/overlapped", "s", "part of `push/seconds` during which no step waited"),
        Metric("push/pause", "s", "longest time of an engine without generation"),
        Metric(
            "push/lost_share",
            "share",
            "part of an adapter's change that rounding to the engines' precision took "
            "(docs/learner.md#adapters)",
        ),
        Metric(
            "push/probe_gap",
            "nats",
            "gap of an engine's log-probs from the learner's, under the version before",
        ),
        Metric(
            "push/void",
            "",
            "1: an adapter that is pushed alone changes these log-probs by at most the "
            "tolerance, so `push/probe_gap` does not prove that engines use it; else 0",
        ),
        Metric(
            "push/proven",
            "share",
            "parameters of the engines (fused and sharded as a server holds them) whose "
            "checksums, under the version before, equal those of the weights that were sent",
        ),
        Metric("push/teacher_seconds", "s", "push of a lagged or EMA teacher's weights"),
        Metric(
            "push/teacher_proven",
            "share",
            "`push/proven` of the engines of a lagged or EMA teacher",
        ),
    ),
    "Time": (
        Metric("time/step", "s", "wait, training and push; without checkpoints and evaluations"),
        Metric("time/wait", "s", "wait for the step's groups"),
        Metric(
            "time/rows",
            "s",
            "rows of the groups: fetching them (a part of `time/wait`) and making them (a part of "
            "`time/learn`)",
        ),
        Metric("time/sleep", "s", "wait until the engines sleep (`colocate=sleep`)"),
        Metric("time/reference", "s", "scoring by the reference in the learner"),
        Metric("time/learn", "s", "training; forward, backward and optimizer are its parts"),
        Metric("time/forward", "s", "forward passes"),
        Metric("time/backward", "s", "backward passes"),
        Metric("time/optimizer", "s", "optimizer updates"),
        Metric("time/push", "s", "wait of the step for the push: its own copy and the last push"),
        Metric("time/checkpoint", "s", "wait of the step for a checkpoint"),
        Metric("time/checkpoint_write", "s", "writing of a checkpoint, concurrently with training"),
        Metric("time/eval", "s", "evaluation"),
        Metric("time/eval_wait", "s", "wait of the step for the evaluation before"),
        Metric("time/validation", "s", "evaluation of held-out rows"),
        Metric("time/rollout", "s", "sampling of a group, mean over the step's groups"),
        Metric("time/teacher", "s", "scoring of a group after its sampling, mean"),
        Metric("time/teacher_rollout", "s", "sampling of a group by the teacher, mean"),
    ),
    "Turns on GPUs that engines share": (
        Metric(
            "turns/changes",
            "changes",
            "number of changes of the engine that is awake, since the step before "
            "(`teacher.gpus=`); with several sets of GPUs, these metrics are of the set whose "
            "changes took longest",
        ),
        Metric(
            "turns/seconds",
            "s",
            "duration of these changes: releasing and restoring memory and weights, and proofs; "
            "without the wait for calls of the engine that is awake",
        ),
        Metric(
            "turns/proof", "s", "part of `turns/seconds`: scoring the rows that prove the weights"
        ),
    ),
}

# Main metrics of a run: exported to Prometheus, and shown in the summaries of trackers.
HEADLINES = (
    "opd/reverse_kl",
    "opd/divergence",
    "reward/mean",
    "eval/accuracy",
    "eval/reverse_kl",
    "validation/nll",
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/logprob_gap",
    "rollout/response_length",
    "staleness/max",
    "groups/queued",
    "groups/set_aside",
    "tokens_per_s",
    "time/step",
    "time/wait",
)

_BY_NAME = {metric.name: metric for section in METRICS.values() for metric in section}
_CAPITALS = re.compile(r"[A-Z]+")


@cache
def described(name: str) -> Metric | None:
    """Entry of a metric or of its family; None if the table has none.

    If several families match, the one with the longest name is returned.
    """
    families = [
        metric
        for metric in _BY_NAME.values()
        if _CAPITALS.search(metric.name) and _pattern(metric.name).fullmatch(name)
    ]
    return _BY_NAME.get(name) or max(families, key=lambda m: len(m.name), default=None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Regular expression of the names in a family: words in capitals match any text."""
    return re.compile(".+".join(map(re.escape, _CAPITALS.split(name))))
