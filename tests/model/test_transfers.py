"""Numbers travel to a device together and come back when asked for."""

from __future__ import annotations

import math

import torch

from replicas.model.transfers import Inbox, Outbox

CPU = torch.device("cpu")


def test_numbers_arrive_as_they_were_sent() -> None:
    outbox = Outbox()
    odd, nothing, real, large = (
        outbox.ints([3]),
        outbox.ints([]),
        outbox.floats([0.1, -math.inf, 1e300]),
        outbox.ints(iter([2**62, -5])),
    )
    placed = outbox.send(CPU)
    assert placed.ints(odd).tolist() == [3]
    assert placed.ints(nothing).tolist() == []
    assert placed.floats(real).tolist() == [0.1, -math.inf, 1e300]
    assert placed.ints(large).tolist() == [2**62, -5]
    assert all(span.start % 2 == 0 for span in (odd, nothing, real, large))


def test_nothing_can_be_sent() -> None:
    outbox = Outbox()
    span = outbox.ints([])
    assert outbox.send(CPU).ints(span).shape == (0,)


def test_what_was_asked_for_is_what_the_tensor_was_then() -> None:
    inbox, tensor = Inbox(), torch.tensor([1, 2])
    letter = inbox.add(tensor)
    tensor.zero_()
    inbox.close(CPU)
    inbox.wait()
    assert inbox[letter].tolist() == [1, 2]
