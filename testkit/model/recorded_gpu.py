"""Stand-in for a GPU: torch's operations run late, in an order that streams and events allow, and are recorded.

Tensors of the device have memory of the CPU. A launch returns at once; its operation runs when the host waits for it,
or earlier by chance. Memory that nothing has written yet holds NaN or absurd integers. So a missing wait, or a buffer
that is overwritten before its reader has run, changes results.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
_ABSURD = -(2**40)
_CHANCE = 0.3
"""Probability that the device runs something at a launch."""


class HazardError(AssertionError):
    """Two accesses to the same memory, at least one a write, whose order is not certain."""


class WaitError(RuntimeError):
    """The host would wait for the device, or read from it, where it must not."""


@dataclass(eq=False)
class Operation:
    """Launched operation, its memory, and the operations that are certain to run before it."""

    name: str
    thread: int
    stream: Stream
    number: int
    """Number of the operation on its stream, from 1."""
    known: dict[Stream, int]
    """Number of operations of each stream that end before this one begins."""
    run: Callable[[], object]
    reads: list[Tensor]
    writes: list[Tensor]
    waits_for: Event | None = None


@dataclass(eq=False)
class Stream:
    """Queue of operations that run one after the other."""

    gpu: RecordedGpu
    name: str
    pending: deque[Operation] = field(default_factory=deque)
    num_launched: int = 0
    num_done: int = 0
    known: dict[Stream, int] = field(default_factory=dict)

    def wait_event(self, event: Event) -> None:
        """Let later operations wait for `event`."""
        self.gpu.launch("wait", lambda: None, [], [], stream=self, waits_for=event)
        _merge(self.known, event.known)

    def wait_stream(self, other: Stream) -> None:
        """Let later operations wait for those launched on `other` until now."""
        event = Event(self.gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Wait for all operations of the stream."""
        self.gpu.run_until(self, self.num_launched)


