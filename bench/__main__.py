"""`make bench`: run every measurement that this machine can run."""

from __future__ import annotations

from bench import step_fairness

if __name__ == "__main__":
    step_fairness.main()
