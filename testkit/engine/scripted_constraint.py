"""Constraint without a grammar: the allowed tokens are a function of those accepted so far."""

from __future__ import annotations

from replicas.protocol import GenerateRequest, Metric

VOCABULARY = 97


class ScriptedConstraint:
    """Constraint that allows a few tokens, others after each token, and is complete after some tokens.

    Its grammar is two numbers: how many tokens are allowed at most, and after how many the output is complete. About
    every second token is the only one allowed.
    """

    def __init__(self, grammar: str, accepted: tuple[int, ...] = ()) -> None:
        self._num_allowed, self._num_tokens = map(int, grammar.split())
        self.accepted = list(accepted)

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) >= self._num_tokens

    @property
    def error(self) -> str | None:
        return None

    def accept(self, token_id: int) -> None:
        if token_id not in self.allowed():
            raise ValueError(f"token {token_id} is not allowed")
        self.accepted.append(token_id)

    def allowed(self) -> list[int]:
        first = 7 * sum(self.accepted) + len(self.accepted)
        num_allowed = self._num_allowed if first % 4 < 2 else 1
        return sorted({(first + 13 * number) % VOCABULARY for number in range(num_allowed)})

    def forced_token_id(self) -> int | None:
        allowed = self.allowed()
        return allowed[0] if len(allowed) == 1 else None

    def fill_mask(self, mask: memoryview) -> None:
        mask[:] = bytes(len(mask))
        for token_id in self.allowed():
            mask[token_id // 8] |= 1 << token_id % 8


class ScriptedCompiler:
    """Compiler of scripted constraints."""

    def constraint_of(self, request: GenerateRequest) -> ScriptedConstraint:
        assert request.params.grammar is not None
        return ScriptedConstraint(request.params.grammar, request.output_token_ids)

    def metrics(self) -> tuple[Metric, ...]:
        return ()
