"""The training loop: optimizer steps, evaluations, checkpoints, and resuming from a checkpoint.

The trainer does not depend on text or on search: batches, loss and evaluation are passed to it as
functions.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from heedful.config import Training
from heedful.data.collate import Batch
from heedful.errors import UserError, error_line
from heedful.evaluation.sharing import share_evaluation
from heedful.processes import Processes
from heedful.training.block_compiler import BlockCompiler
from heedful.training.checkpoint import Checkpoints, CheckpointWriter, TrainerState
from heedful.training.divergence import divergence_error
from heedful.training.events import (
    Evaluated,
    EvaluationResult,
    Event,
    Listener,
    StepDone,
    StopReason,
    is_of_labels,
)
from heedful.training.interruption import EvaluationFailed, EvaluationInterrupted, Interruption
from heedful.training.parallel import shared_net
from heedful.training.schedules import LearningRate
from heedful.training.step import (
    LossNet,
    MicroBatch,
    Position,
    StepSums,
    TrainedNet,
    WeightUpdates,
    read_ahead,
    step_batches,
)
from heedful.zoo.saved import WEIGHTS, load_tensors, set_weights, weights_of

Result = TypeVar("Result")
_SECONDS_TO_COMPLETE = 60.0  # for a checkpoint, after an error; another process may have ended


@dataclass(eq=False)
class Trainer:
    """Trains a net, from its current state to the end of the run.

    Several processes take the same steps and evaluate together; the main one saves.

    Args:
        loss_net: the net and its loss.
        plan_epoch: returns the batches of an epoch by its number. A pure function, so that a run's
            position in the data is two integers.
        load_batch: returns a planned batch of an epoch as tensors on the CPU; called in a thread.
        evaluate: evaluates the net; called as in `share_evaluation`.
        save_best: saves the net, which is the best so far or the first, in the main process.
        settings: the recipe's `training`.
        schedule: returns the learning rate of a step.
        precision: of matrix products in a step: fp32, bf16, or fp16 with a scaled loss.
        compiler: of the net's blocks; default: they are not compiled.
        stored_weights: returns the weights that checkpoints hold; default: all.
        extra_evaluation_steps: steps with an evaluation that selects no model and ends no run.
        is_temporary: the run's folder is removed after it, so that errors do not refer to it.
        processes: those that train the net.
        batch_parts: parts of each planned batch, a forward and a backward pass each.
    """

    loss_net: LossNet
    settings: Training
    schedule: LearningRate
    checkpoints: Checkpoints
    listeners: Sequence[Listener] = ()
    _: KW_ONLY
    plan_epoch: Callable[[int], Sequence[Any]]
    load_batch: Callable[[int, Any], Batch]
    evaluate: Callable[[], EvaluationResult]
    save_best: Callable[[], None]
    precision: str = "fp32"
    compiler: BlockCompiler | None = None
    stored_weights: Callable[[nn.Module], Mapping[str, Tensor]] = weights_of
    extra_evaluation_steps: Collection[int] = ()
    is_temporary: bool = False
    processes: Processes = field(default_factory=Processes)
    batch_parts: int = 1

    def __post_init__(self) -> None:
        self.net, self.state = self.loss_net.net, TrainerState()  # the net is evaluated and saved
        settings, processes = self.settings, self.processes
        self.trained = (
            TrainedNet(self.loss_net)
            if processes.host_group is None
            else shared_net(self.loss_net, settings, processes, self.precision)
        )
        self.updates = WeightUpdates(
            self.trained, settings, processes, precision=self.precision, compiler=self.compiler
        )
        self.resumed_from: int | None = None  # the step of a checkpoint
        self._batches: Generator[tuple[list[MicroBatch], Position], None, None] | None = None
        self._begin_report()
        self.interruption = Interruption()
        self.writer = CheckpointWriter(self.checkpoints, is_asynchronous=settings.async_checkpoints)

    def resume(self) -> int | None:
        """Load the newest complete checkpoint, and return its step; None without a checkpoint."""
        path = self.processes.from_main(self._newest_checkpoint)
        if path is None:
            return None
        self.trained.scatter()
        try:
            tensors, state = self.checkpoints.load(path, self.trained.net)
            self.state = TypeAdapter(TrainerState).validate_python(state)
            self.updates.load(tensors)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise UserError(
                f"{path} is damaged, or of another version of heedful: {error}; remove it to "
                "resume from the checkpoint before"
            ) from None
        self.resumed_from = self.state.step
        return self.resumed_from

    def _newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, whose weights are loaded into the net."""
        self.checkpoints.clean()
        path = self.checkpoints.newest()
        if path is not None:
            weights = load_tensors(path / WEIGHTS)
            set_weights(self.net, weights, path, only=self.stored_weights(self.net))
        return path

    def run(self) -> StopReason:
        """Train until the run ends or is interrupted, and return the reason."""
        with self.interruption.handle_signals():
            self._begin_report()
            self._saved_at = time.perf_counter()
            try:
                reason = self._train()
            except EvaluationInterrupted:
                reason = "interrupted"
            except EvaluationFailed as failed:
                raise self._saved_error(failed) from failed.__cause__
            except Exception:  # the checkpoint in progress is completed
                with suppress(Exception):
                    self._emit_saved(wait=True, timeout=_SECONDS_TO_COMPLETE)
                raise
            finally:
                if self._batches is not None:
                    self._batches.close()  # ends the thread that reads ahead
                self._batches = None
            if reason == "interrupted":
                if self.state.best_step < 0:  # no evaluation yet: save the newest weights
                    self._report_steps()
                    self._save_best()
                self._save_interim(is_last=True)
            self._emit_saved(wait=True)
        return reason

    def _train(self) -> StopReason:
        """Steps, evaluations and checkpoints, until `_stop_reason`."""
        settings, state = self.settings, self.state
        if state.step and state.step % settings.evaluate_every == 0 and not self._is_evaluated():
            self._evaluate()  # the evaluation that an interruption ended
        while (reason := self._stop_reason()) is None:
            self._step()
            if state.step == 1:  # so that the run has a model from now on
                self._save_best()
            if state.step % settings.log_every == 0:
                self._report_steps()
            if state.step % settings.evaluate_every == 0:
                self._evaluate()
                continue
            if state.step in self.extra_evaluation_steps:
                self._evaluate_without_selection()
            if self._is_checkpoint_due():
                self._save_interim()
        if reason != "interrupted" and not self._is_evaluated():
            self._evaluate()
        return reason

    def _is_evaluated(self) -> bool:
        return self.state.evaluated_step == self.state.step

    def _is_checkpoint_due(self) -> bool:
        steps, minutes = self.settings.checkpoint_every, self.settings.checkpoint_every_minutes
        if steps is not None and self.state.step % steps == 0:
            return True
        if minutes is None:
            return False
        (is_due,) = self.processes.any([time.perf_counter() - self._saved_at >= 60 * minutes])
        return is_due

    def _save_best(self) -> None:
        """Save the weights, or their average, as the best model."""
        with self._evaluation_weights():
            self.processes.from_main(self.save_best)

    def emit(self, event: Event) -> None:
        """Pass an event to the listeners."""
        for listener in self.listeners:
            listener(event)

    def _stop_reason(self) -> StopReason | None:
        """The reason to end before another step, the same in all processes."""
        settings, state = self.settings, self.state
        minutes = settings.max_minutes
        is_late, is_interrupted = self.processes.any(
            [
                minutes is not None and self._seconds() >= 60 * minutes,
                self.interruption.is_requested,
            ]
        )
        if settings.max_steps is not None and state.step >= settings.max_steps:
            return "max_steps"
        if settings.max_epochs is not None and state.epoch >= settings.max_epochs:
            return "max_epochs"
        if is_late:
            return "time_limit"
        patience = settings.patience
        if patience is not None and state.evaluations_since_best >= patience:
            return "early_stopping"
        return "interrupted" if is_interrupted else None

    def _step(self) -> None:
        """One optimizer step over the accumulated batches."""
        self._emit_saved()
        state, number = self.state, self.state.step + 1
        if self._batches is None:
            steps = step_batches(
                self.plan_epoch,
                self.load_batch,
                self.processes,
                num_batches=self.settings.gradient_accumulation,
                num_parts=self.batch_parts,
                seed=self.settings.seed,
                device=self.updates.device,
                start=(state.epoch, state.batch),
                num_epochs=self.settings.max_epochs,
            )
            self._batches = read_ahead(steps)
        batches, after = next(self._batches)
        self._steps.append(self.updates.take(batches, self.schedule(number), number))
        state.step, (state.epoch, state.batch) = number, after

    def _report_steps(self) -> None:
        """Emit the means over the steps since the last report; waits for the device."""
        if not self._steps:
            return
        state = self.state
        statistics, targets, tokens, corpora = zip(*self._steps, strict=True)
        corpus_tokens = Counter[str]()
        for counts in corpora:
            corpus_tokens.update(counts)
        rows = torch.stack(statistics).tolist()
        may_overflow = self.updates.may_overflow()
        for index, (loss, _, norm) in enumerate(rows):
            if not math.isfinite(loss) or not (math.isfinite(norm) or may_overflow):
                raise self._divergence_error(
                    f"step {state.step - len(rows) + 1 + index}: the loss is "
                    f"{loss / targets[index]:.4g} and the gradient norm {norm:.4g}, so the step "
                    "was not taken"
                )
        loss, nll, _ = (sum(column) for column in zip(*rows, strict=True))
        norms = [norm for _, _, norm in rows if math.isfinite(norm)]
        event = StepDone(
            step=state.step,
            epoch=state.epoch,
            loss=loss / sum(targets),
            nll=nll / sum(targets),
            learning_rate=self.schedule(state.step),
            grad_norm=sum(norms) / len(norms) if norms else math.nan,
            tokens_per_second=sum(tokens) / (time.perf_counter() - self._began),
            num_tokens=sum(targets),
            seconds=self._seconds(),
            num_skipped=len(rows) - len(norms),
            corpora={name: n / corpus_tokens.total() for name, n in corpus_tokens.items()},
        )
        self.emit(event)
        self._count_time()
        self._begin_report()

    def _begin_report(self) -> None:
        self._steps: list[StepSums] = []  # since the last report
        self._began = self._since = time.perf_counter()

    def _evaluate_now(self) -> EvaluationResult:
        """Evaluate the net in eval mode; raises UserError for a loss that is not finite."""
        self._report_steps()
        self._count_time()
        try:
            evaluation = self.evaluate_together(self._evaluation_unless_interrupted)
        except Exception as error:  # of a metric, of a plugin's task, of a process
            raise EvaluationFailed(error_line(error)) from error
        if evaluation is None:
            raise EvaluationInterrupted
        if not math.isfinite(evaluation.loss):
            raise self._divergence_error(
                f"step {self.state.step}: the held-out loss is {evaluation.loss:.4g}"
            )
        return evaluation

    def evaluate_together(self, evaluate: Callable[[], Result | None]) -> Result | None:
        """Evaluate the weights of the main process, with the work divided over all processes.

        Args:
            evaluate: called by all as in `share_evaluation`; only by the main process if the whole
                net does not fit into the memory of the others.

        Raises:
            UserError: an error in one of the processes, by its rank.
        """
        if not self.trained.evaluates_in_all:
            return self.processes.from_main(evaluate)
        with self.trained.whole_in_all():
            return share_evaluation(self.processes, evaluate, self.interruption.deferred)

    def _evaluation_unless_interrupted(self) -> EvaluationResult | None:
        try:
            with self.interruption.evaluating():
                self.net.eval()
                return self.evaluate()
        except EvaluationInterrupted:
            return None

    def _evaluate_without_selection(self) -> None:
        """Evaluate only to emit the results; not repeated if an interruption ends it."""
        with self._evaluation_weights():
            self._emit_evaluated(self._evaluate_now(), is_best=False)
        self._begin_report()

    @contextmanager
    def _evaluation_weights(self) -> Iterator[None]:
        """In the block the net has the averaged weights, if the run keeps an average."""
        with self.updates.averaged_weights():
            self.trained.gather()
            yield

    def _evaluate(self) -> None:
        """Evaluate, save the net if it is the best so far, and write a checkpoint."""
        state = self.state
        with self._evaluation_weights():
            evaluation = self._evaluate_now()
            state.evaluated_step, state.value = state.step, evaluation.value
            is_best = evaluation.value > state.best_value
            if is_best:
                state.best_step, state.best_value = state.step, evaluation.value
                state.evaluations_since_best = 0
                of_labels = is_of_labels(evaluation.scores)
                perplexity = {} if of_labels else {"perplexity": evaluation.perplexity}
                state.best = {"step": state.step, **perplexity, **evaluation.scores}
                self.processes.from_main(self.save_best)
            else:
                state.evaluations_since_best += 1
        self._emit_evaluated(evaluation, is_best)
        self._save()
        self._begin_report()

    def _emit_evaluated(self, evaluation: EvaluationResult, is_best: bool) -> None:
        self._count_time()
        state, values = self.state, {**vars(evaluation)}
        del values["value"]
        self.emit(Evaluated(state.step, state.epoch, state.seconds, **values, is_best=is_best))

    def _save_interim(self, *, is_last: bool = False) -> None:
        """Save a checkpoint to resume from between two evaluations; it is never averaged."""
        self._report_steps()
        self._save(interim=True, is_last=is_last)
        self._begin_report()

    def _save(self, *, interim: bool = False, is_last: bool = False) -> None:
        """Begin a checkpoint, after the one before; `is_last`: the run ends with it."""
        self._emit_saved(wait=True)
        self._count_time()
        self.trained.gather()
        self.writer.save(
            self.state.step,
            self.stored_weights(self.net),
            self.updates.tensors(),
            asdict(self.state),
            interim=interim,
            is_sharded=self.trained.is_sharded,
            is_urgent=is_last,
        )
        self._saved_at = time.perf_counter()
        self._emit_saved()

    def _emit_saved(self, *, wait: bool = False, timeout: float | None = None) -> None:
        """Emit the event of a checkpoint that has become complete; raises errors of its writing."""
        event = self.writer.finished(wait=wait, timeout=timeout)
        if event is not None:
            self.emit(event)

    def _seconds(self) -> float:
        return self.state.seconds + time.perf_counter() - self._since

    def _count_time(self) -> None:
        self.state.seconds = self._seconds()
        self._since = time.perf_counter()

    def _saved_error(self, failed: EvaluationFailed) -> UserError:
        """The error for an evaluation that failed, after a checkpoint of its step."""
        step = self.state.step
        self._save_interim(is_last=True)
        self._emit_saved(wait=True)
        problem = f"step {step:,}: the evaluation failed: {failed}"
        if self.is_temporary:
            return UserError(problem)
        path = self.processes.from_main(self.checkpoints.newest)
        return UserError(f"{problem}; step {step:,} is saved in {path}: resume from it")

    def _divergence_error(self, problem: str) -> UserError:
        """The error for a loss that is not finite, after the checkpoint in progress."""
        self._emit_saved(wait=True)
        return divergence_error(
            problem,
            self.settings,
            self.checkpoints,
            precision=self.precision,
            is_temporary=self.is_temporary,
        )
