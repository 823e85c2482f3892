"""`make bench`: run the measurements in `MEASUREMENTS`, or those named: `python -m bench peers baselines`.

Arguments after `--` go to each measurement.
"""

from __future__ import annotations

import subprocess
import sys

MEASUREMENTS = {
    "step": ("bench.engine.scheduler_step", "cost of an engine step outside the device"),
    "prefix": ("bench.engine.prefix_hit", "time to first token with and without a prefix hit"),
    "fairness": ("bench.engine.step_fairness", "effect of a long prefill on running decodes"),
    "target": ("bench.baselines.latency_target", "target_itl_ms under growing load"),
    "baselines": ("bench.baselines", "classic batchers compared with continuous batching"),
    "peers": ("bench.peers", "other engines on the same workload"),
}
"""Module and subject by name. Each runs in a process of its own; the quick ones come first."""


def main() -> int:
    """Run the measurements one after another, also after a failure; return non-zero if one failed."""
    arguments = sys.argv[1:]
    options = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    names = arguments[: arguments.index("--")] if "--" in arguments else arguments
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        known = "\n".join(f"  {name:10s} {meaning}" for name, (_, meaning) in MEASUREMENTS.items())
        print(f"no such measurement: {', '.join(unknown)}\n{known}", file=sys.stderr)
        return 2
    failed = []
    for name in names or MEASUREMENTS:
        module, meaning = MEASUREMENTS[name]
        print(f"== {name}: {meaning} (python -m {module})", flush=True)
        if subprocess.run([sys.executable, "-m", module, *options], check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
