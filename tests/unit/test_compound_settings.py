"""Settings of several numbers: their two forms mean the same, and a mistake is refused in words."""

import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from replicas.protocol import Auto, Band
from router.scaling.autoscaling import DownscaleDelay
from router.types import LatencyTargets
from serve_app.config import HeadwayConfig
from serve_app.settings.by_band import BandQueues, BandTargets, BandWaits, QueueLimit


@pytest.mark.parametrize(
    ("name", "text", "yaml", "expected"),
    [
        (
            "slo",
            "interactive=0.5/none, batch=60/2",
            {"interactive": [0.5, None], "batch": [60, 2.0]},
            BandTargets(interactive=LatencyTargets(0.5), batch=LatencyTargets(60.0, 2.0)),
        ),
        ("slo", "batch=5/auto", {"batch": [5, "auto"]}, BandTargets(batch=LatencyTargets(5.0, Auto.AUTO))),
        ("slo", "standard=none", {"standard": "none"}, BandTargets(standard=LatencyTargets())),
        ("max_queue", "batch=50/4e6", {"batch": [50, 4_000_000]}, BandQueues(batch=QueueLimit(50, 4_000_000))),
        ("max_wait_s", "interactive=2.5,batch=3600", {"interactive": 2.5, "batch": [3600]}, BandWaits(2.5, 60.0, 3600)),
        ("max_wait_s", "standard=none", {"standard": None}, BandWaits(standard=None)),
        ("downscale_delay_s", "120", 120, DownscaleDelay(120.0)),
        ("downscale_delay_s", "3/4.5", [3, 4.5], DownscaleDelay(3.0, 4.5)),
    ],
)
def test_both_forms_give_the_named_numbers_and_keep_the_others(name: str, text: str, yaml: Any, expected: Any) -> None:
    for given in (text, yaml, expected, str(expected)):
        assert getattr(HeadwayConfig.model_validate({name: given}), name) == expected
    again = HeadwayConfig.model_validate(HeadwayConfig.model_validate({name: text}).model_dump())
    assert getattr(again, name) == expected


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("slo", "interactive=0/1", "slo of interactive: ttft_s is 0; it must be a number above 0, or none"),
        ("slo", {"batch": [1, "soon"]}, "slo of batch: tpot_s is soon; it must be a number above 0, or none, or auto"),
        ("slo", "batch=auto/1", "slo of batch: ttft_s is auto; it must be a number above 0, or none"),
        ("max_wait_s", "batch=auto", "max_wait_s of batch: seconds is auto; it must be a number above 0, or none"),
        ("slo", "interactive=nan/1", "slo of interactive: ttft_s is nan"),
        ("slo", "interactive=1", "slo of interactive is `1`; it must be `ttft_s/tpot_s`"),
        ("slo", {"standard": [1, 2, 3]}, "slo of standard is `1/2/3`; it must be `ttft_s/tpot_s`"),
        (
            "slo",
            "urgent=1/2",
            "slo is `urgent=1/2`; it must name bands, each once, such as `interactive=ttft_s/tpot_s`",
        ),
        ("slo", "batch=1/2,batch=3/4", "it must name bands, each once"),
        ("slo", "none", "slo is `none`; it must name bands"),
        ("slo", None, "slo is `none`; it must name bands"),
        ("slo", [1, 2], "slo is `1/2`; it must name bands"),
        ("max_queue", "batch=1.5/2", "max_queue of batch: requests is 1.5; it must be a whole number of at least 1"),
        ("max_queue", "batch=1/0", "max_queue of batch: tokens is 0; it must be a whole number of at least 1"),
        ("max_queue", "batch=inf/1", "max_queue of batch: requests is inf; it must be a whole number of at least 1"),
        ("max_queue", "batch=none", "max_queue of batch: requests is none; it must be a whole number of at least 1"),
        ("max_wait_s", {"standard": -1}, "max_wait_s of standard: seconds is -1; it must be a number above 0, or none"),
        ("max_wait_s", 10, "max_wait_s is `10`; it must name bands, each once, such as `interactive=seconds`"),
        ("downscale_delay_s", -1, "downscale_delay_s: to_fewer_s is -1; it must be at least 0"),
        ("downscale_delay_s", "1/2/3", "downscale_delay_s is `1/2/3`; it must be a number of seconds, or two"),
        ("downscale_delay_s", "none", "downscale_delay_s is `none`; it must be a number of seconds, or two"),
    ],
)
def test_a_mistake_names_setting_band_value_and_limit(name: str, given: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        HeadwayConfig.model_validate({name: given})


def test_numbers_are_checked_in_code_too() -> None:
    with pytest.raises(ValueError, match="slo of batch: ttft_s is -1; it must be a number above 0, or none"):
        BandTargets(batch=LatencyTargets(-1.0))
    with pytest.raises(ValueError, match="max_queue of standard: requests is 0; it must be a whole number"):
        replace(BandQueues(), standard=QueueLimit(0, 1))
    with pytest.raises(ValueError, match="max_wait_s of interactive: seconds is 0"):
        BandWaits(0.0)


def test_each_band_has_its_limits() -> None:
    fields = {"max_queue": "standard=7/700,batch=8/800", "max_wait_s": "interactive=2,batch=99"}
    config = HeadwayConfig.model_validate(fields)
    bands = {
        band: (each.max_requests, each.max_tokens, each.max_wait_s) for band, each in config.flow_limits().bands.items()
    }
    assert bands == {
        Band.INTERACTIVE: (1024, 4_000_000, 2.0),
        Band.STANDARD: (7, 700, 60.0),
        Band.BATCH: (8, 800, 99.0),
    }
    assert config.engine_limits().max_queued_tokens == 4_000_000
