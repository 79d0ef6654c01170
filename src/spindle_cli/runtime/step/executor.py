"""Run one rank's program: its actions, in order, once per iteration.

What happens in an action is elsewhere: transfers.py (messages), compute.py (a slice's forward and backward),
gradients.py (sums), losses.py (what a share's loss counts).

Gradient sums start while the slice that completes them is still running backward.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from spindle_cli.operators.tensor_group import Shared, drawing_from
from spindle_cli.program.types import ONCE_A_STEP, RECEIVES, TRANSFERS, Action, Kind, Program, Transfer
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.rows import Samples, gradient_of_copy, take_rows
from spindle_cli.runtime.communication.transfers import Exchange, Held
from spindle_cli.runtime.communication.wiring import WiredEdge, WiredSlice
from spindle_cli.runtime.measuring.action_log import ProgramLog
from spindle_cli.runtime.measuring.timing import Activity, Stopwatch
from spindle_cli.runtime.step.casts import CastWeights
from spindle_cli.runtime.step.compute import (
    ForwardRun,
    LocalSlice,
    require_planned_gradients,
    run_backward,
    run_forward,
)
from spindle_cli.runtime.step.data import StepBatch
from spindle_cli.runtime.step.host_copies import HostMemory
from spindle_cli.runtime.step.losses import LossAccumulator
from spindle_cli.runtime.step.offload import SliceCopies
from spindle_cli.runtime.step.sharded import BackwardWalk, ForwardWalk, uses_in
from spindle_cli.runtime.step.step_end import StepEnd, rank_parts
from spindle_cli.runtime.update.gradient_check import GradientCheck
from spindle_cli.runtime.update.loss_scale import LossScale
from spindle_cli.training.precision import computing
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import ValueSpec

if TYPE_CHECKING:
    from torch import Tensor


class TaskParts(Protocol):
    """A task as this rank runs it, at one length."""

    @property
    def slices(self) -> Mapping[int, LocalSlice]:
        """That this rank runs, by index in the program."""

    @property
    def edges(self) -> Mapping[tuple[int, int], WiredEdge]:
        """All of the task's, by producer and consumer."""


_EdgeKey = tuple[int, int]  # producer and consumer
AtLengths = Callable[[str, Mapping[str, tuple[int, ...]]], TaskParts]  # of one sample, by field

# Before the first of these all passes of a step are run, and all sums started.
_ENDS_STEP = (Kind.NORM, Kind.UPDATE, Kind.STEP, Kind.GATHER)


@dataclass(frozen=True)
class _Messages:
    """Sends, or receives for one pass, that follow each other in the program: they start together."""

    kind: Kind
    transfers: tuple[Transfer, ...]
    communicator: int

    @property
    def transfer(self) -> Transfer:
        """The first of the messages."""
        return self.transfers[0]


