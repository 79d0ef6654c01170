"""The worker's parts on their own, with cases worked out by hand."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from runtime_toys import Items
from torch import fx, nn

from helpers.anything import Anything
from helpers.feeds import feed_of
from helpers.plans import two_towers
from spindle_cli.account.types import ParameterGroup
from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.communication.buckets import Bucket
from spindle_cli.runtime.communication.collectives import Members, add_up
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.rows import take_rows
from spindle_cli.runtime.measuring.comparison import Measured, RankReport, compare
from spindle_cli.runtime.measuring.timing import Activity
from spindle_cli.runtime.step.data import Portion, StepBatch
from spindle_cli.runtime.step.losses import LossAccumulator, step_failure
from spindle_cli.runtime.update.clip import GradientClip
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.training.batches import Batches
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.training.precision import constants_in
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import LossShares, ValueSpec
from spindle_cli.workload.types import Task

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_rows_of_samples_lie_along_the_batch_dimension() -> None:
    second = ValueSpec("v", (3, 8, 5), torch.float32, batch_dim=1, rows_per_sample=1, requires_grad=True)
    assert second.shape_of(4) == (3, 4, 5)
    held = torch.arange(60).view(3, 4, 5)  # samples 2 to 5
    assert torch.equal(take_rows(held, second, (2, 6), (3, 5)), held[:, 1:3])

    doubled = ValueSpec("v", (16, 5), torch.float32, batch_dim=0, rows_per_sample=2, requires_grad=True)
    assert doubled.shape_of(2) == (4, 5)
    held = torch.arange(20).view(4, 5)  # samples 2 and 3, two rows each
    assert torch.equal(take_rows(held, doubled, (2, 4), (3, 4)), held[2:])

    whole = ValueSpec("v", (5,), torch.float32, batch_dim=None, rows_per_sample=1, requires_grad=True)
    assert whole.shape_of(2) == (5,)
    held = torch.arange(5)
    assert take_rows(held, whole, (0, 8), (3, 4)) is held


def test_what_shares_have_of_a_loss_adds_up_and_counts_by_the_tasks_weight() -> None:
    task = Task("t", Anything(), 12, [], weight=0.5)
    accumulator = LossAccumulator([task], CPU, 5, {"t": LossShares(fx.Graph())})
    assert accumulator.arguments("t", (2, 5)) == (3 / 60,)  # three of five batches of twelve
    assert accumulator.seed("t") == 0.5
    accumulator.add("t", torch.tensor([0.25]))
    accumulator.add("t", torch.tensor(2.0))
    assert accumulator.total(accumulator.read(accumulator._sums).losses, 0) == 1.125


def test_a_loss_that_is_no_number_is_named_with_its_step() -> None:
    assert step_failure({"a": 1.0, "b": -2.0}, 7.0, 3) is None
    for norm in (None, math.nan):  # a norm that is no number follows from the loss
        failure = step_failure({"a": 1.0, "b": math.nan}, norm, 3)
        assert failure is not None
        assert "step 3: the loss of b is nan" in failure.message


def test_gradients_whose_norm_is_no_number_are_named_with_their_step() -> None:
    failure = step_failure({"a": 1.0}, math.inf, 3)
    assert failure is not None
    assert "step 3: the norm of the gradients is inf, though every loss is finite" in failure.message


def test_gradients_are_views_of_their_bucket_and_unreached_parameters_have_none(alone: None) -> None:
    reached, unreached = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))
    bucket = Bucket({"reached": reached, "unreached": unreached}, Members(1, 0, None))
    for _ in range(2):
        (reached * 2).sum().backward()
        assert reached.grad is not None
        assert reached.grad.untyped_storage().data_ptr() == bucket._flat.untyped_storage().data_ptr()
        bucket.start_sum()
        bucket.finish_sum()
        assert torch.equal(reached.grad, torch.full((2, 3), 2.0))
        assert unreached.grad is None
        bucket.reset()
        assert torch.equal(reached.grad, torch.zeros(2, 3))


def test_a_parameter_of_one_rank_keeps_a_gradient_of_its_own(alone: None) -> None:
    own = nn.Parameter(torch.ones(2))
    group = ParameterGroup(0, (0,), (("own", 0),), 8, 8, slices=(0,), first_ops=(0,), fragment=(0, 1))
    parameters = {"own": own, "not trained": nn.Parameter(torch.ones(2), requires_grad=False)}
    pool = GradientPool((group,), parameters, Communicators((), 10), rank=0)
    assert [(owned.name, owned.part, owned.counted) for owned in pool.owned_ranges] == [("own", None, True)]
    own.sum().backward()
    pool.finish()
    assert own.grad is not None
    assert torch.equal(own.grad, torch.ones(2))
    pool.reset()
    assert own.grad is None


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "RMSprop", "Rprop"])
def test_optimizers_are_found_by_name(name: str) -> None:
    optimizer = make_optimizer(
        TrainSettings(optimizer=name, lr=0.1).choices[0], [nn.Parameter(torch.ones(2, 2))]
    )
    assert type(optimizer).__name__ == name
    assert make_optimizer(TrainSettings(optimizer=name).choices[0], []) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "LBFGS"}, "'LBFGS' cannot be used"),
        ({"optimizer": "SparseAdam"}, "sparse gradients only"),
        ({"optimizer": "Adamw"}, "Did you mean AdamW"),
        ({"optimizer": "nn"}, "no optimizer 'nn'"),
        ({"optimizer": "SGD", "optimizer_args": {"beta": 1}}, "does not take .*beta"),
        ({"optimizer": "AdamW", "optimizer_args": {"betas": [2, 2]}}, "Invalid beta"),
    ],
)
def test_other_optimizers_are_refused_with_what_to_do(settings: dict[str, object], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        make_optimizer(TrainSettings.model_validate(settings).choices[0], [nn.Parameter(torch.ones(2, 2))])
    assert re.search(message, str(caught.value))


def test_gradients_are_clipped_by_the_norm_of_all_of_them(alone: None) -> None:
    """(3, 4) counted here, (12, 12) counted by another rank: the norm is 5, and both are scaled by 2 / 5."""
    counted, copy, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    counted.grad, copy.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0, 12.0])
    owned_ranges = [OwnedRange("counted", None, counted), OwnedRange("copy", None, copy, counted=False)]
    clip = GradientClip(2.0, [*owned_ranges, OwnedRange("unused", None, unused)])
    assert float(clip.clip(clip.squares(CPU))) == 5.0
    assert torch.allclose(counted.grad, torch.tensor([1.2, 1.6]))
    assert torch.allclose(copy.grad, torch.tensor([4.8, 4.8]))
    assert unused.grad is None
    assert float(clip.clip(clip.squares(CPU))) == pytest.approx(2.0)  # small enough now: left as they are
    assert torch.allclose(copy.grad, torch.tensor([4.8, 4.8]))


def make_batches(dataset: object) -> dict[str, Batches]:
    return {"t": Batches(Task("t", Anything(), 6, dataset), seed=0)}


def test_the_feed_loads_only_its_samples_and_gives_steps_in_order() -> None:
    class Counted(Items):
        def __init__(self) -> None:
            super().__init__(("image", "label"), 12, 0)
            self.taken: list[int] = []

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            self.taken.append(index)
            return super().__getitem__(index)

    dataset = Counted()
    batches = make_batches(Items(("image", "label"), 12, 0))
    portion = Portion("t", (2, 5), ("image",))
    feed = feed_of(make_batches(dataset), (portion,), range(4), torch.float64)
    # All are taken first: what the feed reads beside a thread that draws it reads again.
    images = [feed.take().fields("t", (3, 5), ("image",))["image"] for _ in range(4)]
    for step, image in enumerate(images):
        expected = batches["t"].rows(step, 3, 5, ["image"])["image"]
        assert torch.equal(image, expected.double())
    assert dataset.taken == [index for step in range(4) for index in batches["t"].indices(step)[2:5]]


def test_the_feeds_errors_say_what_was_being_loaded() -> None:
    class Failing(Items):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            raise OSError("the disk is gone")

    portion = Portion("t", (2, 5), ("image",))
    batches = make_batches(Failing(("image",), 12, 0))
    feed = feed_of(batches, (portion,), range(1))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        feed.take()
    assert caught.value.__notes__ == [
        f"at sample {batches['t'].indices(0)[2]} of the dataset",
        "while loading samples 2 to 4 of task 't', step 1",
    ]


def test_a_dataset_that_ends_its_thread_is_not_waited_for() -> None:
    """The first batch is read by the thread that trains, the others ahead of it by another one."""

    class Leaving(Items):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if threading.current_thread() is not threading.main_thread():
                sys.exit(0)
            return super().__getitem__(index)

    portion = Portion("t", (2, 5), ("image",))
    feed = feed_of(make_batches(Leaving(("image",), 12, 0)), (portion,), range(2))
    feed.take()
    with pytest.raises(SystemExit):
        feed.take()


def test_the_feed_waits_for_nobody_when_closed() -> None:
    feed = feed_of(make_batches(Items(("image",), 12, 0)), (Portion("t", (0, 6), ("image",)),), range(10**6))
    feed.take()
    feed.close()
    assert feed._thread is not None
    feed._thread.join(timeout=120)
    assert not feed._thread.is_alive()


class Drawn(Items):
    """Adds noise to one field, from some sample on, and says in which thread each was read."""

    def __init__(self, first_drawn: int = 0) -> None:
        super().__init__(("image", "label"), 12, 0)
        self.first_drawn = first_drawn
        self.threads: list[str] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.threads.append(threading.current_thread().name)
        item = super().__getitem__(index)
        if index >= self.first_drawn:
            item["image"] = item["image"] + torch.randn(())
        return item


@pytest.mark.parametrize("first_drawn", [0, 8])
def test_what_draws_is_what_a_plain_run_reads_and_leaves_the_models_draws_alone(first_drawn: int) -> None:
    torch.manual_seed(3)
    undisturbed = [torch.rand(2) for _ in range(4)]
    torch.manual_seed(3)
    feed = feed_of(make_batches(Drawn(first_drawn)), (Portion("t", (2, 5), ("image",)),), range(4))
    plain = make_batches(Drawn(first_drawn))["t"]
    for step in range(4):
        assert torch.equal(
            feed.take().fields("t", (2, 5), ("image",))["image"], plain.rows(step, 0, 6)["image"][2:5]
        )
        assert torch.equal(torch.rand(2), undisturbed[step])


def test_only_the_main_thread_reads_what_draws() -> None:
    dataset = Drawn()
    feed = feed_of(make_batches(dataset), (Portion("t", (0, 6), ("image",)),), range(4))
    for _ in range(4):
        feed.take()
    assert set(dataset.threads) == {"MainThread"}


def test_nobody_reads_ahead_where_the_type_of_constants_changes_meanwhile() -> None:
    """torch's default type is the whole process's: another thread's samples would be made in the passes'."""

    class Constant(Items):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            time.sleep(0.005)
            return {"image": super().__getitem__(index)["image"] * torch.full((1,), 0.1)}

    portion = Portion("t", (0, 6), ("image",))
    dataset = Constant(("image",), 12, 0)
    feed = feed_of(make_batches(dataset), (portion,), range(3), torch.float64, reads_ahead=False)
    plain = make_batches(dataset)["t"]
    for step in range(3):
        expected = plain.rows(step, 0, 6)["image"].double()
        assert torch.equal(feed.take().fields("t", (0, 6), ("image",))["image"], expected)
        with constants_in(torch.float64):
            time.sleep(0.05)  # long enough for a thread to read the next


def test_a_batch_hands_out_views_of_the_portion_that_covers_the_samples() -> None:
    image = torch.arange(12).view(4, 3)
    batch = StepBatch({Portion("t", (4, 8), ("image",)): {"image": image}})
    found = batch.fields("t", (5, 7), ("image",))["image"]
    assert torch.equal(found, image[1:3])
    assert found.untyped_storage().data_ptr() == image.untyped_storage().data_ptr()


@pytest.mark.parametrize(("dtype", "count"), [("float32", 2), ("float32", 3), ("bfloat16", 4)])
def test_parts_are_added_up_in_order_and_rounded_once(dtype: str, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(count, 1000, generator=generator).to(getattr(torch, dtype))
    out = torch.empty_like(parts[0])
    add_up(parts, out)
    expected = parts[0].to(torch.float32)
    for part in parts[1:]:
        expected = expected + part.to(torch.float32)
    torch.testing.assert_close(out, expected.to(parts.dtype), rtol=0, atol=0)


def test_a_slice_takes_as_long_as_its_slowest_device() -> None:
    _, plan = two_towers()
    vision = [index for index, piece in enumerate(plan.slices) if piece.metaop == "pairs/vision"]
    ranks = [{(Activity.FORWARD, index): 1.0 + rank for index in vision} for rank in range(4)]
    for rank in ranks:
        rank[Activity.WAIT, None] = 0.5
    steps = [Measured(each, plan.predicted.iteration_s) for each in (9.0, 4.0, 2.0, 3.0)]
    found = compare(plan, steps, [RankReport(rank, 0.0) for rank in ranks], None)
    assert found.iteration.measured_s == 3.0
    assert found.steps == 3
    times = {metaop.metaop: metaop for metaop in found.metaops}["pairs/vision"]
    assert times.forward is not None
    # 3 ops on 2 devices at 1 s and 1 op on 4 devices at 0.6 s, a third of it forward.
    assert times.forward.predicted_s == pytest.approx(3.6 / 3)
    assert times.predicted_s == pytest.approx(3.6)
    assert times.forward.measured_s == 2.0 + 4.0  # rank 1 is the slowest of (0, 1), rank 3 of all four
    assert found.devices[3].compute_s == 8.0
    assert found.devices[3].wait_s == 0.5
