"""A Python that has imported what commands and workers need, and forks one that is ready for each that asks:
`python -m helpers.forker REQUESTS`, the file descriptor of a socket that others connect to.

Starting a run imports torch anew, seconds of processor time, and tests start many. What is forked begins as
`python -m MODULE` does, with a working folder, an environment and open files of its own. The forker has done
nothing but imports, as what the launcher forks its workers from.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

from spindle_cli.launch.starting.forked import IMPORTED_LATE, preload
from spindle_cli.process.lifetime import die_with_parent

IMPORTED = (
    "torch.distributed.run",
    *IMPORTED_LATE,
    "helpers.ready_python",
    "spindle_cli.checkpoint.tensors",
    "spindle_cli.cli.app",
    "spindle_cli.cli.launch_command",
    "spindle_cli.cli.profile_command",
    "spindle_cli.launch.starting.torchrun",
    "spindle_cli.launch.starting.head_start",
    "spindle_cli.launch.starting.rendezvous",
    "spindle_cli.profile.measuring.measure",
    "spindle_cli.runtime.saving.checkpoint_writer",
    "spindle_cli.runtime.worker",
    "spindle_cli.verify.counted",
    "spindle_cli.verify.flow",
    "spindle_cli.verify.rounding",
)
MOST_BYTES = 2**17
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def main() -> None:
    """Serve until the process that started this one ends; in what is forked: be the Python asked for."""
    die_with_parent()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    requests = socket.socket(fileno=int(sys.argv[1]))
    preload(*IMPORTED)
    _serve(requests)()


def _serve(requests: socket.socket) -> Callable[[], None]:
    """Fork for each request, and tell who asked how it ended; returns in what is forked alone."""
    address, askers = requests.getsockname(), [requests]
    tells: dict[int, int] = {}  # by process, the socket through which its end is told
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([*askers, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
        while tells and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            tell = tells.pop(ended[0])
            _tell(tell, os.waitstatus_to_exitcode(ended[1]))
            os.close(tell)
        if requests in ready:
            askers.append(requests.accept()[0])
        for asker in [each for each in askers[1:] if each in ready]:
            text, sent, _, _ = socket.recv_fds(asker, MOST_BYTES, 8)
            if not text:  # it has ended
                askers.remove(asker)
                asker.close()
                continue
            tell, *files = sent
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (wakes, woken, tell, *tells.values()):
                    os.close(number)
                for each in askers:
                    each.close()
                return partial(_become, text, files, address)
            _tell(tell, pid)
            tells[pid] = tell
            for number in files:
                os.close(number)


def _tell(tell: int, number: int) -> None:
    try:
        os.write(tell, str(number).encode())
    except BrokenPipeError:
        return  # who asked has ended


def _become(text: bytes, files: list[int], address: bytes) -> None:
    """`files`: standard input, output and error, and the network namespace to be in."""
    from helpers.ready_python import MEASURED_BY, ReadyPython, connected
    from spindle_cli.launch.starting import head_start

    asking = connected(address)  # which the network namespace has to itself
    request = json.loads(text)
    if ctypes.CDLL(None, use_errno=True).setns(files.pop(), _CLONE_NEWNET) and request["elsewhere"]:
        raise OSError(ctypes.get_errno(), "setns")
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [request["folder"], *path, *sys.path[1:]]  # the first is the forker's own
    module, *arguments = request["arguments"]
    sys.argv = [module, *arguments]
    head_start.Popen = partial(ReadyPython, asking)
    if MEASURED_BY in os.environ:  # as coverage has every Python do when it starts
        import_module("coverage").process_startup()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
