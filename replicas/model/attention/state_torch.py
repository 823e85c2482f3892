"""Backend of recurrent state in plain torch, in float32. It runs on any device.

Positions are cut into blocks from the sequence's start. With S the state at a block's beginning, G_i the sum of the
decays of its tokens up to i, and u_i their updates (`RuleCall`), for tokens i of the block:

    u_i = beta_i (v_i - e^G_i S^T k_i - sum over j < i of e^(G_i - G_j) (k_i . k_j) u_j), or v_i without beta
    o_i = e^G_i S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i . k_j) u_j
    S'  = e^G S + sum over j of e^(G - G_j) k_j u_j^T

A block is always computed with the same shapes. The tokens of earlier steps come from the tail, and those that are not
there yet are zeros. So a token's numbers do not depend on the steps in which the block was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from replicas.model.attention.recurrent import ConvCall, RuleCall, by_rows
from replicas.model.attention.state_cache import LayerStates, StateCache
from replicas.model.batch.inputs import BatchInputs, Chunk


@dataclass(frozen=True, slots=True)
class _Convolution:
    """Plan of the convolutions of one width. Before the rows of each chunk stand those of the tokens before it."""

    before: Tensor  # [num_chunks, width - 1] int64: rows in the cache
    before_rows: Tensor  # [num_chunks * (width - 1)] int64
    token_rows: Tensor  # [num_tokens] int64
    kept_rows: Tensor  # [num_kept] int64: rows that go to the cache
    kept: Tensor  # [num_kept] int64: their places there


@dataclass(frozen=True, slots=True)
class _Round:
    """One block of each chunk that has so many."""

    chunks: Tensor  # [num_pieces] int64
    rows: Tensor  # [num_pieces, block_size] int64: rows in the flat batch; num_tokens: none
    in_tail: Tensor | None
    """[num_pieces, block_size] bool: tokens that earlier steps have computed; None: there are none."""
    sources: Tensor  # [num_pieces] int64: slots with these tokens
    full: Tensor | None  # [num_full] int64: pieces that end at a boundary; None: there are none
    partial: Tensor | None  # [num_partial] int64: pieces that end within a block; None: there are none
    targets: Tensor  # [num_partial] int64: slots that get their tails
    snapshots: Tensor  # [num_snapshots] int64: chunks whose state is stored after this round
    snapshot_slots: Tensor  # [num_snapshots] int64


class TorchStates:
    """Recurrent state of one forward pass."""

    def __init__(self, cache: StateCache, inputs: BatchInputs) -> None:
        self._cache = cache
        self._chunks = inputs.chunks
        self._num_tokens = inputs.input_ids.shape[1]
        chunks = inputs.chunks
        self._sources = self._ints([chunk.state.source for chunk in chunks])
        self._fresh = self._ints([index for index, chunk in enumerate(chunks) if chunk.start == 0])
        moved = [index for index, chunk in enumerate(chunks) if not self._is_in_place(chunk)]
        self._moved = self._ints(moved)
        self._moved_targets = self._ints([chunks[index].state.target for index in moved])
        self._convolutions: dict[int, _Convolution] = {}
        self._rounds: list[_Round] | None = None

    def convolve(self, call: ConvCall) -> Tensor:
        """Convolve the call's channels, after those of earlier steps; store what later steps need."""
        inputs, width = self._cache[call.layer].inputs, call.weight.shape[1]
        if width not in self._convolutions:
            self._convolutions[width] = self._convolution(width)
        plan = self._convolutions[width]
        stored = inputs.view(-1, inputs.shape[2])
        before = stored[plan.before]
        before[self._fresh] = 0
        rows = call.inputs.new_empty(self._num_tokens + before.shape[0] * (width - 1), inputs.shape[2])
        rows[plan.before_rows] = before.flatten(0, 1)
        rows[plan.token_rows] = call.inputs
        stored[plan.kept] = rows[plan.kept_rows]
        output = torch.zeros_like(call.inputs, dtype=torch.float32)
        for tap in range(width):
            output += rows[plan.token_rows - (width - 1 - tap)].float() * call.weight[:, tap].float()
        output = (output if call.bias is None else output + call.bias.float()).to(call.inputs.dtype)
        return by_rows(functional.silu, output) if call.has_silu else output

    def advance(self, call: RuleCall) -> Tensor:
        """Advance the states of the call's layer, block by block, and store them."""
        call = call.prepared()
        layer = self._cache[call.layer]
        if self._rounds is None:
            self._rounds = self._plan_rounds()
        states = layer.states[self._sources]  # [num_chunks, num_heads, key_size, value_size]
        states[self._fresh] = 0
        query, key, value, decay = (_with_zero_row(part) for part in (call.query, call.key, call.value, call.decay))
        beta = None if call.beta is None else _with_zero_row(call.beta)
        output = torch.empty_like(value)
        for step in self._rounds:
            rows = step.rows
            block = _Block(
                query[rows].transpose(1, 2).contiguous(),
                key[rows].transpose(1, 2).contiguous(),
                value[rows].transpose(1, 2).contiguous(),
                decay[rows].transpose(1, 2).contiguous(),
                None if beta is None else beta[rows].transpose(1, 2).contiguous(),
            )
            tail = torch.zeros_like(block.value)
            if step.in_tail is not None:
                tail = block.join(layer, step.sources, step.in_tail)
            updates, outputs, following = block.computed(states[step.chunks], tail)
            output[rows] = outputs.transpose(1, 2)
            if step.full is not None:
                states[step.chunks[step.full]] = following[step.full]
            if step.partial is not None:
                layer.keys[step.targets] = block.key[step.partial]
                layer.updates[step.targets] = updates[step.partial]
                layer.decays[step.targets] = block.decay[step.partial]
            if len(step.snapshots):
                layer.states[step.snapshot_slots] = states[step.snapshots]
        layer.states[self._moved_targets] = states[self._moved]
        return output[: self._num_tokens]

    def _is_in_place(self, chunk: Chunk) -> bool:
        """Return True if the chunk only adds rows to the tail of its slot."""
        is_within = chunk.start // self._cache.block_size == chunk.end // self._cache.block_size
        return is_within and chunk.start > 0 and chunk.state.source == chunk.state.target

    def _convolution(self, width: int) -> _Convolution:
        num_before, size = width - 1, self._cache.block_size
        num_stored = num_before + size
        before: list[list[int]] = []
        before_rows: list[int] = []
        token_rows: list[int] = []
        kept: list[int] = []
        kept_rows: list[int] = []
        for index, chunk in enumerate(self._chunks):
            # Row of the token at position 0. Rows of a chunk stand behind those of the chunks before it.
            origin = chunk.row + (index + 1) * num_before - chunk.start
            first = chunk.state.source * num_stored + chunk.start % size
            before.append(list(range(first, first + num_before)))
            before_rows += range(origin + chunk.start - num_before, origin + chunk.start)
            token_rows += range(origin + chunk.start, origin + chunk.end)
            boundary = chunk.end - chunk.end % size
            start = chunk.start if self._is_in_place(chunk) else boundary - num_before
            stored = [(start, chunk.end, boundary, chunk.state.target)]
            stored += [(position - num_before, position, position, slot) for position, slot in chunk.state.snapshots]
            for start, end, boundary, slot in stored:
                kept_rows += range(origin + start, origin + end)
                place = slot * num_stored + num_before - boundary
                kept += range(place + start, place + end)
        return _Convolution(
            self._ints(before),
            *map(self._ints, (before_rows, token_rows, kept_rows, kept)),
        )

    def _plan_rounds(self) -> list[_Round]:
        size = self._cache.block_size
        num_rounds = max(-(-chunk.end // size) - chunk.start // size for chunk in self._chunks)
        return [self._round(number) for number in range(num_rounds)]

    def _round(self, number: int) -> _Round:
        size, none = self._cache.block_size, self._num_tokens
        pieces: list[int] = []
        rows: list[list[int]] = []
        in_tail: list[list[bool]] = []
        full: list[int] = []
        partial: list[int] = []
        snapshots: list[int] = []
        slots: list[int] = []
        for index, chunk in enumerate(self._chunks):
            boundary = (chunk.start // size + number) * size
            if boundary >= chunk.end:
                continue
            low, high = max(chunk.start - boundary, 0), min(chunk.end - boundary, size)
            first = chunk.row + boundary - chunk.start
            rows.append([none] * low + list(range(first + low, first + high)) + [none] * (size - high))
            in_tail.append([True] * low + [False] * (size - low))
            (full if high == size else partial).append(len(pieces))
            pieces.append(index)
            for position, slot in chunk.state.snapshots:
                if position == boundary + size:
                    snapshots.append(index)
                    slots.append(slot)
        return _Round(
            self._ints(pieces),
            self._ints(rows),
            torch.tensor(in_tail, device=self._cache.device) if any(map(any, in_tail)) else None,
            self._ints([self._chunks[index].state.source for index in pieces]),
            self._ints(full) if full else None,
            self._ints(partial) if partial else None,
            self._ints([self._chunks[pieces[piece]].state.target for piece in partial]),
            self._ints(snapshots),
            self._ints(slots),
        )

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._cache.device, non_blocking=True)


@dataclass(slots=True)
class _Block:
    """Tokens of one block of some sequences, [num_pieces, heads, block_size, ...]; those that are missing are zeros."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None

    def join(self, layer: LayerStates, slots: Tensor, in_tail: Tensor) -> Tensor:
        """Add the keys and decays of the tokens in the tails of `slots`; return their updates."""
        mask = in_tail[:, None, :, None]
        self.key = torch.where(mask, layer.keys[slots], self.key)
        self.decay = torch.where(in_tail[:, None], layer.decays[slots], self.decay)
        return torch.where(mask, layer.updates[slots], 0.0)

    def computed(self, states: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's updates and outputs, and the states after it.

        `tail` has the updates of the tokens of earlier steps. All of these have zeros for query, value and beta.
        """
        size = self.key.shape[2]
        group = states.shape[1] // self.key.shape[1]
        query, key = (part.repeat_interleave(group, dim=1) for part in (self.query, self.key))
        sums = self.decay.cumsum(dim=-1)  # [num_pieces, num_heads, block_size]
        last = sums[..., -1:]
        since, until = torch.cat([sums, last - sums], dim=-1).exp().chunk(2, dim=-1)
        is_earlier = torch.ones(size, size, dtype=torch.bool, device=states.device).tril()
        between = (sums[..., :, None] - sums[..., None, :]).masked_fill(~is_earlier, -torch.inf).exp()
        updates = self.value + tail
        if self.beta is not None:
            strictly = (key @ key.transpose(2, 3)) * between * self.beta[..., None]
            known = self.beta[..., None] * (self.value - since[..., None] * (key @ states)) + tail
            # The diagonal is not read.
            updates = torch.linalg.solve_triangular(strictly, known, upper=False, unitriangular=True).contiguous()
        outputs = since[..., None] * (query @ states) + ((query @ key.transpose(2, 3)) * between) @ updates
        following = since[..., -1:, None] * states + (key * until[..., None]).transpose(2, 3) @ updates
        return updates, outputs, following


def _with_zero_row(rows: Tensor) -> Tensor:
    return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1))
