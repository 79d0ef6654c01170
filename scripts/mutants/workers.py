"""Two at a time: each with a copy of the tree and a warm process in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from mutants.trees import Tree, held_tree

Work = TypeVar("Work")
Done = TypeVar("Done")


class Worker:
    """A warm process in a copy of the tree."""

    def __init__(self, tree: Tree) -> None:
        """Args: tree: held by this process."""
        self.tree = tree
        paths = [str(tree.root / name) for name in ("src", "tests", "scripts")]
        # One thread, as the suite has; and no compiled file of a bug is left for the next.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mutants.warm"],
            cwd=tree.root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Have a job done (`warm.py`)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        output = self.tree.root.with_suffix(".answer")
        self._process.stdin.write(json.dumps(job | {"output": str(output)}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the warm process ended with {self._process.wait()}")
        done: dict[str, Any] = json.loads(answer)
        return done

    def end(self) -> None:
        """Let the process end, and what it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def for_all(
    items: Iterable[Work],
    do: Callable[[Worker, Work], Done],
    tell: Callable[[Work, Done], None],
    folder: Path,
    jobs: int,
) -> None:
    """Do something with each item, `jobs` at a time, and tell of each as it is done, in this thread.

    Args:
        items: what.
        do: with a worker; runs in another thread.
        tell: called in this thread.
        folder: of the copies of the tree.
        jobs: how many at a time.
    """
    left = list(items)
    if not left:
        return
    with ExitStack() as stack:
        # When this is interrupted the workers end first, and with them what the pool waits for.
        pool = ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        free: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(min(jobs, len(left))):
            worker = Worker(stack.enter_context(held_tree(folder, Path.cwd())))
            stack.callback(worker.end)
            free.put(worker)

        def with_worker(item: Work) -> Done:
            worker = free.get()
            try:
                return do(worker, item)
            finally:
                free.put(worker)

        waiting: dict[Future[Done], Work] = {pool.submit(with_worker, item): item for item in left}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                tell(waiting.pop(future), future.result())