class Executor:
    """One rank's side of every iteration: it does what the program says, in that order, and nothing else."""

    def __init__(
        self,
        program: Program,
        rank: int,
        slices: Mapping[int, LocalSlice],
        exchange: Exchange,
        pool: GradientPool,
        accumulator: LossAccumulator,
        stopwatch: Stopwatch,
        train: TrainSettings,
        part: int = 0,
        at_lengths: AtLengths | None = None,
        host: HostMemory | None = None,
        scale: LossScale | None = None,
    ) -> None:
        """`slices`: those that this rank runs, by index in the program. `part`: of the pool, the program's
        groups. `at_lengths`: gives a task's parts for samples of these shapes, by field. `host`: one for all
        executors of a rank. `scale`: of the losses; None: they have none.
        """
        self._scale = None if scale is None else scale.now
        self._host = host or HostMemory(accumulator.device)
        self._copies: dict[int, SliceCopies] = {}
        self._at_lengths = at_lengths
        actions = program.actions[rank]
        self._steps = _joined(action for action in actions if action.kind not in _ENDS_STEP)
        self._ending = tuple(action for action in actions if action.kind in _ENDS_STEP)
        self._parts = rank_parts(program.updates[rank], pool, part)
        self._labels = [slice_.label for slice_ in program.slices]
        self.labels = (*map(self._describe, self._steps), "the gradient sums, or the update")
        self._log: ProgramLog | None = None
        self._slices = dict(slices)
        self._exchange = exchange
        self._pool = pool
        self._part = part
        self._sums = SumStarter(actions, pool.start_sum)
        self._accumulator = accumulator
        self._stopwatch = stopwatch
        self._seed = train.seed  # of the random numbers that several ranks draw alike
        self._computing = partial(computing, train, accumulator.device.type)
        order = [
            action.slice_index
            for action in actions
            if action.kind is Kind.FORWARD and action.slice_index is not None
        ]
        self._batch_number = 0
        self._uses = uses_in(program, rank, pool, part)
        keeps = train.autocast is not None and not any(self._uses.values())
        self._casts = CastWeights(order, self._slices, keeps=keeps)
        self._runs: dict[int, ForwardRun] = {}
        self._walks: dict[int, BackwardWalk] = {}
        self._input_gradients: dict[_EdgeKey, dict[str, Tensor]] = {}
        self._gradient_uses = _gradient_uses(actions, self._slices)
        self._uses_left: Counter[_EdgeKey] = Counter()
        self._ends_step = True

    def fit(self, batch: StepBatch) -> None:
        """Take the slices and edges for the lengths of a batch, which is run next. Outside of what passes run
        in: a length that comes for the first time is traced.

        Raises:
            WorkloadError: a task cannot be run at its length.
        """
        for task, shapes in batch.shapes.items():
            assert self._at_lengths is not None, "shapes are told of tasks with several lengths"
            parts = self._at_lengths(task, shapes)
            self._slices.update(parts.slices)
            self._exchange.carry(parts.edges)

    def note_in(self, program_log: ProgramLog) -> None:
        """Keep a journal of what is done; `labels` names its actions."""
        self._log = program_log

    def run(self, batch: StepBatch, number: int, *, ends_step: bool) -> None:
        """One iteration on this rank's part of the batches, which adds to the step's gradients and losses.

        With `ends_step` these are summed over the ranks: afterwards the pool's owned ranges have the whole
        step's gradient, or where parts of them are updated early, have it behind `finish`.

        Args:
            batch: what this rank reads.
            number: of the batch in the run, counted from 0.
            ends_step: see above.

        Raises:
            PeerLostError: another worker is gone or hangs.
            Exception: what the user's modules raised, with a note of the slice that ran.
        """
        self._ends_step, self._batch_number = ends_step, number
        self._pool.turn_to(self._part)
        self._program_log.opens(number)
        with self._casts.kept():
            for position, step in enumerate(self._steps):
                self._program_log.begins(number, position)
                with self._noting(step):
                    if isinstance(step, _Messages):
                        self._post(step)
                    elif ends_step or step.kind not in ONCE_A_STEP:
                        self._run_action(step, batch)
                self._program_log.ends(number, position)
        self._program_log.begins(number, len(self._steps))
        if not (ends_step and self._updates_early):
            self.finish()
        if not ends_step:
            self._program_log.ends(number, len(self._steps))

    def finish(self) -> None:
        """Wait for what is sent, and in a step's last batch for all sums; does nothing the second time."""
        with self._stopwatch.timed(Activity.WAIT, cause="sum"):
            self._exchange.finish()
            if self._ends_step:
                self._pool.finish()
        assert not self._input_gradients, "every gradient was sent, or used"

    def end_step(self, update: StepEnd) -> GradientCheck:
        """Update the parameters, each part when its gradients are complete, and the last one behind all sums;
        what was found out of the gradients.
        """
        gradient_check = GradientCheck()
        parts = iter(self._parts)
        for action in self._ending:
            match action.kind:
                case Kind.NORM:
                    gradient_check = update.check_gradients()
                case Kind.UPDATE:
                    part = next(parts)
                    with self._stopwatch.timed(Activity.WAIT, cause="sum"):
                        self._pool.finish_sums(part.groups)
                    update.step_part(part)
                case Kind.STEP:
                    if self._updates_early:
                        self.finish()
                    update.step(gradient_check, next(parts))
                case _:
                    assert action.group is not None
                    self._pool.start_gather(action.group)
        self._program_log.ends(self._batch_number, len(self._steps))
        return gradient_check

    @property
    def _updates_early(self) -> bool:
        return len(self._parts) > 1

    @property
    def _program_log(self) -> ProgramLog:
        assert self._log is not None, "its journal is begun before it runs"
        return self._log

    def _post(self, messages: _Messages) -> None:
        if messages.kind in RECEIVES:
            self._exchange.post_receives(messages.transfers, messages.communicator)
            return
        for transfer in messages.transfers:
            self._stopwatch.note_send(transfer)
        self._exchange.post_sends(messages.transfers, self._held_for, messages.communicator)
        for transfer in messages.transfers:
            if transfer.is_gradient:
                self._use_gradients(transfer.producer, transfer.consumer)

    def _held_for(self, transfer: Transfer) -> Held:
        """What this rank holds of what a transfer carries."""
        if transfer.is_gradient:
            return self._gradients_over(transfer.producer, transfer.consumer)
        return self._outputs_of(transfer.producer)

    def _run_action(self, action: Action, batch: StepBatch) -> None:
        if action.left:
            with self._stopwatch.timed(Activity.WAIT, action.slice_index, "leaving"):
                self._exchange.give_up(action.left)
        match action.kind:
            case Kind.FORWARD:
                assert action.slice_index is not None
                self._forward(self._slices[action.slice_index], batch)
            case Kind.BACKWARD:
                assert action.slice_index is not None
                self._backward(self._slices[action.slice_index])
            case Kind.LOSSES:
                self._pool.start_in_turn(self._accumulator.start_sum)
            case Kind.SUM:
                self._sums.reach(action)
            case Kind.FLAGS:
                assert action.communicator is not None
                self._pool.start_flags(action.communicator)

    def _forward(self, local: LocalSlice, batch: StepBatch) -> None:
        wired = local.wired
        inputs: dict[str, Tensor] = {}
        with self._stopwatch.timed(Activity.WAIT, wired.index, "activation"):
            for edge in wired.incoming:
                held = self._outputs_of(edge.edge.producer)
                inputs.update(self._exchange.complete(edge, held, is_gradient=False, group=local.group))
        task = wired.task.task
        fields = batch.fields(task.name, local.samples, wired.fields)
        stream = drawing_from(local.stream_seed(self._seed, self._batch_number), self._accumulator.device)
        with self._stopwatch.timed(Activity.FORWARD, wired.index), stream, self._computing():
            watched = self._sums.watched(wired.index) if self._ends_step else {}
            if watched:
                self._casts.renew()
            uses = self._uses[wired.index]
            forward, backward = ForwardWalk(uses, keeps=True), BackwardWalk(uses)

            def before(op: int) -> None:
                self._await_parameters(wired.index, op)
                forward.enter(op)

            def behind(op: int, made: Sequence[Tensor | Shared]) -> None:
                forward.leave(op)
                backward.watch(op, made)

            arguments = self._accumulator.arguments(task.name, local.samples)
            copies = None
            if wired.slice.offload:
                copies = SliceCopies(self._host, (*fields.values(), *inputs.values()))
                self._copies[wired.index] = copies
            run = run_forward(local, fields, inputs, watched, before, arguments, behind, copies)
        self._casts.ran(wired.index)
        self._walks[wired.index] = backward
        if run.loss is not None and local.is_first:
            self._accumulator.add(task.name, run.loss)
        self._runs[wired.index] = run

    def _await_parameters(self, slice_index: int, op: int) -> None:
        if self._pool.awaits(slice_index, op):
            with self._stopwatch.timed(Activity.WAIT, slice_index, "activation"):
                self._pool.await_parameters(slice_index, op)

    def _backward(self, local: LocalSlice) -> None:
        wired = local.wired
        with self._stopwatch.timed(Activity.WAIT, wired.index, "gradient"):
            gradients = self._output_gradients(local)
        run = self._runs.pop(wired.index)
        if self._ends_step:
            self._sums.begin(wired.index)
        with self._stopwatch.timed(Activity.BACKWARD, wired.index):
            seed = self._accumulator.seed(wired.task.task.name)
            walk, copies = self._walks.pop(wired.index), self._copies.pop(wired.index, None)
            walk.begin()
            if copies is not None:
                copies.begin_backward()
            input_gradients = run_backward(run, gradients, seed, self._scale)
            require_planned_gradients(wired, input_gradients)
            self._keep_gradients(wired, input_gradients)
            walk.end()
            if copies is not None:
                copies.end_backward()

    def _output_gradients(self, local: LocalSlice) -> dict[str, Tensor]:
        """Gradients of a slice's outputs: those from all its consumers, added up."""
        total: dict[str, Tensor] = {}
        for edge in local.wired.outgoing:
            producer, consumer = edge.edge.producer, edge.edge.consumer
            held = self._gradients_over(producer, consumer)
            arrived = self._exchange.complete(edge, held, is_gradient=True, group=local.group)
            for name, gradient in arrived.items():
                total[name] = total[name] + gradient if name in total else gradient
            if consumer in self._slices:
                self._use_gradients(producer, consumer)
        return total

    def _keep_gradients(self, wired: WiredSlice, gradients: Mapping[str, Tensor]) -> None:
        """Keep the gradients of a slice's inputs until each has been sent to all that take it, and used
        here.
        """
        for edge in wired.incoming:
            key = edge.edge.producer, edge.edge.consumer
            if self._gradient_uses[key]:
                self._input_gradients[key] = {
                    spec.name: gradients[spec.name] for spec in edge.differentiable if spec.name in gradients
                }
                self._uses_left[key] = self._gradient_uses[key]

    def _use_gradients(self, producer: int, consumer: int) -> None:
        """Note one of the uses of what goes back over an edge; with the last one it is given up here."""
        key = producer, consumer
        self._uses_left[key] -= 1
        if not self._uses_left[key]:
            del self._input_gradients[key], self._uses_left[key]

    def _outputs_of(self, producer: int) -> Held:
        """What this rank holds of a slice's outputs."""

        def held(spec: ValueSpec, samples: Samples) -> Tensor:
            return _cut(
                self._runs[producer].outputs[spec.name].detach(), spec, self._slices[producer], samples
            )

        return held

    def _gradients_over(self, producer: int, consumer: int) -> Held:
        """What this rank holds of the gradients that go back over an edge."""

        def held(spec: ValueSpec, samples: Samples) -> Tensor | None:
            gradient = self._input_gradients[producer, consumer].get(spec.name)
            if gradient is None:
                return None
            if spec.batch_dim is None:
                return gradient_of_copy(gradient, self._slices[consumer].samples, samples)
            return _cut(gradient, spec, self._slices[consumer], samples)

        return held

    @contextmanager
    def _noting(self, action: Action | _Messages) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in {self._describe(action)}")
            raise

    def _describe(self, action: Action | _Messages) -> str:
        if isinstance(action, _Messages):
            sender, receiver = self._labels[action.transfer.producer], self._labels[action.transfer.consumer]
            what = "a gradient" if action.transfer.is_gradient else "an activation"
            return f"the transfer of {what} from slice {sender} to slice {receiver}"
        if action.slice_index is not None:
            way = "forward" if action.kind is Kind.FORWARD else "backward"
            return f"the {way} pass of slice {self._labels[action.slice_index]}"
        return "the sum of the losses" if action.kind is Kind.LOSSES else "the gradient sums"


