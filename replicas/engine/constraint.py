"""Constraints of sequences' outputs, such as a grammar, as the engine knows them."""

from __future__ import annotations

from typing import Protocol

from replicas.protocol import GenerateRequest, Metric


class Constraint(Protocol):
    """Constraint of one sequence's output: the set of tokens that may come next.

    The set is a function of the accepted tokens alone. A sequence therefore continues after a preemption, or on another
    replica, as if nothing had happened.
    """

    @property
    def is_complete(self) -> bool:
        """True if no token may come next, except one that ends the sequence."""

    @property
    def error(self) -> str | None:
        """Reason why the set cannot be computed, for example a limit; None: there is none."""

    def accept(self, token_id: int) -> None:
        """Add the next output token.

        Raises:
            ValueError: the token may not come next.
        """

    def forced_token_id(self) -> int | None:
        """Return the only token that may come next; None: there are several, or it would take a mask to tell."""

    def fill_mask(self, mask: memoryview) -> None:
        """Write the set into `mask`, one bit for each token id, the lowest bit of a byte first.

        Threads call it for many sequences at once. After an error the mask may be anything.
        """


class ConstraintCompiler(Protocol):
    """Compiler of requests' constraints; threads call it beside the engine."""

    def constraint_of(self, request: GenerateRequest) -> Constraint:
        """Return the constraint of a request that has one, after the output that the request brings.

        Raises:
            ServingError: the constraint cannot be compiled, or forbids that output.
        """

    def metrics(self) -> tuple[Metric, ...]:
        """Return the compiler's metrics."""
