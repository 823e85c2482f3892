"""Lists of pieces of attention: each key of each tile is in one piece, and long and short sequences have even ones."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from replicas.model.attention import triton
from replicas.model.attention.plan import ChunkGroup
from replicas.model.attention.triton import PieceBounds, TileShape, TritonBackend, WorkList, fixed_part_keys
from replicas.model.hardware.device import compute_capability
from testkit.model.paged_cases import KINDS, TOLERANCES, Case, Chunks, attention_outputs, largest_error

pytestmark = pytest.mark.rotated

CPU = torch.device("cpu")
TILE = TileShape(tokens=4, rows=16, keys=16, num_warps=4, num_stages=2)
LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 1000, 5000)


@dataclass(frozen=True)
class Piece:
    row: int
    position: int
    num_tokens: int
    table_row: int
    keys: range
    part_row: int


def planned(
    chunks: list[list[int]], tile: TileShape, window: int | None, num_parts: int, part_keys: int | None = None
) -> WorkList:
    fields = torch.tensor(chunks, dtype=torch.int32)
    num_tokens = sum(chunk[2] for chunk in chunks)
    group = ChunkGroup(fields, torch.zeros(1, 1, dtype=torch.int32), num_tokens, longest=5013)
    bounds = PieceBounds.even(group, tile.tokens, num_parts)
    if part_keys is not None:
        num_keys = group.longest if window is None else window + tile.tokens + tile.keys
        bounds = PieceBounds.fixed(group, tile.tokens, part_keys, num_keys)
    # Memory that nobody has written holds anything.
    pieces, split_tiles = (
        torch.full((size, 8), 77, dtype=torch.int32) for size in (bounds.num_pieces, bounds.num_split_tiles)
    )
    work = WorkList(pieces, split_tiles, bounds, num_parts, part_keys)
    triton._plan(work, group, tile, window)
    return work


def read(pieces: Tensor) -> list[Piece]:
    return [Piece(*some[:4], range(some[4], some[5]), some[6]) for some in pieces.tolist() if some[2] > 0]


def random_chunks(rng: random.Random) -> list[list[int]]:
    chunks, row = [], 0
    for index in range(rng.choice([1, 3, 40, 150])):
        num_tokens = rng.choice([0, 1, 1, 1, 4, 5, 13])
        chunks.append([row, rng.choice(LENGTHS) - 1, num_tokens, rng.choice([index, index, index, -1])])
        row += num_tokens
    return chunks


@pytest.mark.parametrize("seed", range(6))
def test_every_key_of_every_tile_is_in_one_piece(seed: int) -> None:
    rng = random.Random(seed)
    chunks, window = random_chunks(rng), rng.choice([None, 1, 30, 300])
    num_parts = rng.choice([0, 1, 7, 33, 200])
    work = planned(chunks, TILE, window, num_parts)
    tiles: dict[int, list[Piece]] = {}
    for piece in read(work.pieces):
        tiles.setdefault(piece.row, []).append(piece)
    expected = {
        row + offset: (position + offset, min(TILE.tokens, num_tokens - offset), table_row)
        for row, position, num_tokens, table_row in chunks
        for offset in range(0, num_tokens, TILE.tokens)
    }
    assert tiles.keys() == expected.keys()
    split_tiles = {split[0]: split[1:5] for split in work.split_tiles.tolist() if split[1] > 0}
    assert split_tiles.keys() == {row for row, pieces in tiles.items() if len(pieces) > 1}
    part_rows: list[int] = []
    for row, pieces in tiles.items():
        position, num_tokens, table_row = expected[row]
        assert {(piece.position, piece.num_tokens, piece.table_row) for piece in pieces} == {expected[row]}
        end = position + num_tokens if table_row >= 0 else 0
        begin = 0 if window is None or table_row < 0 else max(0, position + 1 - window) // TILE.keys * TILE.keys
        assert [key for piece in pieces for key in piece.keys] == list(range(begin, end))
        if len(pieces) == 1:
            assert pieces[0].part_row == -1
        else:
            assert split_tiles[row] == [num_tokens, pieces[0].part_row, len(pieces), 0]
            part_rows += [piece.part_row + token for piece in pieces for token in range(num_tokens)]
    assert sorted(part_rows) == list(range(len(part_rows))) and len(part_rows) <= work.bounds.num_part_rows


@pytest.mark.parametrize("seed", range(4))
def test_parts_at_fixed_positions_keep_to_their_bounds(seed: int) -> None:
    rng = random.Random(seed)
    chunks, window = random_chunks(rng), rng.choice([None, 1, 30, 64, 300])
    work = planned(chunks, TILE, window, 1, part_keys=64)
    pieces = read(work.pieces)
    assert all(piece.keys.start // 64 == (piece.keys.stop - 1) // 64 for piece in pieces if piece.keys)
    seen = {(piece.row, key) for piece in pieces for key in piece.keys}
    assert len(seen) == sum(len(piece.keys) for piece in pieces)
    for row, position, num_tokens, table_row in chunks:
        for token in range(num_tokens if table_row >= 0 else 0):
            end, tile_row = position + token + 1, row + token - token % TILE.tokens
            assert all((tile_row, key) in seen for key in range(0 if window is None else max(0, end - window), end))
    assert max((piece.part_row + piece.num_tokens for piece in pieces), default=0) <= work.bounds.num_part_rows


def test_one_long_sequence_among_short_ones_is_cut() -> None:
    chunks = [[row, length - 1, 1, row] for row, length in enumerate([1024] * 63 + [8192])]
    tile = TileShape(tokens=1, rows=16, keys=64, num_warps=4, num_stages=2)
    sizes = [len(piece.keys) for piece in read(planned(chunks, tile, None, num_parts=33).pieces)]
    assert max(sizes) <= 2 * 1024 + 256 < 8192 and sum(sizes) == 63 * 1024 + 8192


class RecordedLaunches:
    """In the place of a kernel: its launches do nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *_, **__: None


def test_no_launch_is_larger_than_a_gpu_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt in float32 has most pieces: its tiles have few tokens, and with fixed parts each has many parts."""
    kernels = RecordedLaunches()
    for name in ("write_kernel", "plan_kernel", "attend_kernel", "combine_kernel"):
        monkeypatch.setattr(triton, name, kernels)
    case = Case(heads=(8, 1)).of(((65_536 - 8192, 65_536),))
    attention_outputs(case, TritonBackend(132, compute_capability(CPU), part_keys=fixed_part_keys(65_536)), CPU)
    assert max(math.prod(grid) for grid in kernels.grids) > 65_535
    assert all(size <= 65_535 for grid in kernels.grids for size in grid[1:])


@pytest.mark.parametrize("num_processors", [0, 20, 300])
def test_sequences_of_very_unequal_length_equal_attention_by_definition(
    num_processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_MIN_PART_KEYS", 16)
    chunks: Chunks = ((0, 1), (700, 701), (63, 64), (64, 65), (2, 3), (130, 139), (0, 5))
    backend = TritonBackend(num_processors, compute_capability(CPU))
    for kind in ("window", "sinks"):
        case = KINDS[kind].of(chunks)
        assert largest_error(case, backend, CPU) < TOLERANCES[case.dtype]
