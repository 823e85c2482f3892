"""Documents of schemas and tool calls whose replica is killed: complete, valid, and the same as undisturbed ones."""

import asyncio

import pytest

from bench.structured.structured_failover import all_streams
from serve_app.config import DEMO_MODEL_NAME
from testkit.model.compiled_kernels import need_kernels
from testkit.serving.served import serving, wait_for

pytestmark = pytest.mark.deep

NUM_STREAMS = 6
SETTINGS = "num_replicas=2 device=cpu num_threads=1 cpus_per_replica=0.5 max_num_seqs=12 load_poll_period_s=0.2"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_structured_streams_of_a_killed_replica_go_on_in_mid_document(dtype, tmp_path):
    if dtype == "bfloat16":
        need_kernels()  # They compute a row in one order, whatever is in the batch.
    with serving(tmp_path, f"MODEL={DEMO_MODEL_NAME}", f"ARGS={SETTINGS} dtype={dtype}") as app:
        wait_for(lambda: len(app.replicas()) == 2, "two replicas serve")
        calm, _ = asyncio.run(all_streams(app, kills=False, num_streams=NUM_STREAMS))
        stormy, num_hit = asyncio.run(all_streams(app, kills=True, num_streams=NUM_STREAMS))
    assert [(answer.number, answer.fault) for answer in (*calm, *stormy) if answer.fault is not None] == []
    assert num_hit > 0
    assert [answer.text for answer in stormy] == [answer.text for answer in calm]
