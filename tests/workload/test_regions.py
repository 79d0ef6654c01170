"""What forward decides by values between operators runs as it is written, on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from helpers.analysed import analysed
from spindle_cli.analysis.analyse import analyse, analyse_for_others
from spindle_cli.analysis.localise import place_of_buffer
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.errors import WorkloadError
from spindle_cli.profile.checking.forward import compare_with_forward
from spindle_cli.profile.checking.values import Values
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items

CLASSES = 4
LABELS = torch.tensor([0, -1, 2, 3, -1, -1, 3, 2, 1, 0, -1, 3, -1, 1, 2, -1])


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.a, self.b, self.c = Block(), Block(), Block()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, label: Tensor) -> Any:
        return self.run(self, x, label)

    def features(self, x: Tensor) -> Tensor:
        made: Tensor = self.c(self.b(self.a(self.first(x))))
        return made

    def losses(self, x: Tensor, label: Tensor) -> Tensor:
        logits = self.head(self.features(x))
        return functional.cross_entropy(logits, label.clamp(min=0), reduction="none")

    def __private(self, x: Tensor) -> Tensor:
        return self.scale * x

    @torch.no_grad()
    def enqueue(self, logits: Tensor) -> None:
        n = int(self.seen > 3)
        self.seen = (1 - n) * (self.seen + logits.abs().mean())

    def by_private(self, x: Tensor, label: Tensor) -> Tensor:
        losses = self.losses(x, label)
        if (label >= 0).any():
            return self.__private(losses).mean()
        return losses.mean()


def items() -> Items:
    data = Items(16, x=(3,), label=((), CLASSES))
    data.data["label"] = LABELS.clone()
    return data


def task_of(run: Callable[..., Any], net: Callable[[Callable[..., Any]], nn.Module] = Net) -> TaskGraph:
    return analysed(Workload("w", [Task("t", net(run), 8, items())], operators=(Block,))).tasks["t"]


def whole_ops(task: TaskGraph) -> list[str]:
    return [op.target or "loss" for op in task.ops if op.coupled]


def batches() -> dict[str, dict[str, Tensor]]:
    """With several labels, with all, with one and with none."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = {"some": LABELS[:8], "all": LABELS[:8].clamp(min=0), "one": LABELS[:8].clone()}
    labels["one"][1:] = -1
    return {
        name: {"x": x, "label": label} for name, label in {**labels, "none": torch.full((8,), -1)}.items()
    }


def focal(chances: Tensor, label: Tensor, gamma: float = 2.0) -> Tensor:
    count = (label >= 0).sum()
    if count == 0:
        return 0 * chances.sum()
    right = chances.gather(1, label.clamp(min=0)[:, None])[:, 0]
    return (-((1 - right) ** gamma) * right.log() * (label >= 0)).sum() / count


def by_helper(self: Net, x: Tensor, label: Tensor) -> Tensor:
    logits = self.head(self.features(x))
    return focal(logits.softmax(-1), label) + 0.1 * logits.square().mean()


def by_count(self: Net, x: Tensor, label: Tensor) -> Tensor:
    losses = self.losses(x, label)
    count = (label >= 0).sum().item()
    weight = self.scale / max(count, 1)
    return (losses * (label >= 0)).sum() * weight


def by_largest(self: Net, x: Tensor, label: Tensor) -> Tensor:
    losses = self.losses(x, label)
    k = int(0.25 * losses.numel())
    return losses.topk(k).values.mean()


def by_threshold(self: Net, x: Tensor, label: Tensor) -> Tensor:
    ordered, _ = self.losses(x, label).sort(descending=True)
    kept = ordered[:3]
    if ordered[3] > 1.0:
        kept = ordered[ordered > 1.0]
    return kept.mean()


def by_selection(self: Net, x: Tensor, label: Tensor) -> Tensor:
    losses = self.losses(x, label)[label >= 0]
    return losses.mean() if len(losses) > 1 else self.scale * self.head(self.first(x)).mean()


