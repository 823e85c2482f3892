"""Chaos: mixed load on two raylets while parts are killed, stopped or damaged; `python -m bench.chaos --minutes 20`."""
