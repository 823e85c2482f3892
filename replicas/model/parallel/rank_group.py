"""Group of the ranks that compute one model together, and their collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo, distributed_c10d  # type: ignore[attr-defined]

from replicas.model.parallel.shares import Share

_TIMEOUT = timedelta(minutes=10)
"""Longest time of a collective. While a model is loaded, one rank may wait for another one for long."""
_MEETING_PERIOD_S = 0.02


class RankGroup:
    """Ranks of one model. All of them call the same methods, in the same order, with tensors of the same shapes.

    The collectives are those of NCCL between GPUs, where CUDA graphs capture them, and those of gloo between CPUs.
    """

    def __init__(
        self,
        share: Share,
        device: torch.device,
        meeting_file: Path,
        check: Callable[[], None] = lambda: None,
        *,
        shares_device: bool = False,
    ) -> None:
        """Join the group of the ranks that give the same new `meeting_file`, and wait for them.

        `check` is called while the rank waits, and ends the wait with an error. NCCL refuses ranks on the same GPU: if
        it `shares_device`, gloo's collectives go through the host.
        """
        self.share = share
        self.device = device
        store = FileStore(str(meeting_file), share.num_ranks)
        store.set_timeout(_TIMEOUT)
        _meet(store, share, check)
        self._uses_nccl = device.type == "cuda" and not shares_device
        self._group = (_nccl if self._uses_nccl else _gloo)(share, store)
        self.least(0)  # The first collective makes the connections.

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts, the same numbers on each rank; `part` may be overwritten."""
        part = part.contiguous()
        if self.share.num_ranks > 2 and not self._uses_nccl:
            # gloo's order of additions depends on the place in the tensor, so that a row could depend on others.
            return torch.stack(self._parts(part)).sum(dim=0)
        self._group.allreduce([part]).wait()
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Return the ranks' parts [..., size] next to each other, [..., num_ranks * size]."""
        return torch.cat(self._parts(part.contiguous()), dim=-1)

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers. The host waits for it."""
        numbers = torch.tensor([number], dtype=torch.int64, device=self.device)
        options = distributed_c10d.AllreduceOptions()
        options.reduceOp = distributed_c10d.ReduceOp(distributed_c10d.ReduceOp.MIN)
        self._group.allreduce([numbers], options).wait()
        return int(numbers.item())

    def all_true(self, verdict: bool) -> bool:
        """Return True if the verdict of every rank is true. The host waits for it."""
        return bool(self.least(int(verdict)))

    def are_equal(self, number: int) -> bool:
        """Return True if all ranks have the same number. The host waits for it."""
        return self.least(number) == -self.least(-number)

    def abort(self) -> None:
        """End a collective that waits for a rank that is lost. One of gloo ends by itself."""
        if self._uses_nccl:
            self._group.abort()

    def _parts(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.share.num_ranks)]
        self._group.allgather([parts], [part]).wait()
        return parts


def _meet(store: Any, share: Share, check: Callable[[], None]) -> None:
    """Wait until every rank is there."""
    names = [f"rank {rank}" for rank in range(share.num_ranks)]
    store.set(names[share.rank], "there")
    begun_s = time.monotonic()
    while not store.check(names):
        check()
        if time.monotonic() - begun_s > _TIMEOUT.total_seconds():
            raise TimeoutError(f"rank {share.rank} has waited for the others for {_TIMEOUT.total_seconds():.0f} s")
        time.sleep(_MEETING_PERIOD_S)


def _nccl(share: Share, store: Any) -> Any:
    """Return a group of NCCL of its own, so that a process can have several."""
    from torch.distributed import ProcessGroupNCCL  # Only torch for CUDA has it.

    options = ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return ProcessGroupNCCL(store, share.rank, share.num_ranks, options)


def _gloo(share: Share, store: Any) -> Any:
    """Return a group of gloo of its own, on this machine."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return ProcessGroupGloo(store, share.rank, share.num_ranks, options)
