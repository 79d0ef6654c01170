"""Run one rank's program: its actions, in order, once per iteration.

What happens in an action is elsewhere: transfers.py (messages), compute.py (a slice's forward and backward),
gradients.py (sums), losses.py (what a share's loss counts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from spindle_cli.operators.random_streams import drawing_from
from spindle_cli.program.types import Action, Kind, Program
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.rows import Samples, take_rows
from spindle_cli.runtime.communication.sums import SumStarter
from spindle_cli.runtime.communication.transfers import Exchange, Held
from spindle_cli.runtime.communication.wiring import WiredEdge
from spindle_cli.runtime.measuring.timing import Activity, Stopwatch
from spindle_cli.runtime.step.compute import ForwardRun, LocalSlice, run_backward, run_forward
from spindle_cli.runtime.step.data import StepBatch
from spindle_cli.runtime.step.losses import LossBoard
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import ValueSpec
from spindle_cli.workload.training.precision import computing

if TYPE_CHECKING:
    from torch import Tensor

# After these no forward pass of this rank follows, and every rank sums losses before it sums gradients.
_AFTER_FORWARD = (Kind.BACKWARD, Kind.SUM, Kind.STEP)


class Executor:
    """One rank's side of every iteration, up to where its parameters' gradients are complete."""

    def __init__(
        self,
        program: Program,
        rank: int,
        slices: Mapping[int, LocalSlice],
        exchange: Exchange,
        pool: GradientPool,
        board: LossBoard,
        stopwatch: Stopwatch,
        train: TrainSettings,
    ) -> None:
        """`slices`: those that this rank runs, by index in the program."""
        self._actions = program.actions[rank]
        self._labels = [piece.label for piece in program.slices]
        self._slices = slices
        self._exchange = exchange
        self._pool = pool
        self._sums = SumStarter(self._actions, pool.start_sum)
        self._board = board
        self._stopwatch = stopwatch
        self._seed = train.seed  # of the random numbers that several ranks draw alike
        self._computing = partial(computing, train, board.device.type)
        self._batch_number = 0
        self._runs: dict[int, ForwardRun] = {}
        self._input_gradients: dict[int, dict[str, Tensor]] = {}
        self._ends_step = True

    def run(self, batch: StepBatch, number: int, *, ends_step: bool) -> None:
        """One iteration on this rank's part of the batches, which adds to the step's gradients and losses.

        With `ends_step` these are summed over the ranks: afterwards the pool's pieces have the whole step's
        gradient.

        Args:
            batch: what this rank reads.
            number: of the batch in the run, counted from 0.
            ends_step: see above.

        Raises:
            PeerLostError: another worker is gone or hangs.
            Exception: what the user's modules raised, with a note of the slice that ran.
        """
        self._ends_step, self._batch_number = ends_step, number
        for action in self._actions:
            with self._noting(action):
                self._run_action(action, batch)
        self._input_gradients.clear()

    def _run_action(self, action: Action, batch: StepBatch) -> None:
        if self._ends_step and action.kind in _AFTER_FORWARD and not self._board.is_summing:
            self._board.start_sum()
        match action.kind:
            case Kind.RECV | Kind.RECV_GRAD:
                assert action.transfer is not None
                self._exchange.post_receive(action.transfer)
            case Kind.SEND:
                assert action.transfer is not None
                self._stopwatch.note_send(action.transfer)
                self._exchange.post_send(action.transfer, self._outputs_of(action.transfer.producer))
            case Kind.SEND_GRAD:
                assert action.transfer is not None
                self._stopwatch.note_send(action.transfer)
                self._exchange.post_send(action.transfer, self._gradients_from(action.transfer.consumer))
            case Kind.FORWARD:
                assert action.piece is not None
                self._forward(self._slices[action.piece], batch)
            case Kind.BACKWARD:
                assert action.piece is not None
                self._backward(self._slices[action.piece])
            case Kind.SUM:
                if self._ends_step:
                    self._sums.reach(action)
            case Kind.STEP:
                with self._stopwatch.timed(Activity.WAIT, cause="sum"):
                    self._exchange.finish()
                    if self._ends_step:
                        self._pool.finish()

    def _forward(self, local: LocalSlice, batch: StepBatch) -> None:
        wired = local.wired
        inputs: dict[str, Tensor] = {}
        with self._stopwatch.timed(Activity.WAIT, wired.index, "activation"):
            for edge in wired.incoming:
                held = self._outputs_of(edge.edge.producer)
                inputs.update(self._exchange.complete(edge, held, is_gradient=False))
        task = wired.task.task
        fields = batch.fields(task.name, local.samples, wired.fields)
        stream = drawing_from(local.stream_seed(self._seed, self._batch_number), self._board.device)
        with self._stopwatch.timed(Activity.FORWARD, wired.index), stream, self._computing():
            watched = self._sums.watched(wired.index) if self._ends_step else {}
            before = partial(self._await_parameters, wired.index)
            arguments = self._board.arguments(task.name, local.samples)
            run = run_forward(local, fields, inputs, watched, before, arguments)
        if run.loss is not None and local.is_first:
            self._board.add(task.name, run.loss, local.samples)
        self._runs[wired.index] = run

    def _await_parameters(self, piece: int, op: int) -> None:
        if self._pool.awaits(piece, op):
            with self._stopwatch.timed(Activity.WAIT, piece, "activation"):
                self._pool.await_parameters(piece, op)

    def _backward(self, local: LocalSlice) -> None:
        wired = local.wired
        with self._stopwatch.timed(Activity.WAIT, wired.index, "gradient"):
            gradients = self._output_gradients(wired.outgoing)
        run = self._runs.pop(wired.index)
        if self._ends_step:
            self._sums.begin(wired.index)
        with self._stopwatch.timed(Activity.BACKWARD, wired.index):
            seed = self._board.seed(wired.task.task.name, local.samples)
            self._input_gradients[wired.index] = run_backward(run, gradients, seed)

    def _output_gradients(self, outgoing: tuple[WiredEdge, ...]) -> dict[str, Tensor]:
        """Gradients of a slice's outputs: those from all its consumers, added up."""
        total: dict[str, Tensor] = {}
        for edge in outgoing:
            held = self._gradients_from(edge.edge.consumer)
            for name, gradient in self._exchange.complete(edge, held, is_gradient=True).items():
                total[name] = total[name] + gradient if name in total else gradient
        return total

    def _outputs_of(self, producer: int) -> Held:
        """What this rank holds of a slice's outputs."""

        def held(spec: ValueSpec, samples: Samples) -> Tensor:
            return _cut(
                self._runs[producer].outputs[spec.name].detach(), spec, self._slices[producer], samples
            )

        return held

    def _gradients_from(self, consumer: int) -> Held:
        """What this rank holds of the gradients of a slice's inputs."""

        def held(spec: ValueSpec, samples: Samples) -> Tensor:
            return _cut(self._input_gradients[consumer][spec.name], spec, self._slices[consumer], samples)

        return held

    @contextmanager
    def _noting(self, action: Action) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in {self._describe(action)}")
            raise

    def _describe(self, action: Action) -> str:
        if action.kind is Kind.FORWARD and action.piece is not None:
            return f"the forward pass of slice {self._labels[action.piece]}"
        if action.kind is Kind.BACKWARD and action.piece is not None:
            return f"the backward pass of slice {self._labels[action.piece]}"
        if action.transfer is not None:
            sender, receiver = self._labels[action.transfer.producer], self._labels[action.transfer.consumer]
            what = "gradient" if action.transfer.is_gradient else "activation"
            return f"the transfer of an {what} from slice {sender} to slice {receiver}"
        return "the gradient sums"


def _cut(tensor: Tensor, spec: ValueSpec, local: LocalSlice, samples: Samples) -> Tensor:
    """The rows of `samples` in a tensor with the rows of a slice's share; all of it unchanged, or a
    contiguous part.

    User code that views a tensor in another shape needs the part as contiguous as the whole was.
    """
    rows = take_rows(tensor, spec, local.samples, samples)
    return rows if rows is tensor else rows.contiguous()
