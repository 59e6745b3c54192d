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


# By section: `name [unit]: meaning`. Lines that continue a meaning are indented.
_TABLE = """
Step
step: number of the optimizer step; 0 before the first
weight_version: version of the weights after the step
tokens_per_s [tokens/s]: trained tokens (of kept groups: sampled) per `time/step`

Teacher and divergence
opd/reverse_kl [nats]: mean of log p_T - log q_T over the sampled tokens of the groups that the
    teacher's engine scored (with `estimator=full` a part of them), with p_T of the policy that
    sampled them: its KL(p_T || q_T) per token
opd/reverse_kl_vs_q1 [nats]: `opd/reverse_kl` towards the teacher's distribution at T = 1
opd/bias [nats]: `opd/reverse_kl_vs_q1` - `opd/reverse_kl`: error of a system that scores the
    teacher at temperature 1
opd/reverse_kl/teacher=NAME [nats]: `opd/reverse_kl` of one teacher's groups
opd/reverse_kl/tag=NAME [nats]: `opd/reverse_kl` of the groups of one tag
opd/reverse_kl/source=NAME [nats]: `opd/reverse_kl` of one source's groups
opd/reverse_kl/turn=N [nats]: `opd/reverse_kl` of the N-th trained turn, up to 8; for episodes of
    several turns
opd/divergence [nats]: mean of the divergence that the learner computed (`estimator=full` or
    `top_k`; the top k alone where `top_k` has a reverse KL)
opd/kl_top_share [share]: share of the sum of |log p - log q| that is due to the tokens with the
    largest gaps, one hundredth of each group's tokens
opd/clipped_share [share]: tokens whose log p - log q, with the learner's present p, is beyond
    `kl_clip`
opd/teacher_age [versions]: versions between the teacher's score and the training of a token with
    `teacher=policy`; of an average, the newest weights in it count
opd/unhinted_segments [share]: segments in which the teacher does not see the privileged context:
    they do not begin with the prompt, or the feedback does not fit
reference/kl [nats]: mean of log p_T - log ref_T over the sampled tokens

Groups that the teacher sampled
teacher_samples/share [share]: groups of the step that the teacher sampled
teacher_samples/tokens [tokens]: trained tokens of the teacher's samples
teacher_samples/reward [reward]: mean reward of the teacher's samples, which is not trained on
teacher_samples/response_length [tokens]: mean length of the teacher's samples
teacher_samples/eos_share [share]: teacher's samples that end by a stop token
teacher_samples/nll [nats]: mean of -log p_T of the teacher's samples
teacher_samples/forward_kl [nats]: mean of log q_T - log p_T of the teacher's samples: KL(q_T ||
    p_T) per token; not of texts from an endpoint

Rewards and advantages
reward/mean [reward]: mean reward of a trajectory
reward/mean/teacher=NAME [reward]: `reward/mean` of one teacher's groups
reward/mean/tag=NAME [reward]: `reward/mean` of the groups of one tag
reward/mean/source=NAME [reward]: `reward/mean` of one source's groups
reward/mean_of_all [reward]: `reward/mean`, including the groups that `constant_groups=replace`
    replaced
reward/bonus [reward]: mean sum of a trajectory's rewards of single tokens
reward/constant_groups [share]: groups whose members all have the same reward
advantage/mean: mean of the advantages of trained tokens, with the sampler's log-probs; absent where
    there are none (`estimator=full` without rewards, bonuses or a reference)
advantage/std: standard deviation of these advantages
advantage/min: smallest advantage
advantage/max: largest advantage

Rollouts and environments
rollout/response_length [tokens]: mean number of sampled tokens of a trajectory
rollout/eos_share [share]: trajectories that end by a stop token
rollout/turns [turns]: mean number of turns of a trajectory
rollout/failed_episodes [share]: episodes that failed (`env=Agent`: without a result) and are not
    trained
rollout/segments [segments]: mean number of segments of a trajectory
rollout/stop/REASON [share]: trajectories that end for this reason: eos, length (cut), turns, time,
    ...
rollout/repeated_share [share]: sampled tokens of a response that end a run of eight tokens which
    occurred before in it, mean over responses
rollout/equal_groups [share]: groups whose members are the same tokens, although their log-probs
    make that less likely than 1e-6
rollout/cached_share [share]: tokens before second and later turns that engines had in their caches
    (SGLang)
rollout/ahead_share [share]: trained trajectories that learner workers had fetched before the step
rollout/share/source=NAME [share]: groups of the step from one source
rollout/tokens [tokens]: tokens that a run with `rollout_only=True` sampled
env/NAME: metric of the environment, mean over the trajectories that have it
    (docs/environments/turns.md)
env/agent/rewritten [requests]: `env=Agent`: requests of an episode in which the agent changed its
    history before its last answer; each begins a segment (`rollout/segments`)
env/agent/unmatched [requests]: `env=Agent`: requests of an episode with an assistant message that
    the policy did not write; each begins a segment
env/overlong [reward]: mean reward that `overlong_buffer=` subtracted

Staleness and accounting of groups
staleness/mean [versions]: from the sampling of a token to its training, mean over tokens; with
    `train_from=` from the version of the run that sampled
staleness/max [versions]: from the sampling of a token to its training, largest over tokens
staleness/start_max [versions]: from the first lease of the step's oldest group to its training; at
    most `max_staleness`, except with `on_stale=train_late`
groups/first: id of the step's first group
groups/last: id of the step's last group
groups/watermark: id below which all groups are trained or set aside
groups/queued [groups]: groups in the queue, besides the step's own, when the step took them
groups/overdue [groups]: trained groups older than `max_staleness`
groups/begun_again [groups]: restarts of the step's groups (`on_stale=restart`)
groups/set_aside [groups]: groups that failed and were set aside, since the start of the run
groups/replaced [groups]: groups that `constant_groups=replace` replaced

Learner
train/loss: loss
train/grad_norm: norm of the gradient before clipping
train/lr: learning rate
train/tokens [tokens]: trained tokens
train/groups [groups]: groups of the step
train/updates [updates]: optimizer updates of the step
train/entropy [nats]: mean entropy of p_T at the trained positions
train/ratio: mean of r over trained tokens
train/ratio_min: smallest r
train/ratio_max: largest r
train/logprob_gap [nats]: mean of |log learner - log server|: 0 up to rounding on fresh weights
train/logprob_gap_unreplayed [nats]: `train/logprob_gap` without routing replay, of one micro-batch
    in every tenth update (docs/models.md#routing-replay)
train/routing_mismatch [share]: routings of a mixture-of-experts model in which the learner would
    have chosen others (docs/models.md#routing-replay)
train/router_aux: load-balancing loss of the routers (`router_aux_coef=`)
train/approx_kl_k1 [nats]: mean of -log r: an estimate of KL(server || learner)
train/approx_kl_k2 [nats]: mean of (log r)² / 2: another estimate of it
train/approx_kl_k3 [nats]: mean of r - 1 - log r: another estimate of it
train/ess [share]: effective sample size, (sum r)² / (n sum r²): 1 if all ratios agree
train/clip_share [share]: tokens whose gradient a bound of the loss removes or weakens
train/clip_low_share [share]: tokens of `train/clip_share` with r below 1
train/clip_high_share [share]: tokens of `train/clip_share` with r above 1
train/correction_share [share]: tokens whose learner/server weight is cut or dropped (`correction=`)
train/padding_share [share]: padding in the micro-batches; 0 with `packing=True`
train/tflops_per_s [TFLOP/s]: operations that the model requires (Kaplan et al. 2020; Chowdhery et
    al. 2022, appendix B), of all workers; recomputation and padding do not count

Supervised training, DPO and reward models
train/nll [nats]: mean of -log p of the supervised tokens
train/nll/source=NAME [nats]: `train/nll` of one of several sources
train/share/source=NAME [share]: rows or pairs of the batch from one source
sft/nll [nats]: mean of -log p of `sft.data=` beside rollouts
dpo/accuracy [share]: pairs whose chosen response has the higher implicit reward
dpo/margin: mean difference of the implicit rewards
dpo/chosen_reward: mean of beta (log pi - log ref) of chosen responses
dpo/rejected_reward: mean of beta (log pi - log ref) of rejected responses
dpo/chosen_nll [nats]: mean of -log pi per token of chosen responses (the term of `sft_coef=`)
reward_model/accuracy [share]: pairs whose chosen response scores higher
reward_model/margin: mean difference of the scores
reward_model/chosen_mean: mean score of chosen responses
reward_model/chosen_std: standard deviation of the scores of chosen responses
reward_model/rejected_mean: mean score of rejected responses
reward_model/rejected_std: standard deviation of the scores of rejected responses
validation/NAME: loss, or metric NAME of the loss (nll, accuracy, margin, ...), on held-out rows
    (docs/data.md#held-out-rows)
validation/NAME/source=SOURCE: `validation/NAME` on the rows of one source

Evaluations
eval/accuracy [reward]: mean reward on held-out prompts with the decoder of `eval.temperature=`
eval/accuracy/source=NAME [reward]: `eval/accuracy` on the prompts of one source
eval/accuracy_low [reward]: lower end of the 95 % interval of `eval/accuracy`
eval/accuracy_high [reward]: upper end of the 95 % interval of `eval/accuracy`
eval/reverse_kl [nats]: KL(p_T || q_T) per token on held-out prompts
eval/reverse_kl_low [nats]: lower end of the 95 % interval of `eval/reverse_kl`
eval/reverse_kl_high [nats]: upper end of the 95 % interval of `eval/reverse_kl`
eval/pass@K [reward]: expected best reward of K responses (`eval.samples=`)
eval/majority@N [reward]: reward of the most frequent answer of N responses, for rewards that
    extract an answer
eval/response_length [tokens]: mean response length
eval/eos_share [share]: responses that end by a stop token
eval/turns [turns]: mean number of turns of an episode
eval/version: version that a concurrent evaluation evaluated
eval/teacher/NAME: `eval/NAME` of the teacher
eval/teacher=TEACHER/NAME: `eval/NAME` of one of several teachers
eval/NAME: metric of the environment in evaluations

Weight push
push/bytes [bytes]: size of all tensors in the precision of the engines, not multiplied by the
    engines
push/engines [engines]: engines that acknowledged the push; this, seconds and pause are those of the
    push before if it overlapped the step
push/seconds [s]: from the start of the push until the last engine has acknowledged
push/overlapped [s]: part of `push/seconds` during which no step waited
push/pause [s]: longest time of an engine without generation
push/lost_share [share]: part of an adapter's change that rounding to the engines' precision took
    (docs/learner.md#adapters)
push/probe_gap [nats]: gap of an engine's log-probs from the learner's, under the version before
push/void: 1: an adapter that is pushed alone changes these log-probs by at most the tolerance, so
    `push/probe_gap` does not prove that engines use it; else 0
push/proven [share]: parameters of the engines (fused and sharded as a server holds them) whose
    checksums, under the version before, equal those of the weights that were sent
push/teacher_seconds [s]: push of a lagged or EMA teacher's weights
push/teacher_proven [share]: `push/proven` of the engines of a lagged or EMA teacher

Time
time/step [s]: wait, training and push; without checkpoints and evaluations
time/wait [s]: wait for the step's groups
time/rows [s]: rows of the groups: fetching them (a part of `time/wait`) and making them (a part of
    `time/learn`)
time/sleep [s]: wait until the engines sleep (`colocate=sleep`)
time/reference [s]: scoring by the reference in the learner
time/learn [s]: training; forward, backward and optimizer are its parts
time/forward [s]: forward passes
time/backward [s]: backward passes
time/optimizer [s]: optimizer updates
time/push [s]: wait of the step for the push: its own copy and the last push
time/checkpoint [s]: wait of the step for a checkpoint
time/checkpoint_write [s]: writing of a checkpoint, concurrently with training
time/eval [s]: evaluation
time/eval_wait [s]: wait of the step for the evaluation before
time/validation [s]: evaluation of held-out rows
time/rollout [s]: sampling of a group, mean over the step's groups
time/teacher [s]: scoring of a group after its sampling, mean
time/teacher_rollout [s]: sampling of a group by the teacher, mean

Turns on GPUs that engines share
turns/changes [changes]: number of changes of the engine that is awake, since the step before
    (`teacher.gpus=`); with several sets of GPUs, these metrics are of the set whose changes took
    longest
turns/seconds [s]: duration of these changes: releasing and restoring memory and weights, and
    proofs; without the wait for calls of the engine that is awake
turns/proof [s]: part of `turns/seconds`: scoring the rows that prove the weights
"""


def _sections(table: str) -> dict[str, tuple[Metric, ...]]:
    """Metrics of a text such as `_TABLE`, by the title of their section."""
    found = {}
    for section in table.strip().split("\n\n"):
        title, *rows = section.replace("\n    ", " ").splitlines()
        found[title] = tuple(map(_metric, rows))
    return found


def _metric(row: str) -> Metric:
    head, meaning = row.split(": ", 1)
    name, _, unit = head.partition(" [")
    return Metric(name, unit.removesuffix("]"), meaning)


METRICS = _sections(_TABLE)

# Main metrics of a run: exported to Prometheus, and shown in the summaries of trackers.
HEADLINES = (
    "opd/reverse_kl", "opd/divergence", "reward/mean", "eval/accuracy", "eval/reverse_kl",
    "validation/nll", "train/loss", "train/grad_norm", "train/entropy", "train/logprob_gap",
    "rollout/response_length", "staleness/max", "groups/queued", "groups/set_aside",
    "tokens_per_s", "time/step", "time/wait",
)  # fmt: skip

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
