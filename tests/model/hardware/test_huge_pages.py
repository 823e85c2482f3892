"""Parameters in huge pages: the same numbers, shared as before, side by side in order."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from replicas.model.hardware.huge_pages import huge_zeros, move_to_huge_pages

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


def mapping_of(address: int) -> list[str]:
    """Return the lines of /proc/self/smaps about the part of this process's memory that holds `address`."""
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(number, 16) for number in part.split()[0].split("-"))
        if start <= address < end:
            return part.splitlines()
    raise AssertionError(f"{address:x} is not mapped")


def test_zeros_are_aligned_to_a_page_and_can_be_written():
    made = huge_zeros((3, 5, 7), torch.bfloat16)
    assert made.shape == (3, 5, 7) and made.dtype == torch.bfloat16 and made.is_contiguous()
    assert not made.any()
    assert made.data_ptr() % (2 * 2**20) == 0
    made.fill_(2.0)
    assert (made == 2.0).all()


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="the system has no huge pages to ask for")
def test_memory_is_of_the_kind_that_becomes_huge_pages():
    made = huge_zeros((4 * 2**20,), torch.uint8)
    made.fill_(1)
    head, *_, flags = mapping_of(made.data_ptr())
    assert head.split()[1] == "rw-p" and "/dev/zero" not in head
    assert flags.startswith("VmFlags:") and "hg" in flags.split()  # the kernel has been asked for them


def test_none_or_more_than_a_page_can_be_asked_for():
    assert huge_zeros((0, 4), torch.float32).shape == (0, 4)
    made = huge_zeros((3 * 2**20,), torch.float32)
    made[-1] = 1.0
    assert made.sum() == 1.0


def test_memory_outlives_the_tensor_it_was_made_with():
    part = huge_zeros((1024,), torch.int64)[10:12]
    part += 7
    assert part.tolist() == [7, 7]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.bias = nn.Parameter(torch.randn(5))
        self.numbers = nn.Parameter(torch.randint(-9, 9, (4, 3), dtype=torch.int8), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.empty = nn.Parameter(torch.empty(0, 6))
        self.head = nn.Linear(6, 11, bias=False)
        # The same memory under another Parameter, as a compiled linear layer over a tied embedding has it.
        self.head.weight = nn.Parameter(self.embedding.weight.detach())


def test_a_model_keeps_its_numbers_and_what_it_shares():
    model = _Tied()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    move_to_huge_pages(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name].detach(), value, rtol=0, atol=0)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_parameters_lie_side_by_side_in_order_and_at_cache_lines():
    model = _Tied()
    move_to_huge_pages(model)
    # In the order in which modules name them: a module's own before those of its children.
    addresses = [value.data_ptr() for value in (model.bias, model.numbers, model.embedding.weight)]
    assert addresses == sorted(addresses) and addresses[-1] - addresses[0] == 2 * 64
    assert all(address % 64 == 0 for address in addresses)


def test_a_part_of_another_parameter_is_moved_by_itself():
    model = nn.Module()
    model.whole = nn.Parameter(torch.arange(12.0))
    model.part = nn.Parameter(model.whole.detach()[:4])
    move_to_huge_pages(model)
    assert model.whole.tolist() == list(range(12)) and model.part.tolist() == [0.0, 1.0, 2.0, 3.0]
