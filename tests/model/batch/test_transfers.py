"""Numbers travel to a device together and come back when asked for."""

import math

import torch

from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, HostToDeviceBuffer, no_tokens

CPU = torch.device("cpu")


def test_numbers_arrive_as_they_were_sent() -> None:
    to_device = HostToDeviceBuffer()
    odd, nothing, real, large = (
        to_device.ints([3]),
        to_device.ints([]),
        to_device.floats([0.1, -math.inf, 1e300]),
        to_device.ints([2**62, -5]),
    )
    on_device = DeviceBuffer.of(to_device.words, no_tokens(CPU))
    assert [on_device.ints(span).tolist() for span in (odd, nothing, large)] == [[3], [], [2**62, -5]]
    assert on_device.floats(real).tolist() == [0.1, -math.inf, 1e300]
    assert all(span.start % 2 == 0 for span in (odd, nothing, real, large))


def test_nothing_can_be_sent() -> None:
    to_device = HostToDeviceBuffer()
    span = to_device.ints([])
    assert DeviceBuffer.of(to_device.words, no_tokens(CPU)).ints(span).shape == (0,)


def test_results_are_copies_of_that_moment() -> None:
    to_host, tensor = DeviceToHostBuffer(), torch.tensor([1, 2])
    pending = to_host.add(tensor)
    tensor.zero_()
    to_host.close(CPU)
    to_host.wait()
    assert to_host[pending].tolist() == [1, 2]
