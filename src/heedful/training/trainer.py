"""The training loop: steps, evaluations, checkpoints, and going on after an interruption.

The trainer knows neither text nor search: how a batch is made, what its loss is and how the model
is evaluated are handed to it.
"""

import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from heedful.config import Training
from heedful.errors import UserError
from heedful.parts.losses import LossSum
from heedful.training.checkpoint import Checkpoints
from heedful.training.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Listener,
    Reason,
    Sample,
    StepDone,
)
from heedful.training.optimizer import load_optimizer_tensors, make_optimizer, optimizer_tensors
from heedful.training.schedules import Rate
from heedful.zoo.saved import set_weights


class Batch(Protocol):
    """What the trainer must know of a batch."""

    @property
    def num_targets(self) -> int:
        """Tokens that the loss sums over."""

    @property
    def num_tokens(self) -> int:
        """Real tokens on both sides, for tokens/s."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found. `value` is what the best model is chosen by; higher is better."""

    loss: float
    perplexity: float
    token_accuracy: float
    scores: dict[str, float]
    samples: list[Sample]
    value: float


@dataclass(frozen=True)
class Work:
    """What is learnt, as the trainer sees it.

    Attributes:
        plan: the batches of an epoch by its number, a pure function, so that a run's place in the
            data is two integers.
        load: a planned batch as tensors on the device.
        loss: (net, batch) -> sums over the batch's targets, differentiable.
        evaluate: (net) -> what it is worth now; must draw no random numbers.
        keep_best: (net) is the best so far: save it.
    """

    plan: Callable[[int], Sequence[Any]]
    load: Callable[[Any], Batch]
    loss: Callable[[nn.Module, Any], LossSum]
    evaluate: Callable[[nn.Module], Evaluation]
    keep_best: Callable[[nn.Module], None]