def by_rows(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.features(x)
    rows = (label >= 0).nonzero().squeeze(1)
    if rows.numel() == 0:
        return 0 * x.sum()
    return functional.cross_entropy(self.head(x[rows]), label[rows])


def by_loop(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x, total = self.features(x), 0 * self.scale
    for i in range(len(x)):
        if label[i] >= 0:
            total = total + functional.cross_entropy(self.head(x[i])[None], label[i][None])
    return total / (label >= 0).sum().clamp(min=1)


def by_while(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.features(x)
    while x.norm() > 2:
        x = x / 2
    return functional.cross_entropy(self.head(x), label.clamp(min=0))


def by_unique(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.features(x)
    kinds, inverse = torch.unique(label, return_inverse=True)
    centers = torch.zeros(len(kinds), WIDTH, dtype=x.dtype).index_add(0, inverse, x)
    return (x - centers[inverse]).square().mean() + self.head(x).mean()


def by_numpy(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.features(x)
    counts = torch.from_numpy(np.bincount(label.clamp(min=0).numpy(), minlength=CLASSES))
    return functional.cross_entropy(self.head(x), label.clamp(min=0), weight=1 / (1 + counts).to(x.dtype))


def by_classes(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.features(x)
    with torch.no_grad():
        weight = torch.ones(CLASSES, dtype=x.dtype)
        for kind in label.unique():
            if kind >= 0:
                weight[kind] = 1.0 / (label == kind).sum()
    return functional.cross_entropy(self.head(x), label.clamp(min=0), weight=weight)


def by_own_loss(self: Net, x: Tensor, label: Tensor) -> dict[str, Tensor]:
    loss = self.losses(x, label).mean()
    if loss > 1.2:
        return {"loss": loss + self.scale**2, "other": x}
    return {"loss": loss, "other": x}


@torch.jit.script
def scripted(x: Tensor, y: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return (x - y).pow(2).mean()
    return (x + y).pow(2).mean()


def by_scripted(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.head(self.features(x))
    return scripted(x, functional.one_hot(label.clamp(min=0), CLASSES).to(x.dtype))


def by_private(self: Net, x: Tensor, label: Tensor) -> Tensor:
    return self.by_private(x, label)


def pairs(x: Tensor, others: Tensor, label: Tensor, their_label: Tensor) -> tuple[Tensor, Tensor]:
    """As libraries of losses find pairs: of no sample with itself, if both are the same."""
    match = label[:, None] == their_label[None]
    if their_label is label:
        match = match.clone().fill_diagonal_(False)
    of = others if others is x else others.detach()
    i, j = torch.where(match)
    return x[i], of[j]


def by_pairs(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.features(x)
    one, two = pairs(x, x, label, label)
    return (one - two).square().sum() + 0.1 * self.head(x).square().mean()


def by_two_names(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """What is changed by one name is changed by the other one, too."""
    x = self.features(x).clone()
    y = x
    n = int((label >= 0).sum())
    x[:n] = 2 * x[:n]
    return functional.cross_entropy(self.head(y), label.clamp(min=0))


def zeroed(x: Tensor, label: Tensor) -> None:
    n = int((label >= 0).sum())
    x[:n] = 0


def by_callers_name(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """A function changes what its caller goes on with."""
    x = self.features(x)
    y = x.clone()
    zeroed(y, label)
    return functional.cross_entropy(self.head(y), label.clamp(min=0))


def by_dtype(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.features(x)
    return self.head(x).square().mean() * {torch.float64: 2.0, torch.float32: 3.0}[x.dtype]


IN_LOSS = [by_helper, by_count, by_largest, by_threshold, by_selection, by_rows, by_loop, by_while, by_unique]
IN_LOSS += [
    by_numpy,
    by_classes,
    by_own_loss,
    by_scripted,
    by_private,
    by_pairs,
    by_two_names,
    by_callers_name,
    by_dtype,
]


def scaled_between(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.a(self.first(x))
    scale = self.scale
    if (label >= 0).sum() > 3:
        scale, x = 2 * scale, x - x.mean(0)
    x = x * scale
    return functional.cross_entropy(self.head(self.c(self.b(x))), label.clamp(min=0))


def pooled_between(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.a(self.first(x))
    pooled = x.new_zeros(int(label.max()) + 2, WIDTH).index_add(0, label + 1, x)
    x = x + pooled[label + 1]
    return functional.cross_entropy(self.head(self.c(self.b(x))), label.clamp(min=0))


def changed_between(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.a(self.first(x))
    n, x = int((label >= 0).sum()), x.clone()
    x[:n] = 2 * x[:n] - self.scale
    return functional.cross_entropy(self.head(self.c(self.b(x))), label.clamp(min=0))


def twice_between(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """Each place is a region of its own."""
    x = self.a(self.first(x))
    if label[0] >= 0:
        x = x - x.mean(0)
    x = self.c(self.b(x))
    if label[1] < 0:
        x = self.scale * x
    return functional.cross_entropy(self.head(x), label.clamp(min=0))


def layer_left_out(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """The layer that is decided upon runs with the op that its result goes into."""
    x = self.a(self.first(x))
    if (label >= 0).sum() > 3:
        x = self.b(x)
    return functional.cross_entropy(self.head(self.c(x)), label.clamp(min=0))


BETWEEN = {
    scaled_between: ["b"],
    pooled_between: ["b"],
    changed_between: ["b"],
    twice_between: ["b", "loss"],
    layer_left_out: ["c"],
}


# fmt: off
def line_before(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """A region that has to begin sooner begins with all of a line."""
    x = self.a(self.first(x))
    scaled = lambda by: by * x; y = x.mean(0)  # noqa: E702, E731
    x = scaled(self.scale) if label[0] >= 0 else x
    return functional.cross_entropy(self.head(self.c(self.b(x + y))), label.clamp(min=0))


def one_line(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """All of it."""; x = self.head(self.features(x)); f = lambda y: y + x; m = 1  # noqa: E702, E731
    n = int(label.max()); x = f(x) if n > 1 else x  # noqa: E702
    if n > 1: x = x + 1; m = 2  # noqa: E701, E702
    else: m = 5  # noqa: E701
    return x.square().mean() * m * n


def by_default(x: Tensor, own: Any = lambda x: 2 * x if x.sum() > 0 else x) -> Any: return own(x)
# fmt: on


def lambda_of_another_function(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """It stands in the line in which that function begins."""
    return functional.cross_entropy(self.head(by_default(self.features(x))), label.clamp(min=0))


def made_anew(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """The function that decides is another one in each forward."""
    x = self.a(self.first(x))
    if label[0] >= 0:
        x = x * 2

    def scaled(x: Tensor) -> Tensor:
        n = int((x > 0).sum())
        return x * n

    x = scaled(x) + x
    return functional.cross_entropy(self.head(self.c(self.b(x))), label.clamp(min=0))


AS_THEY_STAND = {
    line_before: ["b"],
    one_line: ["loss"],
    lambda_of_another_function: ["loss"],
    made_anew: ["b"],
}


def check(task: TaskGraph, batch: Mapping[str, Tensor]) -> None:
    """The same loss, gradients and structure as in plain PyTorch."""
    if task.task.name == "t":
        assert compare_with_forward(task, batch, Values.of_task(task, torch.float64)) is None


@pytest.mark.parametrize("run", IN_LOSS, ids=lambda run: run.__name__)
def test_a_loss_that_decides_by_values(run: Callable[..., Any]) -> None:
    task = task_of(run)
    assert whole_ops(task) == ["loss"]
    for batch in batches().values():
        check(task, batch)


@pytest.mark.parametrize("run", BETWEEN, ids=lambda run: run.__name__)
def test_features_that_are_decided_by_values(run: Callable[..., Any]) -> None:
    """The op behind runs whole, and no other."""
    task = task_of(run)
    assert whole_ops(task) == BETWEEN[run]
    for batch in batches().values():
        check(task, batch)


@pytest.mark.parametrize("run", AS_THEY_STAND, ids=lambda run: run.__name__)
def test_statements_and_functions_that_share_a_line_or_a_code(run: Callable[..., Any]) -> None:
    """Places are told by lines, and functions by their code: neither has to be one of its own."""
    task = task_of(run)
    assert whole_ops(task) == AS_THEY_STAND[run]
    for batch in batches().values():
        check(task, batch)


def test_a_workload_is_the_same_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiled in one and launched in another: messages name files as they are seen from there."""

    def kinds() -> list[str]:
        return [op.kind for op in task_of(by_count).ops]

    from_here = kinds()
    monkeypatch.chdir(tmp_path)
    assert kinds() == from_here


def test_what_a_region_may_use_is_what_its_op_has() -> None:
    task = task_of(scaled_between)
    whole = next(op for op in task.ops if op.coupled)
    assert sorted(whole.parameters) == sorted(
        ["scale", *(f"b.{name}" for name, _ in Block().named_parameters())]
    )
    assert not any("spindle" in name for name, _ in task.root.named_parameters())
    assert not any("spindle" in name for name in task.root.state_dict())


def test_gradients_of_a_branch_that_is_not_taken_are_none() -> None:
    """As in plain PyTorch, for whom a parameter was not used."""

    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        losses = self.losses(x, label)
        if (label >= 0).any():
            return losses.mean() * self.scale
        return losses.mean()

    task = task_of(run)
    *_, loss = task.ops
    assert "scale" in loss.parameters
    module = task.op_module(loss)
    for name, batch in batches().items():
        fields = {key: batch[key].float() if key == "x" else batch[key] for key in loss.fields}
        given = torch.randn(8, WIDTH, requires_grad=True)
        found = torch.autograd.grad(module(*fields.values(), given), [task.root.scale], allow_unused=True)  # type: ignore[list-item]
        assert (found[0] is None) == (name == "none")


def test_a_buffer_that_a_region_counts_in() -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        losses = self.losses(x, label)
        self.seen += int((label >= 0).sum())
        return losses.sum() / self.seen

    task = task_of(run)
    assert (whole_ops(task), task.ops[-1].changes) == (["loss"], ("seen",))
    module = task.op_module(task.ops[-1])
    batch = batches()["some"]
    given = {"x": batch["x"].float(), "label": batch["label"]}
    module(*(given[name] for name in task.ops[-1].fields), torch.randn(8, WIDTH))
    assert task.root.seen.item() == 5


def written_and_read(self: Net, x: Tensor, label: Tensor) -> Tensor:
    loss = functional.cross_entropy(self.head(self.features(x)) + self.seen, label.clamp(min=0))
    with torch.no_grad():
        n = int(self.seen)
        self.seen.fill_(n + 1)
    return loss


def written_alone(self: Net, x: Tensor, label: Tensor) -> Tensor:
    logits = self.head(self.features(x))
    with torch.no_grad():
        n = int((logits.argmax(1) == label).sum())
        self.seen.fill_(n)
    return functional.cross_entropy(logits, label.clamp(min=0))


def written_and_weighed(self: Net, x: Tensor, label: Tensor) -> Tensor:
    logits = self.head(self.features(x)) + self.seen
    with torch.no_grad():
        n = int(self.seen)
        self.seen.fill_(n + 1)
        weight = torch.ones_like(logits[0, 0]) * n
    return functional.cross_entropy(logits, label.clamp(min=0)) * weight


def written_by_a_decorated_method(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """As queues of contrastive losses are: read, and then written."""
    logits = self.head(self.features(x))
    known = logits * self.seen.clone().detach()
    loss = functional.cross_entropy(logits + known, label.clamp(min=0))
    self.enqueue(logits)
    return loss


def written_before_it_is_read(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """A queue that has the batch's own keys in it."""
    logits = self.head(self.features(x))
    self.enqueue(logits)
    known = logits * self.seen.clone().detach()
    return functional.cross_entropy(logits + known, label.clamp(min=0)) * self.seen


def centred(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """As DINO keeps the centre of what a teacher gives: nothing is decided, but a buffer is another one."""
    logits = self.head(self.features(x))
    target = (logits.detach() - self.seen).softmax(-1)
    with torch.no_grad():
        self.seen = 0.9 * self.seen + 0.1 * logits.detach().mean()
    return functional.cross_entropy(logits, target)


def normalised(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """As running statistics are written by hand."""
    logits = self.head(self.features(x))
    if self.training:
        mean = logits.mean()
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * mean)
    else:
        mean = self.seen
    return functional.cross_entropy(logits - self.scale * mean, label.clamp(min=0)) * self.seen


@pytest.mark.parametrize(
    "run",
    [
        centred,
        normalised,
        written_and_weighed,
        written_and_read,
        written_alone,
        written_by_a_decorated_method,
        written_before_it_is_read,
    ],
)
def test_a_buffer_that_is_written_goes_with_what_reads_it_and_with_the_loss(run: Callable[..., Any]) -> None:
    task = task_of(run)
    assert whole_ops(task) == ["loss"]
    assert task.ops[-1].changes == ("seen",) and "seen" in task.ops[-1].buffers
    plain = copy.deepcopy(task.root)
    assert isinstance(plain, Net)
    for batch in batches().values():
        x, label = batch["x"].float(), batch["label"]
        right = Net.forward(plain, x, label)
        known: dict[str, Any] = {"x": x, "label": label}
        for op in task.ops:
            found = task.op_module(op)(*(known[name] for name in (*op.fields, *op.inputs)))
            known.update(zip(op.outputs, found, strict=True) if op.outputs else {"loss": found}.items())
        torch.testing.assert_close(known["loss"], right, rtol=0, atol=1e-6)
        holder, name = place_of_buffer(task.op_module(task.ops[-1]), task.root, "seen")
        torch.testing.assert_close(holder._buffers[name], plain.seen, rtol=0, atol=1e-6)


@pytest.mark.parametrize("run", [written_and_weighed, written_by_a_decorated_method])
def test_a_check_in_other_numbers_leaves_the_buffer_that_is_written(run: Callable[..., Any]) -> None:
    """Each run of a check begins with the buffer as it was, whether it is written into or replaced."""
    task = task_of(run)
    loss = task.ops[-1]
    given = {"x": torch.randn(8, 3), "label": LABELS[:8]}
    given |= {name: torch.randn(task.values[name].shape) for name in loss.inputs}

    def computed(dtype: torch.dtype) -> float:
        inputs = [given[name] for name in (*loss.fields, *loss.inputs)]
        inputs = [each.to(dtype) if each.is_floating_point() else each for each in inputs]
        result = task.op_module(loss)(*inputs)
        assert result.dtype == dtype
        return float(result)

    before = computed(torch.float32)
    values = Values.of_op(task, loss, torch.float64)
    with values.held():
        twice = [computed(torch.float64)]
        values.start_anew()
        twice.append(computed(torch.float64))
    assert twice[0] == twice[1]
    assert computed(torch.float32) != before, "the buffer has gone on from what the first run left"


def test_a_buffer_that_an_operator_reads_too_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self, seen: Tensor) -> None:
            super().__init__()
            self.register_buffer("seen", seen)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.seen

    class Shares(Net):
        def __init__(self, run: Callable[..., Any]) -> None:
            super().__init__(run)
            self.reads = Reads(self.seen)

    def run(self: Shares, x: Tensor, label: Tensor) -> Tensor:
        loss = functional.cross_entropy(self.head(self.reads(self.features(x))), label.clamp(min=0))
        with torch.no_grad():
            self.seen.fill_(int(self.seen) + 1)
        return loss

    workload = Workload("w", [Task("t", Shares(run), 8, items())], operators=(Block, Reads))
    with pytest.raises(WorkloadError, match=r"forward writes into '.*seen' .*; it also reads it elsewhere"):
        analysed(workload)


def test_a_list_that_is_put_in_the_place_of_another_is_kept() -> None:
    """As weights of losses follow the losses of the last step."""

    class Weighs(Net):
        def __init__(self, run: Callable[..., Any]) -> None:
            super().__init__(run)
            self.before = [1.0, 1.0]

    def run(self: Weighs, x: Tensor, label: Tensor) -> Tensor:
        losses = self.losses(x, label)
        weights = [each / sum(self.before) for each in self.before]
        one, other = losses.mean(), losses.square().mean()
        self.before = [one.item(), other.item()]
        return weights[0] * one + weights[1] * other

    with pytest.raises(WorkloadError, match=r"an earlier forward has left in self\.before"):
        task_of(run, Weighs)


def test_a_teacher_that_torch_moves_is_said_to_be_declared() -> None:
    """An `AveragedModel` asks how often it was moved."""

    class Follows(Net):
        def __init__(self, run: Callable[..., Any]) -> None:
            super().__init__(run)
            self.teacher = AveragedModel(self.a).requires_grad_(False)

    def run(self: Follows, x: Tensor, label: Tensor) -> Tensor:
        self.teacher.update_parameters(self.a)
        return self.losses(x, label).mean() + self.teacher(self.first(x)).square().mean()

    with pytest.raises(
        WorkloadError, match=r"forward writes into '.*' in what runs as it is written"
    ) as error:
        task_of(run, Follows)
    assert "Follows(teacher, student, decay)" in str(error.value.hint)


def test_with_what_another_process_has_found_a_region_is_the_same() -> None:
    """What it writes into tells where it begins and ends."""

    def made() -> Workload:
        net = Net(written_by_a_decorated_method)
        return Workload("w", [Task("t", net, 8, items())], operators=(Block,))

    graph, memo = analyse_for_others(made())
    again = analyse(made(), AnalysisMemo.model_validate_json(memo.model_dump_json()))
    assert again.fingerprint == graph.fingerprint
    assert again.tasks["t"].ops[-1].changes == ("seen",)


def test_a_check_that_only_raises_is_left_out() -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.a(self.first(x))
        if torch.isnan(x).any():
            raise ValueError("no numbers")
        return functional.cross_entropy(self.head(self.c(self.b(x))), label.clamp(min=0))

    assert whole_ops(task_of(run)) == []


def test_a_number_for_the_log_keeps_the_layers_split() -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        loss = self.losses(x, label).mean()
        self.last = loss.item()
        return loss

    task = task_of(run)
    assert whole_ops(task) == ["loss"]
    assert not hasattr(task.root, "last")


def test_of_functions_that_each_build_makes_that_of_the_module_is_written_anew() -> None:
    def scaled_by(factor: float) -> Callable[..., Any]:
        def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
            loss = self.losses(x, label).mean()
            if label[0] >= 0:
                loss = loss * factor
            return loss

        return run

    other_build = scaled_by(3.0)
    task = task_of(scaled_by(2.0))
    assert whole_ops(task) == ["loss"]
    for batch in batches().values():
        check(task, batch)
    assert other_build.__code__ is task.root.run.__code__, "put back as it was"


def test_code_that_cannot_be_written_anew_is_refused() -> None:
    class Lambda(Net):
        forward = lambda self, x, label: self.losses(x, label).mean() * (2 if label[0] > 0 else 1)  # noqa: E731

    with pytest.raises(WorkloadError, match="depends on values that are known only when it runs"):
        task_of(by_count, Lambda)


def test_a_forward_that_fails_says_so() -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        if label[0] >= -5:
            raise KeyError("nothing there")
        return self.losses(x, label).mean()

    with pytest.raises(WorkloadError, match="depends on values that are known only when it runs"):
        task_of(run)


def test_what_goes_on_has_one_shape() -> None:
    """Nothing behind it gives one again but the loss, so that all of the rest runs whole."""

    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.a(self.first(x))
        rows = (label >= 0).nonzero().squeeze(1)
        x = self.b(x[rows])
        return x.square().sum() / 8

    assert whole_ops(task_of(run)) == ["loss"]