class Event:
    """Mark in a stream."""

    def __init__(self, gpu: RecordedGpu) -> None:
        self._gpu = gpu
        self.stream: Stream | None = None
        self.number = 0
        self.known: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark the operations that have been launched on `stream`."""
        self.stream = stream or self._gpu.current_stream()
        self.number = self.stream.num_launched
        self.known = {**self.stream.known, self.stream: self.number}

    def synchronize(self) -> None:
        """Wait for the marked operations."""
        assert self.stream is not None, "the event was not recorded"
        self._gpu.run_until(self.stream, self.number)
        _merge(self._gpu.host_known, self.known)


class Graph:
    """Captured operations, which read and write the same memory in each replay."""

    def __init__(self, gpu: RecordedGpu) -> None:
        self._gpu = gpu
        self.operations: list[Operation] = []

    def replay(self) -> None:
        """Launch all captured operations as one."""
        operations = self.operations
        assert operations, "the graph was not captured"
        self._gpu.replays.append((threading.get_ident(), self))
        reads = [tensor for operation in operations for tensor in operation.reads]
        writes = [tensor for operation in operations for tensor in operation.writes]
        self._gpu.launch("replay", lambda: [operation.run() for operation in operations], reads, writes)


class DeviceTensor(Tensor):
    """Tensor whose `memory` belongs to the recorded device."""

    memory: Tensor
    gpu: RecordedGpu
    device = property(lambda self: DEVICE)

    @staticmethod
    def of(memory: Tensor, gpu: RecordedGpu) -> DeviceTensor:
        """Return the tensor of the device with this memory."""
        with torch.inference_mode(False):  # Views of both kinds of tensors are made in inference mode.
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                DeviceTensor, memory.shape, strides=memory.stride(), storage_offset=memory.storage_offset(),
                dtype=memory.dtype,
            )  # fmt: skip
        made.memory, made.gpu = memory, gpu
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        gpu = next(leaf.gpu for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        return gpu.dispatch(func, args, kwargs or {})


class RecordedGpu(TorchDispatchMode):
    """Recorder of a device's operations. As a context it serves the operations of the present thread."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._default = Stream(self, "default")
        self.streams = [self._default]
        self._current = threading.local()
        self._capturing: Graph | None = None
        self._pinned: set[int] = set()
        self._open: list[Operation] = []
        self._sync_mode = "default"
        self._is_decomposing = False
        self.host_known: dict[Stream, int] = {}
        self.waits: list[str] = []
        """Reasons of the host's waits by other means than an event."""
        self.captures: list[tuple[int, Stream]] = []
        """Thread and stream of each captured graph."""
        self.replays: list[tuple[int, Graph]] = []
        self.names: set[str] = set()
        """Names of all launched operations."""
        self.total_bytes = 2**34

    # Operations

    def launch(
        self,
        name: str,
        run: Callable[[], object],
        reads: list[Tensor],
        writes: list[Tensor],
        stream: Stream | None = None,
        waits_for: Event | None = None,
    ) -> None:
        """Launch `run`, which reads and writes this memory, on the current stream or on `stream`."""
        stream = stream or self.current_stream()
        self.names.add(name)
        _merge(stream.known, self.host_known)
        if self._capturing is not None:
            assert waits_for is None, "a captured stream waits for another one"
            captured = Operation(name, threading.get_ident(), stream, 0, {}, run, reads, writes)
            self._capturing.operations.append(captured)
            return
        number = stream.num_launched + 1
        known = {**stream.known, stream: stream.num_launched}
        self._check(name, known, reads, writes)
        operation = Operation(name, threading.get_ident(), stream, number, known, run, reads, writes, waits_for)
        stream.num_launched = number
        stream.pending.append(operation)
        self._open.append(operation)
        if self._rng.random() < _CHANCE:
            self._run_next(self._rng.choice(self.streams), self._rng.randint(1, 40))

    def run_until(self, stream: Stream, number: int) -> None:
        """Run the operations of `stream` up to `number`, and those that they wait for."""
        while stream.num_done < number:
            event = stream.pending[0].waits_for
            if event is not None and event.stream is not None:
                self.run_until(event.stream, event.number)
            self._run_next(stream, 1)

    def _run_next(self, stream: Stream, num_operations: int) -> None:
        """Run up to `num_operations` of the stream, until one has to wait."""
        for _ in range(min(num_operations, len(stream.pending))):
            event = stream.pending[0].waits_for
            if event is not None and event.stream is not None and event.stream.num_done < event.number:
                return
            operation = stream.pending.popleft()
            with torch.inference_mode(), _disable_current_modes():
                operation.run()
            stream.num_done += 1

    def _check(self, name: str, known: dict[Stream, int], reads: list[Tensor], writes: list[Tensor]) -> None:
        """Raise HazardError if an earlier operation, not known to end before, touches what this one writes or reads."""
        self._open = [other for other in self._open if self.host_known.get(other.stream, 0) < other.number]
        for other in self._open:
            if other.number <= known.get(other.stream, 0):
                continue
            if _overlap(writes, other.reads) or _overlap(writes, other.writes) or _overlap(reads, other.writes):
                raise HazardError(f"{name} and {other.name} ({other.stream.name}) use the same memory in any order")

    # Tensors

    def to_device(self, tensor: Tensor) -> DeviceTensor:
        """Return a copy of `tensor` on the device, which is there at once."""
        return DeviceTensor.of(tensor.detach().clone(), self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Launch one of torch's operations on the device, or run one of the host."""
        asked = kwargs.get("device")
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_moved = asked is not None and torch.device(asked).type == "cuda"
        if not is_moved and not any(isinstance(leaf, DeviceTensor) for leaf in leaves):
            return self._on_host(func, args, kwargs, leaves)
        if func.namespace == "aten" and func.overloadpacket.__name__ in ("to", "_to_copy"):
            return self._convert(args[0], _named(func, args, kwargs))
        with self, self._decomposing():
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        if is_moved:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
            values = func(*args, **kwargs)
            made = _spoil(torch.empty_like(values))
            if "empty" not in func.overloadpacket.__name__:
                self.launch(str(func), lambda: made.copy_(values), [], [made])
            return DeviceTensor.of(made, self)
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self._wait("item")
            return func(args[0].memory)
        return self._compute(func, args, kwargs)

    @contextlib.contextmanager
    def _decomposing(self) -> Iterator[None]:
        """Let torch take an operation apart. Its parts name the CPU, which a wrapper tensor's own device is."""
        before, self._is_decomposing = self._is_decomposing, True
        try:
            yield
        finally:
            self._is_decomposing = before

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Tensor]) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        changed = [leaf for leaf in leaves if self._is_pinned(leaf)]
        if changed and not func.is_view:
            self._check(f"the host's {func}", self.host_known, changed, changed if func._schema.is_mutable else [])
        result = func(*args, **kwargs)
        if is_pinned:
            _spoil(result)
            pointer = result.untyped_storage().data_ptr()
            self._pinned.add(pointer)
            weakref.finalize(result.untyped_storage(), self._pinned.discard, pointer)
        return result

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _convert(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Move to the device or change the type, as `Tensor.to` does."""
        dtype = kwargs.get("dtype") or tensor.dtype
        asked = None if self._is_decomposing else kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cpu":
            self._wait("a copy to the host")
            moved: Tensor = _memory(tensor).to(dtype)
            return moved
        if isinstance(tensor, DeviceTensor) and dtype == tensor.dtype and not kwargs.get("copy"):
            return tensor
        made = DeviceTensor.of(_spoil(torch.empty_like(_memory(tensor), dtype=dtype)), self)
        return self._copy(made, tensor, bool(kwargs.get("non_blocking")))

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        on_host = [some for some in (target, source) if not isinstance(some, DeviceTensor) and some.dim() > 0]
        to, of = _memory(target), _memory(source)
        self.launch("copy", lambda: to.copy_(of), [of], [to])
        if on_host and not (non_blocking and self._is_pinned(on_host[0])):
            self._wait("a copy of memory that is not pinned")
        return target

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        memories = tree_map(_memory, (args, kwargs))
        if func.is_view:
            return tree_map(self._wrapped, func(*memories[0], **memories[1]))
        written = [
            value.memory
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        read = [leaf for leaf in tree_leaves(memories) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self.launch(str(func), lambda: func(*memories[0], **memories[1]), read, written)
            return args[0]
        meta = tree_map(_on_meta, memories)
        shapes = func(*meta[0], **meta[1])
        results = tree_map(lambda some: _spoil(_empty_as(some)) if isinstance(some, Tensor) else some, shapes)
        made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]

        def run() -> None:
            outputs = tree_leaves(func(*memories[0], **memories[1]))
            for result, output in zip(made, (leaf for leaf in outputs if isinstance(leaf, Tensor)), strict=True):
                result.copy_(output)

        self.launch(str(func), run, read, made)
        return tree_map(self._wrapped, results)

    def _wrapped(self, some: Any) -> Any:
        return DeviceTensor.of(some, self) if isinstance(some, Tensor) else some

    def _wait(self, reason: str) -> None:
        if self._sync_mode == "error" or self._capturing is not None:
            raise WaitError(reason)
        self.waits.append(reason)
        self.synchronize()

    # torch.cuda

    def current_stream(self, device: object = None) -> Stream:
        """Return the thread's current stream."""
        stream: Stream = getattr(self._current, "stream", self._default)
        return stream

    def new_stream(self, device: object = None) -> Stream:
        """Return a new stream."""
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Launch on `stream` within the context."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    @contextlib.contextmanager
    def capture(self, graph: Graph, pool: object = None, stream: Stream | None = None, **_: object) -> Iterator[None]:
        """Capture the operations of the context in `graph`, as `torch.cuda.graph` does."""
        stream = stream or self.new_stream()
        assert stream is not self._default, "the default stream cannot be captured"
        self.synchronize()
        self.captures.append((threading.get_ident(), stream))
        self._capturing = graph
        try:
            with self.on_stream(stream):
                yield
        finally:
            self._capturing = None

    def synchronize(self, device: object = None) -> None:
        """Wait for all operations."""
        for stream in self.streams:
            stream.synchronize()
            self.host_known[stream] = stream.num_launched

    def replacements(self) -> dict[str, object]:
        """Return what takes the place of the names in `torch.cuda`."""
        return {
            "Stream": self.new_stream, "Event": lambda *_, **__: Event(self), "CUDAGraph": lambda: Graph(self),
            "graph": self.capture, "graph_pool_handle": lambda: object(), "stream": self.on_stream,
            "current_stream": self.current_stream, "synchronize": self.synchronize, "is_available": lambda: True,
            "mem_get_info": lambda _=None: (self.total_bytes, self.total_bytes), "empty_cache": lambda: None,
            "memory_reserved": lambda _=None: 0, "max_memory_allocated": lambda _=None: 0,
            "reset_peak_memory_stats": lambda _=None: None, "get_device_capability": lambda _=None: (9, 0),
            "current_device": lambda: 0, "get_sync_debug_mode": lambda: self._sync_mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "_sync_mode", mode), "_lazy_init": lambda: None,
        }  # fmt: skip


def _merge(known: dict[Stream, int], more: dict[Stream, int]) -> None:
    for stream, number in more.items():
        known[stream] = max(known.get(stream, 0), number)


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments after the first by name."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}


def _memory(some: Any) -> Any:
    return some.memory if isinstance(some, DeviceTensor) else some


def _on_meta(some: Any) -> Any:
    if not isinstance(some, Tensor):
        return some
    return torch.empty_strided(some.shape, some.stride(), dtype=some.dtype, device="meta")


def _empty_as(meta: Tensor) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)


def _spoil(tensor: Tensor) -> Tensor:
    """Fill new memory with values that no computation survives."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    if tensor.dtype in (torch.int32, torch.int64):
        return tensor.fill_(_ABSURD if tensor.dtype is torch.int64 else -(2**30))
    return tensor


def _overlap(ones: list[Tensor], others: list[Tensor]) -> bool:
    spans = [_span(other) for other in others]
    return any(
        begin < other_end and other_begin < end for begin, end in map(_span, ones) for other_begin, other_end in spans
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses [begin, end) between a tensor's first and last element."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
