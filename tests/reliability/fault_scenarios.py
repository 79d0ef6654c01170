"""What can go wrong, and what a run then does.

These are the rows of docs/reference/faults.md, and the tests that hold them true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from helpers.faulty_workload import Fault

STEPS = 6
KILLED = r"worker 1 was killed by signal 9"
EVERY_STEP = ("--checkpoint-every", "1")
IN_BACKGROUND = (*EVERY_STEP, "--async-checkpoints")

# How the run comes to its end.
Ending = Literal["by itself", "with --resume"]


@dataclass(frozen=True)
class Row:
    """A line of the table: the fault, what happens, and what is kept of the work."""

    fault: str
    happens: str
    kept: str


@dataclass(frozen=True)
class Scenario:
    """Faults injected into one launch, and how it has to end.

    `code`: its exit code. `said`: regular expressions, all of which its messages match. `ending`: how the
    run then reaches the parameters of a run that was not disturbed, bit for bit.
    """

    name: str
    rows: tuple[Row, ...]
    faults: tuple[Fault, ...]
    code: int
    said: tuple[str, ...]
    ending: Ending
    options: tuple[str, ...] = field(default=EVERY_STEP)


NEWEST = "everything up to the newest checkpoint"
AGAIN = "starts again from the newest checkpoint"
STOPS = "the workers save at most two steps after the one they are at, and end"
SAVED = "everything: a checkpoint is saved first"
# At step 2 of rank 1. Rank 0 may not have begun it yet, and then asks a step earlier.
STOPPED_BY_FILE = r"stopped by SIGTERM after step [34]; a checkpoint is saved"

SCENARIOS = (
    Scenario(
        "killed",
        tuple(
            Row(f"a worker is killed (`kill -9`, out of memory) {where}", f"the run {AGAIN}", NEWEST)
            for where in (
                "in a forward pass",
                "in a backward pass",
                "in a gradient sum",
                "while it writes a checkpoint",
            )
        ),
        tuple(Fault("kill", place) for place in ("forward", "backward", "sum", "checkpoint")),
        0,
        (
            KILLED,
            r"starting again from .*step-000001 \(1 of 4",
            r"starting again from .* \(4 of 4 restarts\)",
        ),
        "by itself",
        (*EVERY_STEP, "--restarts", "4"),
    ),
    Scenario(
        "killed-while-saving",
        (
            Row(
                "a worker is killed while it writes a checkpoint in the background (`--async-checkpoints`)",
                f"the run {AGAIN}",
                NEWEST,
            ),
        ),
        # In the third step what is written may still be the second's checkpoint.
        (Fault("kill", "checkpoint", step=3),),
        0,
        (KILLED, r"starting again from .*step-00000[12] \(1 of 3"),
        "by itself",
        IN_BACKGROUND,
    ),
    Scenario(
        "killed-early",
        (
            Row(
                "a worker is killed before the first checkpoint",
                "the run starts again from the beginning",
                "nothing was saved",
            ),
        ),
        (Fault("kill"),),
        0,
        (KILLED, r"starting again from the beginning: there is no checkpoint \(1 of 3 restarts\)"),
        "by itself",
        (),
    ),
    Scenario(
        "killed-in-place",
        (
            Row(
                "a worker is killed twice at the same step",
                "the run ends: it would come no further",
                NEWEST,
            ),
        ),
        (Fault("kill", step=2), Fault("kill", step=1)),
        1,
        (KILLED, r"started again once, and it came no further than step 1 again"),
        "with --resume",
    ),
    Scenario(
        "hanging",
        (
            Row(
                "a worker hangs",
                "after `--timeout` it is named, with the line, the slice and the step that it is at, and the "
                f"run {AGAIN}",
                NEWEST,
            ),
        ),
        (Fault("hang"),),
        0,
        (
            r"worker 1 hangs at .*faulty_workload\.py:\d+ in hang \(step \d, in the \w+ pass of slice \S+\): "
            r"no answer within the run's timeout of 4 s",
            r"starting again from .*step-000001",
        ),
        "by itself",
        (*EVERY_STEP, "--timeout", "4"),
    ),
    Scenario(
        "stopped",
        (
            Row(
                "a worker's process is stopped (`kill -STOP`), with `--restarts 0`",
                "after `--timeout` the run ends and names it",
                NEWEST,
            ),
        ),
        (Fault("stop", "backward"),),
        1,
        (r"worker 1 hangs at the process is stopped \(SIGSTOP\)",),
        "with --resume",
        (*EVERY_STEP, "--timeout", "4", "--restarts", "0"),
    ),
    Scenario(
        "sigterm-to-the-launcher",
        (
            Row(
                "SIGTERM to the launcher",
                "the workers save at most two steps after the one they are at, and end",
                SAVED,
            ),
        ),
        (Fault("term-launcher"),),
        143,
        (STOPPED_BY_FILE,),
        "with --resume",
        (),
    ),
    Scenario(
        "sigterm-to-torchrun",
        (Row("SIGTERM to the process that the workers come from (torchrun)", STOPS, SAVED),),
        (Fault("term-torchrun"),),
        143,
        (STOPPED_BY_FILE,),
        "with --resume",
        (),
    ),
    Scenario(
        "sigterm-to-a-worker",
        (Row("SIGTERM to a worker, or to every process", STOPS, SAVED),),
        (Fault("term", rank=0),),
        143,
        (r"stopped by SIGTERM after step 4; a checkpoint is saved",),
        "with --resume",
        (),
    ),
    Scenario(
        "sigterm-while-saving",
        (
            Row(
                "SIGTERM to a worker, while one writes in the background (`--async-checkpoints`)",
                STOPS,
                SAVED,
            ),
        ),
        (Fault("term", rank=0),),
        143,
        (r"stopped by SIGTERM after step 3; a checkpoint is saved",),
        "with --resume",
        IN_BACKGROUND,
    ),
    Scenario(
        "out-of-memory",
        (
            Row(
                "a worker cannot get memory",
                "the run ends with the allocation's error and its place: it would come again",
                NEWEST,
            ),
        ),
        (Fault("memory"),),
        1,
        (r"worker 1 failed: RuntimeError: .*allocate", r"at .*faulty_workload\.py:\d+ in use_up_memory"),
        "with --resume",
    ),
    Scenario(
        "own-error",
        (
            Row(
                "the workload's code raises an error",
                "the run ends with it and its place, not tried again; but an error of a disk, a network or a "
                "device (`OSError`, torch's `AcceleratorError`) is",
                NEWEST,
            ),
        ),
        (Fault("raise", "backward"),),
        1,
        (r"worker 1 failed: ValueError: the layer's own error", r"at .*faulty_workload\.py:\d+ in fail"),
        "with --resume",
    ),
    Scenario(
        "nan",
        (
            Row(
                "a loss is not finite",
                "the run ends before the update, naming the step and the task; not tried again",
                NEWEST,
            ),
        ),
        (Fault("nan"),),
        1,
        (r"step 2: the loss of large is nan; training stopped before this step's update",),
        "with --resume",
    ),
)

DAMAGED = Scenario(
    "damaged-checkpoints",
    tuple(
        Row(
            f"{what}",
            "`--resume` uses the newest checkpoint that is whole, and says what is wrong with the others",
            "everything up to that checkpoint",
        )
        for what in (
            "a checkpoint's file is cut short",
            "a checkpoint's file is missing",
            "a bit of a checkpoint's file has flipped",
            "a checkpoint's index is missing",
        )
    ),
    (),
    0,
    (
        "step-000005 cannot be used: rank-00001.safetensors has 100 bytes",
        "step-000004 cannot be used: rank-00000.safetensors is missing",
        "step-000003 cannot be used: rank-00001.safetensors is not what was written",
        "step-000002 cannot be used",
        "step-000001",
    ),
    "with --resume",
)
FULL_DISK = Scenario(
    "full-disk",
    (
        Row(
            "the disk is full",
            "the run ends, naming the file that cannot be written; not tried again",
            NEWEST,
        ),
    ),
    (Fault("fill", rank=0),),
    3,
    ("cannot be written", "No space left on device"),
    "with --resume",
)
PORT_TAKEN = Scenario(
    "port-taken",
    (
        Row(
            "the port of `--master` is taken",
            "the launch is refused before anything starts",
            "nothing was begun",
        ),
    ),
    (),
    2,
    ("node 0 cannot listen there: Address already in use",),
    "with --resume",
)
LOST_DEVICE = Scenario(
    "elastic",
    (
        Row(
            "a worker is lost more often than `--restarts`, with `--elastic`",
            f"a plan for one device fewer is made, and the run {AGAIN} by it",
            f"{NEWEST}; what is trained is then the same to float tolerance",
        ),
    ),
    (Fault("kill"),),
    0,
    ("planned again for 1 of 2 devices", "going on from"),
    "by itself",
    (*EVERY_STEP, "--restarts", "0", "--elastic"),
)
CUT_FOR_5_S = Scenario(
    "cut-for-5-s",
    (
        Row(
            "the network between two nodes is cut for 5 s",
            "the run waits, and goes on where it was",
            "everything",
        ),
    ),
    (Fault("cut-5", rank=0),),
    0,
    (),
    "by itself",
)
CUT_FOR_GOOD = Scenario(
    "cut-for-good",
    (
        Row(
            "the network between two nodes is cut for good, with `--restarts 0`",
            "after `--timeout` every node's run ends: it lost its connection to another worker",
            NEWEST,
        ),
    ),
    (Fault("cut", rank=0),),
    1,
    ("lost its connection to another worker",),
    "with --resume",
    (*EVERY_STEP, "--timeout", "5", "--restarts", "0"),
)
LOST_NODE = Scenario(
    "killed-on-a-node",
    (
        Row(
            "a worker of one of several nodes is killed",
            f"every node's launcher {AGAIN}, all together",
            NEWEST,
        ),
    ),
    (Fault("kill"),),
    0,
    ("(1 of 3 restarts)",),
    "by itself",
)
BETWEEN_HOSTS = (CUT_FOR_5_S, CUT_FOR_GOOD, LOST_NODE)
ALL = (*SCENARIOS, DAMAGED, FULL_DISK, PORT_TAKEN, LOST_DEVICE, *BETWEEN_HOSTS)
