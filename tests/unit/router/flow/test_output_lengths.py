"""How much output to expect of a request."""

from __future__ import annotations

import router.flow.output_lengths as module
from replicas.protocol import Band
from router.flow.output_lengths import OutputLengths
from testkit.router.simulated_replicas import request


def learnt(*lengths: int, tenant: str = "t", quantile: float = 0.7) -> OutputLengths:
    expected = OutputLengths(quantile)
    for length in lengths:
        expected.observe(tenant, Band.STANDARD, length)
    return expected


def test_before_anything_is_known_all_of_max_tokens_is_expected():
    assert OutputLengths().expect(request(max_tokens=77)) == 77


def test_the_quantile_of_what_the_tenant_had_is_expected():
    assert learnt(*range(1, 11)).expect(request(max_tokens=100)) == 8
    assert learnt(*range(1, 11), quantile=0.5).expect(request(max_tokens=100)) == 6
    assert learnt(5).expect(request(max_tokens=100)) == 5


def test_never_more_than_max_tokens_is_expected():
    assert learnt(500, 600, 700).expect(request(max_tokens=16)) == 16


def test_an_unknown_tenant_is_taken_for_the_bands_average_one():
    expected = learnt(10, 10, 10, tenant="known")
    assert expected.expect(request(tenant="unknown", max_tokens=100)) == 10
    assert expected.expect(request(tenant="unknown", max_tokens=100, band=Band.BATCH)) == 100


def test_tenants_do_not_blur_into_each_other():
    expected = learnt(5, tenant="brief")
    expected.observe("verbose", Band.STANDARD, 90)
    assert expected.expect(request(tenant="brief", max_tokens=100)) == 5
    assert expected.expect(request(tenant="verbose", max_tokens=100)) == 90


def test_what_cannot_stop_by_itself_uses_all_it_may():
    expected = learnt(3, 3, 3)
    assert expected.expect(request(max_tokens=50, ignore_eos=True)) == 50
    assert expected.expect(request(max_tokens=50, ignore_eos=True, stop=("x",))) == 3


def test_the_window_follows_a_change():
    expected = learnt(*[1000] * 500, *[10] * 64)
    assert expected.expect(request(max_tokens=4096)) == 10


def test_the_number_of_tenants_remembered_is_bounded():
    expected = OutputLengths()
    for number in range(module._MAX_KEYS + 100):
        expected.observe(f"tenant-{number}", Band.STANDARD, 7 + (number == 0))
    assert len(expected._lengths) <= module._MAX_KEYS
    assert expected.expect(request(tenant="tenant-0", max_tokens=100)) == 7, "forgotten: the band's average again"
