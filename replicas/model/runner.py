"""The model runner: launches scheduled batches on one device, as steps whose results are pending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from replicas.engine.batch import ItemResult, ScheduledBatch, StepResults
from replicas.model.attention.gather import GatherAttention
from replicas.model.attention.interface import AttentionBackend
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.layer_groups import attention_by_group
from replicas.model.attention.state_torch import TorchStates
from replicas.model.batch.transfers import DeviceBuffer, DeviceToHostBuffer, PendingTensor, no_tokens
from replicas.model.cuda_graphs.graphs import GraphRunner
from replicas.model.hardware.device import cache_dtype_name
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.planner import FlatPass, PlannedStep, StepMessage, StepPlanner
from replicas.model.sampling.logprobs import PendingLogprobs, launch_logprobs
from replicas.model.sampling.masks import MaskMessage, RowMasks
from replicas.model.sampling.sampler import PendingTokens, SampledTokens, Sampler, SamplingPlan, sample_greedy
from replicas.model.sampling.token_counts import CountSlots, TokenCounts


@dataclass(slots=True)
class RunningStep:
    """Step whose forward passes have been launched."""

    sampling: SamplingPlan | None
    logits: Tensor | None
    """[num_rows, vocab_size], of the rows that sample, see `LoadedModel.logits`; None once they have been sampled."""
    greedy: SampledTokens | None
    on_device: DeviceBuffer
    to_host: DeviceToHostBuffer
    scores: list[PendingLogprobs]
    """Log probabilities of prompt tokens, for each pass that scores some."""
    pooled: PendingTensor | None
    """[num_items, hidden_size] float32: sums of the hidden states that are pooled; None: there are none."""
    tokens: PendingTokens | None = None


class TorchStep:
    """Launched step: `sample` launches the sampling of constrained sequences, `collect` waits for the results."""

    def __init__(self, planned: PlannedStep, running: RunningStep, sample: Callable[[], None]) -> None:
        self._planned = planned
        self._running = running
        self._launch_sampling = sample

    def sample(self) -> None:
        """Launch the sampling, unless that is done."""
        if self._running.logits is not None:
            self._launch_sampling()

    def collect(self) -> StepResults:
        """Wait for the step and return one result per item."""
        running = self._running
        assert running.logits is None, "the step has not been sampled"
        running.to_host.wait()
        return self._planned.read(running.tokens, running.scores, running.to_host, running.pooled)


class TorchModelRunner:
    """`ModelRunner` over a torch model, its KV cache and the sampler. One thread uses it.

    A launch plans a message and runs it. `run` and `sample` need nothing but messages: a second runner that gets the
    same ones from the first on computes the same.

    On a GPU a launch does not wait for the device. Sampled tokens stay on the device, where the next step reads them
    before the host has received them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        attention: AttentionBackend = GatherAttention,
        graphs: GraphRunner | None = None,
        counts: TokenCounts | None = None,
    ) -> None:
        """Make a runner. Batches that `graphs` has a shape for go there; all others use `attention`.

        `counts` has a slot for each running sequence; None: the host counts the tokens for penalties.
        """
        self._loaded = loaded
        self._cache = cache
        self._attention = attention
        self._states = loaded.port.recurrent.backend or TorchStates
        self.kernels: str = getattr(attention, "kernels", "")
        """Kernels that compute attention."""
        self._graphs = graphs
        self.counts_tokens = counts is not None
        """True if penalties need no token on the host."""
        slots = None if counts is None else CountSlots(*counts.table.shape)
        paddings = (None, None) if graphs is None else (graphs.padding(), graphs.sampling_padding())
        self.planner = StepPlanner(loaded, cache, paddings[0], slots, paddings[1])
        """Planner of the messages."""
        self._sampler = Sampler(counts)
        self._no_tokens = self._last_tokens = no_tokens(loaded.device)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that sequences can hold."""
        return self._cache.num_blocks

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each block table of a sequence, tokens; None: its layers see all tokens."""
        return tuple(group.window for group in self._cache.groups)

    @property
    def num_state_slots(self) -> int:
        """Number of slots for recurrent state that sequences can hold; 0: the model has none."""
        return 0 if self._cache.states is None else self._cache.states.num_slots

    @property
    def cache_dtype(self) -> str:
        """Number format of keys and values in the KV cache."""
        return cache_dtype_name(self._cache.dtype)

    @property
    def block_size(self) -> int:
        """Number of tokens in a block of the KV cache."""
        return self._cache.block_size

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one sequence."""
        return self._loaded.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model has."""
        return self._loaded.vocab_size

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        """Launch `batch`, wait for it and return one result per item."""
        step = self.launch(batch)
        step.sample()
        return list(step.collect())

    def launch(self, batch: ScheduledBatch) -> TorchStep:
        """Plan `batch` and launch its forward passes, and the sampling unless it is constrained."""
        with self.planner.running():
            planned = self.planner.plan(batch)
            running = self.run(planned.message)
        step = TorchStep(planned, running, partial(self._sample, planned, running))
        if not batch.is_constrained:
            step.sample()
        return step

    def _sample(self, planned: PlannedStep, running: RunningStep) -> None:
        with self.planner.running():
            self.sample(running, None if planned.masks is None else planned.masks.message())

    @torch.inference_mode()
    def run(self, message: StepMessage) -> RunningStep:
        """Launch the forward passes of a step. `sample` follows before the next step runs."""
        on_device, to_host = DeviceBuffer.of(message.words, self._last_tokens), DeviceToHostBuffer()
        rows: list[Tensor] = []
        scores: list[PendingLogprobs] = []
        greedy: SampledTokens | None = None
        pooled: PendingTensor | None = None
        if message.padded is not None:
            assert self._graphs is not None, "the step is padded, and the runner has no graphs"
            outputs = self._graphs.run(message.padded, on_device, message.num_new_blocks)
            rows.append(outputs.logits)
            greedy = outputs.greedy if not message.flat else None
        for flat in message.flat:
            logits, hidden = self._compute(flat, on_device)
            if flat.pooled is not None:
                assert hidden is not None, "the model has not called its output layer"
                pooled = to_host.add(_sums(hidden, flat.pooled.lengths))
            if flat.targets:
                scores.append(self._score(flat, logits, on_device, to_host))
                # The copy frees the logits of the pass's other rows.
                logits = logits[len(logits) - flat.num_rows :].clone()
            rows.append(logits)
        logits = rows[0] if len(rows) == 1 else torch.cat(rows)
        return RunningStep(message.sampling, logits, greedy, on_device, to_host, scores, pooled)

    @torch.inference_mode()
    def sample(self, step: RunningStep, masks: MaskMessage | None = None) -> None:
        """Launch the sampling of `step`, the last that runs; `masks` are those of all constrained rows."""
        self._last_tokens = self._no_tokens
        if step.sampling is not None:
            assert step.logits is not None
            with self._loaded.ops():
                placed = None if masks is None else masks.place(self._loaded.device)
                logits, cut = step.logits, self._loaded.cut_logits
                needs_all = placed is not None or not step.sampling.needs_highest_alone
                chosen = self._chosen(step.sampling, step, placed)
                if cut is not None and needs_all:
                    logits = cut.join(logits)
                elif cut is not None and chosen is None:
                    chosen = sample_greedy(logits, cut)
                step.tokens = self._sampler.launch(step.sampling, logits, chosen, step.on_device, step.to_host, placed)
            self._last_tokens = step.tokens.tokens
        step.logits = None
        step.to_host.close(self._loaded.device)

    def _chosen(self, plan: SamplingPlan, step: RunningStep, masks: RowMasks | None) -> SampledTokens | None:
        """Return the tokens that graphs choose; None: the sampler chooses them."""
        if plan.fixed is None:
            return step.greedy if plan.is_greedy and masks is None else None
        assert self._graphs is not None and step.greedy is not None, "the sampling is of a padded pass alone"
        return self._graphs.sample(plan, step.greedy, step.on_device, masks)

    def _compute(self, flat: FlatPass, on_device: DeviceBuffer) -> tuple[Tensor, Tensor | None]:
        """Return logits [num_rows, vocab_size] of the rows that the pass needs, and hidden states of those it pools."""
        inputs = flat.inputs.place(on_device)
        contexts = [self._attention(self._cache, of_group) for of_group in (inputs, *inputs.more)]
        attention = attention_by_group(self._cache.groups, contexts)
        states = None if self._cache.states is None else self._states(self._cache.states, inputs)
        rows = inputs.logits_rows
        if flat.pooled is not None:
            rows = torch.cat([on_device.ints(flat.pooled.rows), rows])
        with self._loaded.hidden.taken(len(rows) - len(inputs.logits_rows)) as taken:
            logits = self._loaded.logits(attention, inputs.input_ids, inputs.position_ids, rows, states)
        return logits, taken.states

    def _score(
        self, flat: FlatPass, logits: Tensor, on_device: DeviceBuffer, to_host: DeviceToHostBuffer
    ) -> PendingLogprobs:
        """Launch the log probabilities of the pass's prompt tokens."""
        with self._loaded.ops():
            scored, cut = logits[: len(flat.targets)], self._loaded.cut_logits
            scored = scored if cut is None else cut.join(scored)
            return launch_logprobs(scored, on_device.ints(flat.targets), flat.max_top, to_host)


def _sums(hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sums of successive rows, as many as `lengths` names each, [num_items, hidden_size] float32.

    A sum does not depend on other rows.
    """
    hidden = hidden.float()
    if len(hidden) == len(lengths):
        return hidden
    return torch.stack([part.sum(dim=0) for part in torch.split(hidden, list(lengths))])