def _gradient_uses(actions: Iterable[Action], slices: Mapping[int, LocalSlice]) -> Counter[_EdgeKey]:
    """How often a rank uses the gradients that it makes of what comes over each edge: it sends them in so
    many messages, and takes them itself where it runs the producer, too.
    """
    edges = (edge.edge for local in slices.values() for edge in local.wired.incoming)
    uses = Counter((edge.producer, edge.consumer) for edge in edges if edge.producer in slices)
    for action in actions:
        if action.kind is Kind.SEND_GRAD and action.transfer is not None:
            uses[action.transfer.producer, action.transfer.consumer] += 1
    return uses


def _joined(actions: Iterable[Action]) -> tuple[Action | _Messages, ...]:
    """The actions, with the messages that start together as one."""

    def key(place_and_action: tuple[int, Action]) -> object:
        place, action = place_and_action
        transfer = action.transfer
        if transfer is None:
            return place
        taker = transfer.producer if transfer.is_gradient else transfer.consumer
        return action.kind, action.communicator, taker if action.kind in RECEIVES else None

    steps: list[Action | _Messages] = []
    for _, group in groupby(enumerate(actions), key):
        run = [action for _, action in group]
        first = run[0]
        if first.kind in TRANSFERS:
            transfers = tuple(action.transfer for action in run if action.transfer is not None)
            assert first.communicator is not None, "a message has a communicator"
            steps.append(_Messages(first.kind, transfers, first.communicator))
        else:
            steps.append(first)
    return tuple(steps)


