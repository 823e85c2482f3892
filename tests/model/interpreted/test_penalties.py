"""The kernels of penalties and of log probabilities give the numbers of plain torch."""

import pytest

pytest.importorskip("triton")

import torch

from replicas.model.sampling import triton_penalties
from replicas.model.sampling.token_counts import IN_PROMPT, penalize_by_definition
from replicas.model.sampling.triton_logprobs import check_scores, scored
from replicas.model.sampling.triton_penalties import check_penalties, penalize


@pytest.mark.parametrize("vocab_size", [37, 1500])
def test_logits_are_those_of_plain_torch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 4 * torch.randn(9, vocab_size + 3, generator=generator)
    logits[2] = logits[2].round()
    logits[3, ::7] = -torch.inf
    counts = torch.randint(-20, 9, (7, vocab_size), generator=generator).clamp(min=0)
    counts[:, ::3] += IN_PROMPT
    rows, slots = torch.tensor([8, 2, 3, 0]), torch.tensor([5, 0, 6, 1])
    penalties = torch.rand(4, 3, generator=generator, dtype=torch.float64) * 2 - torch.tensor([0.0, 1.0, 1.0])
    expected, found = logits.clone(), logits.clone()
    penalize_by_definition(expected, rows, slots, penalties, counts.int())
    penalize(found, rows, slots, penalties, counts.int())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_top", [0, 5, 20])
def test_log_probabilities_are_those_of_plain_torch(max_top: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(max_top)
    logits = (4 * torch.randn(7, 2300, generator=generator)).to(dtype)
    logits[3, 40:] = -torch.inf
    chosen = torch.randint(0, 40, (7,), generator=generator)
    values, top_ids = scored(logits, chosen, max_top)
    expected = logits.float().log_softmax(dim=-1)
    ids = torch.cat([chosen[:, None], top_ids], dim=1)
    torch.testing.assert_close(values, expected.gather(1, ids), rtol=0, atol=1e-4)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :max_top]
    assert torch.equal(top_ids, order)
    logits[2, 2299] = torch.nan
    assert scored(logits, chosen, max_top)[0][2].isnan().all()
    assert check_scores(torch.device("cpu")) is None


def test_the_check_at_start_up_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_penalties(torch.device("cpu")) is None
    monkeypatch.setattr(triton_penalties, "penalize", lambda *_: None)
    fault = check_penalties(torch.device("cpu"))
    assert fault is not None and "differ" in fault
