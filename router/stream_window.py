"""Window of the streams between a replica and its caller: the results that the caller has not read yet."""

from __future__ import annotations

from typing import Any

MAX_UNREAD = 2
"""Results of a stream that the caller has not read: one travels while the one before is read."""
_STREAMING_METHODS = frozenset({"handle_request_with_rejection", "handle_request_streaming"})


class WindowedActor:
    """Handle of a replica's actor whose streams pause at `MAX_UNREAD` unread results.

    Ray has the option for it (`_generator_backpressure_num_objects`), but Serve 2.60 has no setting that gives it.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return _WindowedMethod(method) if name in _STREAMING_METHODS else method


class _WindowedMethod:
    def __init__(self, method: Any) -> None:
        self._method = method

    def options(self, **options: Any) -> Any:
        """Return the method with these options and the window."""
        return self._method.options(**options, _generator_backpressure_num_objects=MAX_UNREAD)


def with_window(replica: Any) -> Any:
    """Bound the streams of a replica of Serve's router; return the replica."""
    sender = replica._actor_replica_wrapper
    sender._actor_handle = WindowedActor(sender._actor_handle)
    return replica
