"""`make bench`: run the measurements that this machine can run, all or those named: `python -m bench peers baselines`.

What follows `--` goes to each of them.
"""

from __future__ import annotations

import subprocess
import sys

MEASUREMENTS = {
    "step": ("bench.scheduler_step", "what an engine step costs beside the device"),
    "prefix": ("bench.prefix_hit", "time to first token, prefix found or not"),
    "fairness": ("bench.step_fairness", "what a long prefill does to running decodes"),
    "target": ("bench.latency_target", "whether target_itl_ms holds while the load grows"),
    "baselines": ("bench.baselines", "the classic batchers beside continuous batching"),
    "peers": ("bench.peers", "other engines on the same workload"),
}
"""Each in a process of its own; the quick ones first."""


def main() -> int:
    """Run them one after the other, whatever became of those before; non-zero if one failed."""
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
