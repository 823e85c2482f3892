"""Stand-in for `flash_attn_interface`, after its documentation, computed by definition: the package needs a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from replicas.model.attention.interface import Scoring
from testkit.model.paged_cases import attend_by_definition


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Return attention [total_q, heads, value_size]; the last queries of a sequence see all its keys.

    Shapes: `q` [total_q, heads, size], caches [num_pages, page_size, kv_heads, size].
    """
    for numbers in (cache_seqlens, page_table, cu_seqlens_q):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous()
    assert q.stride(-1) == 1 and causal and window_size[1] in (-1, 0)
    num_sequences = len(cache_seqlens)
    assert page_table.shape[0] == num_sequences == len(cu_seqlens_q) - 1
    assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q)
    output = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    for index in range(num_sequences):
        start, end, length = int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]), int(cache_seqlens[index])
        assert end - start <= max_seqlen_q
        keys, values = (part[page_table[index].long()].flatten(0, 1)[:length] for part in (k_cache, v_cache))
        window = None if window_size[0] < 0 else window_size[0] + 1
        scoring = Scoring(softmax_scale, softcap or None)
        output[start:end] = attend_by_definition(q[start:end], keys, values, scoring, window).to(q.dtype)
    return output
