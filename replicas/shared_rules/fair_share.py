"""Fair share of a replica's slots, by which its engine and the routers decide which tenant yields a slot."""

from __future__ import annotations


def fair_share(num_slots: int, num_tenants: int) -> int:
    """Return the slots that each of `num_tenants` tenants keeps while others wait; at least one."""
    return max(1, num_slots // num_tenants)