@dataclass
class State:
    """Where a run stands; with weights, optimizer and random numbers all that steps depend on."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    evaluated_step: int = -1
    best_step: int = -1
    best: dict[str, float] = field(default_factory=dict)
    best_value: float = -math.inf
    evaluations_since_best: int = 0


class Trainer:
    """One run, from wherever it stands to its end."""

    def __init__(
        self,
        net: nn.Module,
        work: Work,
        settings: Training,
        rate: Rate,
        checkpoints: Checkpoints,
        listeners: Sequence[Listener] = (),
        *,
        also_evaluate_at: Collection[int] = (),
    ) -> None:
        self.net = net
        self.work = work
        self.settings = settings
        self.rate = rate
        self.checkpoints = checkpoints
        self.listeners = list(listeners)
        self.also_evaluate_at = frozenset(also_evaluate_at)
        self.state = State()
        self.optimizer = make_optimizer(net, settings.optimizer)
        self.device = next(net.parameters()).device
        self._window = _Window()
        self._plan: tuple[int, Sequence[Any]] = (-1, [])
        self._stop_asked = False

    def resume(self) -> int | None:
        """Go back to the newest whole checkpoint; its step, or None where there is none."""
        self.checkpoints.clean()
        path = self.checkpoints.newest()
        if path is None:
            return None
        weights, tensors, state = self.checkpoints.load(path)
        set_weights(self.net, weights, path)
        generator = {
            name: tensors.pop(name) for name in [*tensors] if name.startswith("generator.")
        }
        load_optimizer_tensors(self.net, self.optimizer, tensors)
        torch.set_rng_state(generator["generator.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(generator["generator.cuda"], self.device)
        try:
            self.state = State(**state)
        except TypeError as error:
            raise UserError(
                f"{path}: the state is of another version of heedful: {error}"
            ) from None
        return self.state.step

    def run(self) -> Reason:
        """Train until an end is reached or the run is interrupted; says which."""
        with self._interruptible():
            self._window.restart()
            while (reason := self._end()) is None:
                self._step()
                if self.state.step % self.settings.log_every == 0:
                    self._report_steps()
                if self._is_looked_at():
                    self._evaluate()
            if reason == "interrupted":
                self._report_steps()
                self._save(interrupted=True)
            elif self.state.evaluated_step != self.state.step:
                self._evaluate()
        return reason

    def _is_looked_at(self) -> bool:
        step = self.state.step
        return step % self.settings.evaluate_every == 0 or step in self.also_evaluate_at

    def emit(self, event: Event) -> None:
        """Tell the listeners."""
        for listener in self.listeners:
            listener.on(event)

    def _end(self) -> Reason | None:
        settings, state = self.settings, self.state
        if settings.max_steps is not None and state.step >= settings.max_steps:
            return "max_steps"
        if settings.max_epochs is not None and state.epoch >= settings.max_epochs:
            return "max_epochs"
        if settings.max_minutes is not None and self._seconds() >= 60 * settings.max_minutes:
            return "time_limit"
        patience = settings.early_stopping
        if patience is not None and state.evaluations_since_best >= patience:
            return "early_stopping"
        return "interrupted" if self._stop_asked else None

    def _step(self) -> None:
        """One optimizer step over `accumulate` batches, normalised by all their targets."""
        self.net.train()
        batches = self._next_batches()
        targets = sum(batch.num_targets for batch in batches)
        total = torch.zeros(2, device=self.device)
        for batch in batches:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"
            ):
                loss = self.work.loss(self.net, batch)
            (loss.loss / targets).backward()
            total += torch.stack([loss.loss.detach(), loss.nll])
        clip = self.settings.clip_norm
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), math.inf if clip is None else clip)
        step = self.state.step + 1
        sums = [*total.tolist(), float(norm)]
        if not all(map(math.isfinite, sums)):
            raise self._not_finite(
                f"step {step}: the loss is {sums[0] / targets:.4g} and the gradient's norm "
                f"{sums[2]:.4g}, so the step was not taken"
            )
        rate = self.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.step = step
        self._window.add(sums, targets, sum(batch.num_tokens for batch in batches), rate)

    def _next_batches(self) -> list[Batch]:
        state = self.state
        if self._plan[0] != state.epoch:
            self._plan = (state.epoch, self.work.plan(state.epoch))
        plan = self._plan[1]
        chosen = plan[state.batch : state.batch + self.settings.accumulate]
        state.batch += len(chosen)
        if state.batch >= len(plan):
            state.epoch, state.batch = state.epoch + 1, 0
        return [self.work.load(item) for item in chosen]

    def _report_steps(self) -> None:
        if self._window.steps == 0:
            return
        self.emit(self._window.event(self.state, self._seconds()))
        self._count_time()
        self._window.restart()

    def _evaluate(self) -> None:
        self._report_steps()
        self._count_time()
        self.net.eval()
        found = self.work.evaluate(self.net)
        state = self.state
        if not math.isfinite(found.loss):
            raise self._not_finite(f"step {state.step}: the held-out loss is {found.loss:.4g}")
        state.evaluated_step = state.step
        is_best = found.value > state.best_value
        if is_best:
            state.best_step, state.best_value = state.step, found.value
            state.evaluations_since_best = 0
            state.best = {"step": state.step, "perplexity": found.perplexity} | found.scores
            self.work.keep_best(self.net)
        else:
            state.evaluations_since_best += 1
        self._count_time()
        event = Evaluated(
            step=state.step,
            epoch=state.epoch,
            seconds=state.seconds,
            loss=found.loss,
            perplexity=found.perplexity,
            token_accuracy=found.token_accuracy,
            scores=found.scores,
            samples=found.samples,
            is_best=is_best,
        )
        self.emit(event)
        self._save()
        self._window.restart()

    def _save(self, *, interrupted: bool = False) -> None:
        self._count_time()
        tensors = optimizer_tensors(self.net, self.optimizer) | self._generators()
        path = self.checkpoints.save(
            self.state.step, self.net, tensors, asdict(self.state), interrupted=interrupted
        )
        kind = "interrupted" if interrupted else "regular"
        self.emit(CheckpointSaved(self.state.step, str(path), kind))

    def _generators(self) -> dict[str, Tensor]:
        states = {"generator.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["generator.cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _seconds(self) -> float:
        return self.state.seconds + time.perf_counter() - self._window.since

    def _count_time(self) -> None:
        self.state.seconds = self._seconds()
        self._window.since = time.perf_counter()

    def _not_finite(self, problem: str) -> UserError:
        path = self.checkpoints.newest()
        kept = f"the last good checkpoint is {path}" if path else "no checkpoint was written yet"
        return UserError(
            f"{problem}; {kept}; try a lower training.schedule.learning_rate, more warmup_steps, "
            "clip_norm 1.0, or precision fp32"
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) ends the run after its step; a second ends it at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._stop_asked:
                raise KeyboardInterrupt
            self._stop_asked = True

        try:
            before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: there the caller decides
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Window:
    """Sums over the steps since the last report."""

    def __init__(self) -> None:
        self.since = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        self.sums = [0.0, 0.0, 0.0]
        self.targets = self.tokens = self.steps = 0
        self.rate = 0.0
        self.began = self.since = time.perf_counter()

    def add(self, sums: list[float], targets: int, tokens: int, rate: float) -> None:
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)]
        self.targets += targets
        self.tokens += tokens
        self.steps += 1
        self.rate = rate

    def event(self, state: State, seconds: float) -> StepDone:
        loss, nll, norm = self.sums
        elapsed = time.perf_counter() - self.began
        return StepDone(
            step=state.step,
            epoch=state.epoch,
            loss=loss / self.targets,
            nll=nll / self.targets,
            learning_rate=self.rate,
            grad_norm=norm / self.steps,
            tokens_per_second=self.tokens / elapsed,
            num_tokens=self.targets,
            seconds=seconds,
        )
