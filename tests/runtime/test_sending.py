"""What is sent is kept until it has left, and no longer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from spindle_cli.runtime.communication.transfers import Batch, Sending


@dataclass
class Work:
    """A message; `ended` as NCCL's works know it."""

    ended: bool = False
    waited: int = 0

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.waited += 1


def batch_of(*works: Work) -> Batch:
    batch = Batch()
    batch._works = list(works)  # type: ignore[arg-type]  # what `start` keeps of torch's
    return batch


def sent(sending: Sending, *works: Work) -> weakref.ref[Tensor]:
    """Send a tensor that nobody else keeps; what is left of it."""
    tensor = torch.zeros(1)
    sending.add(batch_of(*works), [tensor])
    return weakref.ref(tensor)


def test_what_has_left_is_let_go_of_when_the_next_is_sent() -> None:
    sending, first, second = Sending(), Work(), Work()
    one = sent(sending, first)
    two = sent(sending, second)
    assert one() is not None
    first.ended = True
    three = sent(sending, Work())
    assert (one(), two() is not None, three() is not None) == (None, True, True)
    assert first.waited == 0


def test_a_batch_is_kept_until_all_of_its_messages_and_those_before_have_left() -> None:
    sending, late = Sending(), Work()
    one = sent(sending, Work(ended=True), late)
    two = sent(sending, Work(ended=True))
    sending.let_go()
    assert None not in (one(), two())
    late.ended = True
    sending.let_go()
    assert (one(), two()) == (None, None)


def test_at_the_end_all_are_waited_for() -> None:
    """gloo's works do not say that they are through."""
    sending, work = Sending(), Work()
    one = sent(sending, work)
    sending.finish()
    assert (one(), work.waited) == (None, 1)
    sending.finish()
    assert work.waited == 1
