"""One worker of a learner: its shard of model and optimizer, and the orders that it executes.

A learner without other workers has one worker, which holds everything. The collectives of an order
(gathering a layer's weights, summing a gradient) run in the same sequence on all workers, so each
worker gets the same number of micro-batches, and each order goes to all workers.
"""

from __future__ import annotations

import math
import socket
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.models.attention_probe import shares_prefixes
from distill.models.loading import load_causal_lm, resolve_device
from distill.models.model_files import ModelFiles, checkpoint_config, generation_settings
from distill.models.reward import start_reward_model
from distill.objective.batching import Batch, TrainingRow, collate, split_by_token_budget
from distill.objective.losses import OWN_SHARE, Metrics, add_metrics
from distill.objective.metrics import TokenTable
from distill.pace import Progress
from distill.records import RowPlace, TrajectorySource
from distill.types import FloatArray
from distill.weights.lending import BucketLender, LenderPlace, LentBucket
from distill.weights.tensors import first_non_finite
from learner.canaries import Base, CopyAnswer, CopyQuestion, WatchedModel, watched
from learner.config import LearnerConfig, ShadowRule
from learner.export import Exported, Names, StoredWeights, carried_over
from learner.fingerprints import Fingerprints, shares
from learner.foresight import listen_ahead
from learner.forward import Forward, LossFunction
from learner.frozen import FrozenModel, LocalTeachers
from learner.initial_weights import InitialWeights
from learner.liger import use_liger
from learner.lora import RoundedUpdate, adapter_off, adapter_tensors, add_lora, merged_weights
from learner.memory import (
    check_fits,
    check_offload_fits,
    free_bytes,
    holding_of,
)
from learner.optimizer import (
    UpdateCheck,
    assert_optimizes,
    build_optimizer,
    build_schedule,
    load_moments,
    load_shadow,
    moments,
    offload_moments,
    put_away,
)
from learner.orders import (
    FrozenBatches,
    LentPortion,
    MicroBatch,
    PassShare,
    Portion,
    StepShare,
    UpdateShare,
)
from learner.own_teacher import OwnTeacher, Shadow
from learner.pass_plan import plan_passes
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import WorkerGroup
from learner.rollout_share import Built, KeptRow, RolloutShare, Shares
from learner.router_balance import RouterBalance
from learner.routing_replay import RoutingReplay
from learner.sharding import Root, compile_layers, local, plain_weights, reshard, shard, whole
from learner.state_copy import CopyCost, MomentsCopy
from learner.state_files import write_tensors
from learner.trace import Stages

# A micro-batch's fraction of its part's trained tokens: the weight in the mean train/router_aux.
ROUTER_SHARE = f"train/router_aux{OWN_SHARE}"
# Every so many optimizer updates, one micro-batch also runs without routing replay.
UNREPLAYED_EVERY = 10
_UNREPLAYED = "train/logprob_gap_unreplayed"


