"""Command line that trains the demo model on the running interpreter's standard library, or evaluates a saved one.

    python -m testkit.demo_model.train train     trains on the CPU and writes weights, tokenizer and configuration
    python -m testkit.demo_model.train evaluate  prints held-out bits per byte, beside those of xz

A run is a fixed number of steps of 8192 tokens, in windows of 512 tokens, and of 2048 tokens for the last tenth.
Before its decay the learning rate is constant after the warm-up, and a step's windows do not depend on the number of
later steps. A checkpoint from before the last tenth and the decay can therefore be resumed with fewer steps in all: the
run ends like a shorter run from the start.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from replicas.demo import DIRECTORY
from testkit.demo_model.chats import chat_documents
from testkit.demo_model.corpus import Corpus, documents, load_corpus, standard_library
from testkit.demo_model.evaluation import evaluate
from testkit.demo_model.tokenization import END_OF_TEXT, MAX_CONTEXT_TOKENS, MESSAGE_END, VOCABULARY, train_tokenizer

STEP_TOKENS = 8192
SHORT_WINDOW_TOKENS = 512
LONG_SHARE = 0.1
WARMUP_STEPS = 40
DECAY_SHARE = 1 / 6
LIBRARY_REPEATS = 2
GREETING_REPEATS = 40
CHECKPOINT_STEPS = 40
MATRIX_LEARNING_RATE = 0.02
VECTOR_LEARNING_RATE = 0.004


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of one training run. `work` is the folder of the resumable state, `output` that of the model."""

    steps: int
    seed: int
    threads: int
    output: Path
    work: Path

    def window_tokens(self, step: int) -> int:
        """Return the length of the windows of one step, in tokens: 2048 in the last tenth of the steps."""
        is_short = step < self.steps - round(self.steps * LONG_SHARE)
        return SHORT_WINDOW_TOKENS if is_short else MAX_CONTEXT_TOKENS

    def learning_rate_scale(self, step: int) -> float:
        """Return the factor of the learning rates: linear warm-up, constant, linear decay to 0 after the last step."""
        decay_steps = round(self.steps * DECAY_SHARE)
        return min(1.0, (step + 1) / WARMUP_STEPS, (self.steps - step) / decay_steps)


class Trainer:
    """Trainer of float32 master weights, by Muon for matrices and AdamW for the rest.

    A bfloat16 copy of the weights computes every loss and gradient.

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
        loss.backward()
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


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a small Llama with random weights, whose generation stops at either end token."""
    token_ids = tokenizer.get_vocab()
    end_of_text = token_ids[END_OF_TEXT]
    ends = [end_of_text, token_ids[MESSAGE_END]]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=ends,
        pad_token_id=end_of_text,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=end_of_text, eos_token_id=ends, pad_token_id=end_of_text)
    return model


def packed_stream(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> Tensor:
    """Return all training documents in random order as one tensor [num_tokens] int64.

    An end-of-text token precedes each document.
    """
    library = [file for file in corpus.training if not file.is_test]
    tests = [file for file in corpus.training if file.is_test]
    texts = [text for file in library * LIBRARY_REPEATS + tests for text in documents(file)]
    rendered = [
        tokenizer.apply_chat_template(chat, tokenize=False) for chat in chat_documents(library, GREETING_REPEATS, seed)
    ]
    code_ids = tokenizer(texts, verbose=False)["input_ids"]
    chat_ids = tokenizer(rendered, verbose=False)["input_ids"]
    all_ids: list[list[int]] = code_ids + chat_ids
    random.Random(seed).shuffle(all_ids)
    separator = tokenizer.get_vocab()[END_OF_TEXT]
    stream = torch.tensor([token for ids in all_ids for token in (separator, *ids)])
    print(f"stream {len(stream)} tokens, of which chat {sum(map(len, chat_ids)) / len(stream):.1%}", flush=True)
    return stream


def step_windows(stream: Tensor, step: int, window_tokens: int, seed: int) -> Tensor:
    """Return the windows of one step, [STEP_TOKENS / window_tokens, window_tokens + 1].

    Each pass cuts the stream into windows from a random offset and visits them in random order, each at most once.
    """
    per_step = STEP_TOKENS // window_tokens
    steps_per_pass = (len(stream) - 2 * window_tokens) // window_tokens // per_step
    passes, step_of_pass = divmod(step, steps_per_pass)
    generator = torch.Generator().manual_seed(seed + 1000 * window_tokens + passes)
    offset = int(torch.randint(window_tokens, (1,), generator=generator))
    order = torch.randperm(steps_per_pass * per_step, generator=generator)
    chosen = order[step_of_pass * per_step : (step_of_pass + 1) * per_step]
    positions = offset + chosen[:, None] * window_tokens + torch.arange(window_tokens + 1)
    return stream[positions]


def checkpoint(trainer: Trainer, tokenizer: PreTrainedTokenizerFast, plan: Plan, steps_done: int) -> None:
    """Write the bfloat16 model and its tokenizer to `plan.output`, and the resumable state to `plan.work`."""
    trainer.model.config.dtype = torch.bfloat16
    trainer.model.save_pretrained(plan.output)
    tokenizer.save_pretrained(plan.output)
    plan.work.mkdir(parents=True, exist_ok=True)
    torch.save({"steps_done": steps_done, "trainer": trainer.state()}, plan.work / "state.pt")


def train(plan: Plan) -> None:
    """Run `plan`, from its last checkpoint if `plan.work` has one."""
    torch.manual_seed(plan.seed)
    torch.set_num_threads(plan.threads)
    corpus = load_corpus(standard_library())
    tokenizer = train_tokenizer(text for file in corpus.training for text in documents(file))
    stream = packed_stream(corpus, tokenizer, plan.seed)
    trainer = Trainer(new_model(tokenizer))
    first = 0
    if (plan.work / "state.pt").exists():
        saved = torch.load(plan.work / "state.pt", weights_only=True)
        trainer.restore(saved["trainer"])
        first = saved["steps_done"]
    started, recent = time.monotonic(), 0.0
    for step in range(first, plan.steps):
        window_tokens = plan.window_tokens(step)
        loss = trainer.step(step_windows(stream, step, window_tokens, plan.seed), plan.learning_rate_scale(step))
        recent = loss if step == first else 0.95 * recent + 0.05 * loss
        if (step + 1) % 10 == 0:
            rate = (step + 1 - first) * STEP_TOKENS / (time.monotonic() - started)
            print(f"step {step + 1}/{plan.steps} window {window_tokens} loss {recent:.3f} {rate:.0f} tok/s", flush=True)
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == plan.steps:
            checkpoint(trainer, tokenizer, plan, step + 1)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train and write the model")
    training.add_argument("--steps", type=int, default=960, help="updates of 8192 tokens (default: %(default)s)")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--threads", type=int, default=2)
    training.add_argument("--output", type=Path, default=DIRECTORY, help="folder of the model (default: %(default)s)")
    training.add_argument("--work", type=Path, default=Path("/tmp/headway-demo"), help="folder of the resumable state")
    measuring = commands.add_parser("evaluate", help="print held-out bits per byte beside xz's")
    measuring.add_argument("--model", type=Path, default=DIRECTORY, help="folder of the model (default: %(default)s)")
    arguments = vars(parser.parse_args())
    if arguments.pop("command") == "train":
        train(Plan(**arguments))
    else:
        evaluate(arguments["model"])


if __name__ == "__main__":
    main()
