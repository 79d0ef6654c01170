"""What of a GPU can be tried without one.

    python scripts/gpu_rehearsal.py placement [WORKLOAD.yaml ...]
    python scripts/gpu_rehearsal.py backward [PYTEST ARGUMENTS ...]

* placement: every op of the workloads (all of laptop size in configs/workloads), forward on *fake* CUDA
  tensors, which have shapes and a device but no data: an op that mixes devices fails, and so does one whose
  outputs are elsewhere. Needs a build of torch with CUDA, and no GPU; exit code 3 where there is none.
* backward: tests, with every walk back through a graph in a thread of its own, as torch does it for CUDA:
  what a thread has put on (autocast, settings) is not there, but for modes, which torch's engine takes along.
  In the processes that the tests start, too: `backward tests/runtime/test_training_is_exact.py` trains by
  plans so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TRIED_BACKWARD = ("tests/operators", "tests/runtime", "tests/workload/test_no_randomness.py")
FAILED, NO_CUDA = 1, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Try one of them; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("placement", "backward"))
    parser.add_argument("more", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    if asked.what == "backward":
        run_backward_elsewhere()
        import pytest

        chosen = asked.more or ["-m", "not processes", *(str(ROOT / each) for each in TRIED_BACKWARD)]
        with tempfile.TemporaryDirectory() as folder:
            tell_children(Path(folder))
            return int(pytest.main(["-p", "no:cacheprovider", *chosen]))
    if torch.version.cuda is None:
        print("gpu-rehearsal: this build of torch has no CUDA; nothing was tried. One with it needs no GPU.")
        return NO_CUDA
    sources = [Path(each) for each in asked.more]
    failed = 0
    for source in sources or sorted((ROOT / "configs" / "workloads").glob("*-laptop.yaml")):
        tried = 0
        for name, said in placements(source, torch.device("cuda", 0)):
            tried += 1
            if said is not None:
                failed += 1
                print(f"{source.stem} {name}: {said}")
        print(f"{source.stem}: {tried} ops", flush=True)
    return FAILED if failed else 0


def placements(source: Path, device: torch.device) -> Iterator[tuple[str, str | None]]:
    """Each op's name, and how its forward pass on fake tensors of a device fails; None: it does not."""
    from spindle_cli.profile.op.stand_ins import load_analysed

    graph = load_analysed(str(source), Path.cwd(), {}).graph
    for task in graph.tasks.values():
        for op in task.ops:
            try:
                strayed = outputs_elsewhere(task, op, device)
            except (RuntimeError, TypeError) as error:  # as torch says that devices do not fit
                said: str | None = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            else:
                said = f"outputs on {', '.join(strayed)}" if strayed else None
            yield f"{task.task.name}/{op.index}", said


def outputs_elsewhere(task: Any, op: Any, device: torch.device) -> list[str]:
    """The devices of an op's outputs, as far as they are not the one of its inputs and its state."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from spindle_cli.analysis.fixed import without_values
    from spindle_cli.operators.heads.chunked import timed_op
    from spindle_cli.profile.op.counting import fake_state, with_state

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    timed = timed_op(task, op, 2, 1, None)
    # Without a graph: where it begins, torch 2.9 asks for a stream, and ends the process without a driver.
    with mode, torch.no_grad():
        more = timed.more_arguments(device)
        there: dict[int, torch.Tensor] = {}
        state = {}
        for name, tensor in fake_state(timed.module, None).items():
            if id(tensor) not in there:
                there[id(tensor)] = tensor.detach().to(device).requires_grad_(tensor.requires_grad)
            state[name] = there[id(tensor)]
        specs = [task.fields[name] for name in op.fields] + [task.values[name] for name in op.inputs]
        inputs = [without_values(spec, 2).detach().to(device) for spec in specs]
        with with_state(timed.module, state):
            result = timed.module(*inputs, *more)
    leaves = torch.utils._pytree.tree_leaves(result)
    found = {str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sorted(found - {str(device)})


def tell_children(folder: Path) -> None:
    """Have every Python that is started from here on walk back in other threads, by a module in `folder` that
    Python imports when it starts.
    """
    lines = ("import gpu_rehearsal", "gpu_rehearsal.run_backward_elsewhere()")
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    before = os.environ.get("PYTHONPATH", "")
    paths = (str(folder), str(Path(__file__).resolve().parent), before)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def run_backward_elsewhere() -> None:
    """From here on torch walks back through every graph in a thread of its own, as for CUDA: but where its
    engine is told to use none, as AOT autograd does while it traces what is compiled, and through graphs of
    tensors without values, which are a GPU's in no run: by them a workload is analysed.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    run: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # private

    def elsewhere(*arguments: Any, **named: Any) -> Any:
        stays = not torch._C._is_multithreading_enabled()
        if stays or any(end.is_meta or isinstance(end, FakeTensor) for end in arguments[0]):
            return run(*arguments, **named)
        found: list[Any] = []
        functions: Sequence[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch: untyped
        operations = _get_current_dispatch_mode_stack()

        def work() -> None:
            for mode in functions:
                torch._C._push_on_torch_function_stack(mode)
            for mode in operations:
                torch._C._push_on_torch_dispatch_stack(mode)
            try:
                found.append((run(*arguments, **named), None))
            except BaseException as error:
                found.append((None, error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        ((result, error),) = found
        found.clear()
        try:
            if error is not None:
                raise error
            return result
        finally:  # or the error would keep itself, and every context that it came through open
            del error

    torch.autograd._engine_run_backward = elsewhere  # type: ignore[attr-defined]  # private


if __name__ == "__main__":
    sys.exit(main())