class LearnerWorker:
    """A shard of a model and its optimizer. Weights, gradients and moments are fp32.

    Raises:
        CheckpointError: the initial checkpoint cannot be loaded.
        ConfigError: the model does not fit into memory.
    """

    def __init__(
        self, config: LearnerConfig, losses: Sequence[LossFunction], group: WorkerGroup
    ) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed + group.rank)
        self.progress = Progress()  # counts forward passes, backward passes and orders
        self.device = resolve_device(config.device)
        self.losses = list(losses)
        self._rollout_share: RolloutShare | None = None
        self._watched: list[WatchedModel] | None = None
        self._reference: FrozenModel | None = None
        self._stages = Stages(self.device)
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._config, self._group = config, group
        holding = holding_of(adapter=config.lora.trains_adapter, followed=config.shadow is not None)
        share = group.share_here(self.device)
        check_fits(config.model, self.device, holding, share, config.gpu_taken)
        if config.offload_optimizer and self.device.startswith("cuda"):
            check_offload_fits(config.model, group.size, group.workers_here())
        self.passes = plan_passes(config, self.device, group)
        initial = None
        if group.size > 1:
            initial = InitialWeights(config.model, group, reward_padding=config.reward_padding)
        self.model = self._load() if initial is None else initial.model
        names = Names.of(self.model, config.model) if group.rank == 0 else None
        self.names: Names = group.agree(names)
        self.files = self._files()
        probe = partial(shares_prefixes, self.model.eval()) if initial is None else initial.probe
        shares = group.agree(probe() if group.rank == 0 else None)
        if config.liger:
            use_liger(self.model)
        self.lora = add_lora(self.model, config.lora) if config.lora.trains_adapter else None
        compute_dtype = getattr(torch, config.dtype)
        self._root: Root | None = None
        if config.compile:
            compile_layers(self.model)
        if initial is not None:
            self._root = shard(self.model, group, compute_dtype, initial)
        self._replay = RoutingReplay(self.model) if config.replays_routing else None
        self._forward = Forward(
            self.model,
            dtype=compute_dtype,
            gradient_checkpointing=self.passes.gradient_checkpointing,
            root=self._root,
            shares=shares,
            packs=config.packing,
            event=() if config.stops is None else config.stops.event,
            replay=self._replay,
        )
        self._balance = RouterBalance(self.model) if config.router_aux_coef else None
        self._reshard_root()
        self.optimizer = build_optimizer(self.model, config)
        self._update_check = UpdateCheck()
        self._accumulates = False
        self.schedule = build_schedule(self.optimizer, config, config.total_steps)
        if config.offload_optimizer:
            offload_moments(self.optimizer)
        self._shadow = None if config.shadow is None else Shadow(self.model, config.shadow)
        self._own_teacher = OwnTeacher(
            self._forward, self._shadow, device=self.device, reshard=self._reshard_root
        )
        self.rounded = RoundedUpdate()
        plain = (
            plain_weights(self.model)
            if self.lora is None
            else merged_weights(self.lora, self.rounded)
        )
        self._exported = Exported(self.model, self.names, plain, leads=group.rank == 0)
        self.weights = self._exported.weights
        self._lender = BucketLender(self.device)

    @property
    def most_mask(self) -> int:
        """Largest attention mask in elements, for `distill.objective.batching.BatchShape`."""
        return self._forward.most_mask

    @property
    def origin(self) -> str:
        """Path of the checkpoint that training started from."""
        return self._config.origin or self._config.model

    @property
    def packs(self) -> bool:
        """True if rows run packed, for `distill.objective.batching.BatchShape`."""
        return self._forward.packs

    def carry_out(self, method: str, argument: Any) -> Any:
        """Execute an order and return its result."""
        answer = getattr(self, method)(argument)
        self.progress.mark()
        return answer

    def _load(self) -> Any:
        path, padding = self._config.model, self._config.reward_padding
        if padding is not None:
            return start_reward_model(path, padding=padding, device=self.device)
        return load_causal_lm(path, dtype=torch.float32, device=self.device)

    def _files(self) -> ModelFiles:
        """Files of checkpoints other than the weights."""
        path, stops = self._config.model, self._config.stops
        generation = None
        if self.model.can_generate():
            generation = generation_settings(path, None if stops is None else stops.ids)
        config = checkpoint_config(self.model.config, self.origin)
        return ModelFiles(config=config, generation=generation, origin=self.origin)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepShare:
        """Accumulate the gradients of the micro-batches, and update this worker's shard.

        If any worker's loss, or the gradient, is not finite, no worker changes its weights.
        """
        self.zero_grad(None)
        unreplayed = self._gap_without_replay(micro_batches)
        passed = self._pass(micro_batches)
        updated = self._optim_step(1.0, passed.non_finite is None)
        return StepShare(
            metrics={**passed.metrics, **unreplayed},
            non_finite=passed.non_finite,
            grad_norm=updated.grad_norm,
            lr=updated.lr,
            seconds={**passed.seconds, **updated.seconds},
        )

    def zero_grad(self, _: None) -> None:
        """Drop the accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self._accumulates = False

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> PassShare:
        """Add the gradients of the micro-batches to those accumulated since the last step."""
        if not self._accumulates:  # `step` does not clear its gradients
            self.zero_grad(None)
            self._accumulates = True
        return self._pass(micro_batches)

    def _pass(self, micro_batches: Sequence[MicroBatch]) -> PassShare:
        made: dict[str, float] = defaultdict(float)
        non_finite = None
        for i, micro in enumerate(micro_batches):
            with self._stages("forward"):
                batch = collate(self.made_rows(micro.rows_B), self.device)
                loss, metrics = self._loss(micro, batch)
                loss = loss * (micro.coef if micro.counted else 0.0)
            if non_finite is None and not math.isfinite(loss.item()):
                non_finite = (i, loss.item())
            self.progress.mark()
            with self._stages("backward"):
                loss.backward()
            self.progress.mark()
            if micro.counted:
                metrics["train/loss"] = loss.detach()
                add_metrics(made, {name: value.item() for name, value in metrics.items()})
        return PassShare(metrics=dict(made), non_finite=non_finite, seconds=self._stages.take())

    def _loss(self, micro: MicroBatch, batch: Batch) -> tuple[Tensor, Metrics]:
        """Loss of the micro-batch, including its share (by trained tokens) of the router loss."""
        loss = self._taught(micro, batch)
        if self._balance is not None:
            self._balance.begin()
        made, metrics = loss(self._forward, batch, micro.counts)
        if self._replay is not None:
            metrics = {**metrics, **self._replay.take()}
        if self._balance is None:
            return made, metrics
        share = len(batch.tokens_N) / micro.counts.tokens
        aux = share * self._balance.take(self._forward.real_tokens)
        noted = {"train/router_aux": aux.detach(), ROUTER_SHARE: aux.new_tensor(share)}
        return made + self._config.router_aux_coef * aux, metrics | noted

    def _taught(self, micro: MicroBatch, batch: Batch) -> LossFunction:
        """The micro-batch's loss function, with the teacher's distribution if the loss needs it."""
        loss = self.losses[micro.loss]
        if not isinstance(loss, PolicyObjectiveLoss) or not loss.needs_distribution:
            return loss
        if loss.own_teacher:
            distribution = self._own_teacher.distribution_of(batch)
        else:
            assert loss.teachers is not None, "estimator=full without a teacher"
            distribution = loss.teachers.distribution_of(batch, micro.teachers)
        return partial(loss, distribution=distribution)

    def _gap_without_replay(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Metric of routing replay: log-prob gap to the sampler without replay.

        The mean of |log p - log p of the sampler| over the first micro-batch, with the experts that
        the learner's routers choose. Computed every `UNREPLAYED_EVERY` updates; otherwise empty.
        """
        if self._replay is None or self.schedule.last_epoch % UNREPLAYED_EVERY:
            return {}
        first = micro_batches[0]
        rows = self.made_rows(first.rows_B)
        with self._stages("forward"):
            [logprobs] = self.logprobs([[replace(row, experts_TLK=None) for row in rows]])
        if not first.counted or all(row.experts_TLK is None for row in rows):
            return {}
        sampled = [row.behaviour_logprobs_T[row.loss_mask_T] for row in rows]
        gap_N = np.abs(np.concatenate(logprobs) - np.concatenate(sampled))
        return {_UNREPLAYED: float(gap_N.sum()), _UNREPLAYED + OWN_SHARE: len(gap_N)}

    def optim_step(self, divisor: float) -> UpdateShare:
        """Update this worker's shard with the accumulated gradient / `divisor`; drop the gradient.

        If the gradient is not finite, no worker changes its weights.
        """
        updated = self._optim_step(divisor, True)
        self.zero_grad(None)
        return updated

    def _optim_step(self, divisor: float, finite: bool) -> UpdateShare:
        """Clip the gradient and update. `finite`: all of this worker's losses were finite."""
        with self._stages("optimizer"):
            if divisor != 1:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(divisor)
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self._config.max_grad_norm
            )
            grad_norm, lr = whole(norm).item(), self.optimizer.param_groups[0]["lr"]
            bad = self._group.total(float(not finite))
            if not bad and math.isfinite(grad_norm):
                self._update()
        return UpdateShare(grad_norm=grad_norm, lr=lr, seconds=self._stages.take())

    def rest(self, _: None) -> None:
        """Release the device's memory, except for weights and moments that stay on the device."""
        self.zero_grad(None)
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _update(self) -> None:
        """Update with gradients that are finite on every worker."""
        assert_optimizes(self.optimizer, self.model)
        self._exported.forget()
        with self._update_check(self.optimizer, self.model):
            self.optimizer.step()
        self.schedule.step()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Metrics of the micro-batches, including `train/loss`, without training."""
        self.model.eval()
        made: dict[str, float] = defaultdict(float)
        for micro in micro_batches:
            batch = collate(self.made_rows(micro.rows_B), self.device)
            loss, metrics = self._taught(micro, batch)(self._forward, batch, micro.counts)
            self.progress.mark()
            if micro.counted:
                metrics["train/loss"] = loss
                add_metrics(made, {name: value.item() for name, value in metrics.items()})
        self._forward.training_mode()
        self._reshard_root()
        return dict(made)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[list[TrainingRow]]) -> list[list[FloatArray]]:
        """log p_T of each row's trained tokens under the current weights, by batch and row."""
        self.model.eval()
        made = []
        for rows_B in batches:
            logprobs_N = self._forward(collate(rows_B, self.device)).logprobs_N.cpu().numpy()
            self.progress.mark()
            ends = np.cumsum([row.num_trained for row in rows_B])[:-1]
            made.append(np.split(logprobs_N, ends))
        self._forward.training_mode()
        self._reshard_root()
        return made

    def base_logprobs(self, batches: Sequence[list[TrainingRow]]) -> list[list[FloatArray]]:
        """`logprobs` by the model without its adapter."""
        assert self.lora is not None, "a model without an adapter has no base beside it"
        with adapter_off(self.lora):
            return self.logprobs(batches)

    def teacher_logprobs(self, asked: FrozenBatches) -> list[list[FloatArray]]:
        """`logprobs` by the learner's copy of a teacher."""
        assert self._teachers is not None, "the learner has no copies of teachers"
        return self._teachers.models[asked.model].logprobs(asked.batches)

    def reference_logprobs(self, asked: FrozenBatches) -> list[list[FloatArray]]:
        """`logprobs` by a frozen checkpoint, which is loaded for the first such order."""
        if self._reference is None or self._reference.path != asked.model:
            self._reference = FrozenModel(
                asked.model,
                self._group,
                dtype=torch.float32,
                device=self.device,
                compute_dtype=getattr(torch, self._config.dtype),
                event=() if self._config.stops is None else self._config.stops.event,
            )
        return self._reference.logprobs(asked.batches)

    def drop_reference(self, _: None) -> None:
        """Free the memory of the model of `reference_logprobs`."""
        self._reference = None

    @property
    def _teachers(self) -> LocalTeachers | None:
        losses = (loss for loss in self.losses if isinstance(loss, PolicyObjectiveLoss))
        return next((loss.teachers for loss in losses), None)

    def fingerprints(self, _: None) -> Fingerprints:
        """Fingerprints of this worker's shards of gradient and weights."""
        return shares(self.model, self._group.rank)

    def canary(self, question: CopyQuestion) -> list[CopyAnswer]:
        """Canary results of this worker's frozen models: copies of teachers, and the base."""
        if self._watched is None:
            base = Base(self.model, self.origin, self._config.dtype, self.base_logprobs)
            budget = self.passes.token_budget
            self._watched = watched(self._teachers, base if question.base else None, budget)
        return [model.answer(question) for model in self._watched]

    def made_rows(self, rows: Sequence[TrainingRow | RowPlace]) -> list[TrainingRow]:
        """Rows, with places of rollouts replaced by the rows that this worker has built."""
        return [self._rollouts.row(r) if isinstance(r, RowPlace) else r for r in rows]

    def take_rollouts_from(self, source: TrajectorySource, loss: PolicyObjectiveLoss) -> None:
        """Set the source of rollouts, and the loss that their rows are built for."""
        self._rollout_share = RolloutShare(source, loss.objective, loss.stop_event, self._group)
        if self._group.rank > 0:
            listen_ahead(self.fetch_ahead, self._group)

    @property
    def _rollouts(self) -> RolloutShare:
        assert self._rollout_share is not None, "nobody has said where rollouts come from"
        return self._rollout_share

    def hold_rollouts(self, step: Shares) -> Mapping[int, str]:
        """Fetch this worker's share of a step's rollouts; return reasons of lost groups by id."""
        return self._rollouts.hold(step)

    def fetch_ahead(self, step: Shares) -> None:
        """Prefetch this worker's share of the next step's rollouts, concurrently with orders."""
        self._rollouts.fetch_ahead(step)

    def add_reference(self, _: None) -> None:
        """Score this worker's share with the model without its adapter, as the reference."""
        assert self.lora is not None, "a model without an adapter has no base beside it"
        with adapter_off(self.lora):
            self._rollouts.add_reference(self._score)

    def build_rows(self, _: None) -> Built:
        """Build the rows of this worker's share."""
        return self._rollouts.build()

    def add_proximal(self, _: None) -> None:
        """Score the rows with the current weights, for the ratios of several updates."""
        self._rollouts.add_proximal(self._score)

    def join_rows(self, places: Sequence[RowPlace]) -> None:
        """Score rows with the current weights, and exchange sums between rows of one sequence."""
        self._rollouts.join(places, self._score)

    def kept_rollouts(
        self, group_ids: Collection[int]
    ) -> tuple[list[KeptRow], list[TokenTable | None]]:
        """Rows of these groups on this worker, and a table of all its tokens, for inspection."""
        return self._rollouts.kept(group_ids)

    def _score(self, rows: Sequence[TrainingRow]) -> list[FloatArray]:
        """log p_T of each row's trained tokens.

        Collective: every worker calls it with its own rows. A worker with fewer micro-batches than
        others repeats a row.
        """
        budget, packs = self.passes.token_budget, self.packs
        batches = list(split_by_token_budget(rows, budget, 1, self.most_mask, packs))
        missing = self._group.most(len(batches)) - len(batches)
        padding = [[rows[0] if rows else self._rollouts.any_row]] * missing
        scored = self.logprobs([*batches, *padding])
        by_row = {
            id(row): logprobs_N
            for rows_B, of_batch in zip(batches, scored[: len(batches)], strict=True)
            for row, logprobs_N in zip(rows_B, of_batch, strict=True)
        }
        return [by_row[id(row)] for row in rows]

    def _reshard_root(self) -> None:
        """Reshard FSDP2's root parameters, which a forward without gradients leaves gathered."""
        if self._root is not None:
            reshard(self._root)

    def gather(self, portion: Portion) -> dict[str, Tensor]:
        """Gather weights whole. Only the leader returns them; other workers return nothing."""
        made = {name: self.weights[name].in_precision(portion.dtype) for name in portion.names}
        return made if self._group.rank == 0 else {}

    def lender_place(self, _: None) -> LenderPlace:
        """Location of the memory that this worker lends."""
        return LenderPlace.own(self.device)

    def lend(self, portion: LentPortion) -> list[LentBucket]:
        """Gather weights into a bucket, and return one handle for each of this worker's readers.

        A worker without readers takes part in gathering, and keeps nothing.
        """
        readers = portion.readers[self._group.rank]
        self._exported.keep(bool(readers))
        lazy = [self.weights[name] for name in portion.names]
        made = ((weight.layout.name, weight.in_precision(portion.dtype)) for weight in lazy)
        if readers:
            layouts = [weight.layout_in(portion.dtype) for weight in lazy]
            return self._lender.lend(layouts, made, readers)
        for _ in made:
            pass
        return []

    def take_back(self, _: None) -> None:
        """Free the memory of the lent bucket."""
        self._exported.keep(False)
        self._lender.take_back()

    def carried_over(self) -> StoredWeights:
        """Tensors of the initial checkpoint that the model does not have. Leader only."""
        layouts = carried_over(self.model, self.names, self.origin)
        return StoredWeights(path=self.origin, layouts=layouts)

    def first_non_finite(self, _: None) -> str | None:
        """Name of the first tensor with a NaN or an infinity in this worker's shards, or None."""
        tensors = self.model.state_dict().items()
        return first_non_finite({name: local(tensor) for name, tensor in tensors})

    def follow(self, version: int) -> None:
        """Update the EMA or lagged teacher with the weights, which are now of this version."""
        self._followed_by.follow(version)

    def swap_teacher(self, _: None) -> None:
        """Swap the weights with those of the EMA or lagged teacher; call it again to undo."""
        self._exported.forget()
        self._followed_by.swap()

    @property
    def own_teacher(self) -> ShadowRule | None:
        """Update rule of the EMA or lagged teacher, or None without one."""
        return self._config.shadow

    @property
    def _followed_by(self) -> Shadow:
        assert self._shadow is not None, "no teacher follows these weights"
        return self._shadow

    def load_teacher(self, path: str) -> None:
        """Load the EMA or lagged teacher from a checkpoint.

        Raises:
            CheckpointError: it was written for another model, or cannot be read.
        """
        load_shadow(path, self._followed_by.state(), self._group.collectives)

    def gather_adapter(self, _: None) -> dict[str, Tensor]:
        """Gather the adapter whole, under peft's names. Only the leader returns it."""
        assert self.lora is not None
        made = adapter_tensors(self.lora)
        return made if self._group.rank == 0 else {}

    def save_optimizer(self, path: str) -> None:
        """Write this worker's shards of AdamW's moments, and of the EMA or lagged teacher."""
        write_tensors(path, self._state, self._group.collectives)

    @property
    def _state(self) -> dict[str, Tensor]:
        """Tensors of this worker in checkpoints besides the weights."""
        state = moments(self.model, self.optimizer)
        return state if self._shadow is None else {**state, **self._shadow.state()}

    def copy_moments(self, _: None) -> MomentsCopy | None:
        """Copy the tensors that `save_optimizer` writes, and return the copy on the leader.

        Other workers write theirs in a thread, concurrently with orders. Writing is collective: it
        succeeds or fails on all workers, so the leader sees any failure.
        """
        copy = MomentsCopy(self._state, self._group)
        if self._group.rank == 0:
            return copy
        self._aside.submit(copy.write)
        return None

    def copy_cost(self, _: None) -> CopyCost:
        """Memory that `copy_moments` would need."""
        shares = map(local, self._state.values())
        return CopyCost(socket.gethostname(), sum(s.nbytes for s in shares), free_bytes("cpu"))

    def load_optimizer(self, path: str) -> None:
        """Load this worker's shards of AdamW's moments from a checkpoint.

        Raises:
            CheckpointError: they were written for another model, or cannot be read.
        """
        load_moments(path, self.model, self.optimizer, self._group.collectives)
        if self._config.offload_optimizer:
            put_away(self.optimizer)

    def rng_state(self, _: None) -> dict[str, Tensor]:
        """States of this worker's random generators, by device type."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.startswith("cuda"):
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore the states of `rng_state`; a missing device type keeps its current state."""
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and self.device.startswith("cuda"):
            torch.cuda.set_rng_state(states["cuda"], self.device)

    def skip_update(self, _: None) -> None:
        """Advance the learning-rate schedule without an update."""
        with warnings.catch_warnings():  # torch warns of a schedule ahead of its optimizer
            warnings.simplefilter("ignore", UserWarning)
            self.schedule.step()

    def set_schedule(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the learning-rate schedule."""
        self.schedule.load_state_dict(dict(state))
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr


def follow(worker: LearnerWorker, group: WorkerGroup) -> None:
    """Loop of a worker other than rank 0: receive an order, execute it, send the result."""
    while True:
        order = group.receive()
        group.answer(worker.carry_out(order.method, order.argument))