def _cut(tensor: Tensor, spec: ValueSpec, local: LocalSlice, samples: Samples) -> Tensor:
    """The rows of `samples` in a tensor with the rows of a slice's share; all of it unchanged, or a
    contiguous part.

    User code that views a tensor in another shape needs the part as contiguous as the whole was.
    """
    rows = take_rows(tensor, spec, local.samples, samples)
    return rows if rows is tensor else rows.contiguous()


class SumStarter:
    """Starts one rank's gradient sums in the program's order, each as soon as its last op is through.

    A program lists the sums behind the slice that completes them, each with the op of it that does; one
    without starts when the program comes to it.
    """

    def __init__(self, actions: Sequence[Action], start: Callable[[int], None]) -> None:
        """`actions`: of the rank. `start`: starts the sum of a group."""
        self._start = start
        self._after: dict[int, list[Action]] = {}
        backward: int | None = None
        for action in actions:
            if action.kind is Kind.BACKWARD:
                backward = action.slice_index
            elif action.kind is Kind.SUM and backward is not None and action.op is not None:
                self._after.setdefault(backward, []).append(action)
        self._waiting: deque[Action] = deque()

    def watched(self, slice_index: int) -> dict[int, Callable[[], None]]:
        """Ops of a slice that complete a sum, with what to call when their backward is through."""
        return {
            action.op: partial(self._op_done, action.op)
            for action in self._after.get(slice_index, ())
            if action.op is not None
        }

    def begin(self, slice_index: int) -> None:
        """Note that a slice is about to run backward, whose sums may start inside of it."""
        assert not self._waiting, "every sum is started before the next slice runs backward"
        self._waiting.extend(self._after.get(slice_index, ()))

    def reach(self, action: Action) -> None:
        """The program has come to a sum: start it if its op did not."""
        if action.op is None:
            assert action.group is not None, "a sum names its group"
            self._start(action.group)
        elif action in self._waiting:
            self._start_through(action)

    def _op_done(self, op: int) -> None:
        ready = [action for action in self._waiting if action.op is not None and action.op >= op]
        if ready:
            self._start_through(ready[-1])

    def _start_through(self, action: Action) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            assert first.group is not None, "a sum names its group"
            self._start(first.group)
            if first == action:
                return
