"""Trainer of the demo model: bfloat16 gradients, float32 weights, Muon for matrices and AdamW for the rest."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

MATRIX_LEARNING_RATE = 0.02
VECTOR_LEARNING_RATE = 0.004


class Trainer:
    """Trainer of float32 master weights. A bfloat16 copy computes every loss and gradient.

    Invariant between steps: each bfloat16 parameter of `model` is its rounded master.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self._working = list(model.parameters())
        self._masters = [parameter.detach().clone() for parameter in self._working]
        for parameter in self._working:
            # Convert only the parameters: the rotary buffers must stay float32.
            parameter.data = parameter.data.to(torch.bfloat16)
        embedding = model.get_input_embeddings().weight
        pairs = list(zip(self._working, self._masters, strict=True))
        matrices = [master for working, master in pairs if working.ndim == 2 and working is not embedding]
        others = [master for working, master in pairs if working.ndim != 2 or working is embedding]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=VECTOR_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._base_rates = [MATRIX_LEARNING_RATE, VECTOR_LEARNING_RATE]
        self._loss: Callable[[Tensor], Tensor] = torch.compile(self._plain_loss, dynamic=False)

    def _plain_loss(self, windows: Tensor) -> Tensor:
        """Return mean nats per token of `windows` [num_windows, window_tokens + 1] int64."""
        logits = self.model(windows[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def step(self, windows: Tensor, scale: float) -> float:
        """Make one update with the learning rates times `scale`; return the loss before it."""
        loss = self._loss(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        for working, master in zip(self._working, self._masters, strict=True):
            assert working.grad is not None
            master.grad = working.grad.float()
            working.grad = None
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        for optimizer, rate in zip(self._optimizers, self._base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
        self._round_masters()
        return loss.item()

    def _round_masters(self) -> None:
        for working, master in zip(self._working, self._masters, strict=True):
            working.data.copy_(master)

    def state(self) -> dict[str, Any]:
        """Return the weights and optimizer states, for `restore`."""
        return {"masters": self._masters, "optimizers": [optimizer.state_dict() for optimizer in self._optimizers]}

    def restore(self, state: dict[str, Any]) -> None:
        """Load the state that `state` returned in an earlier process."""
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._round_masters()
