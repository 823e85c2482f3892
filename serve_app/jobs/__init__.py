"""Asynchronous jobs and batches: accepted once, kept in a database, never lost.

Everything asynchronous is a batch of lines; a job is a batch of one. Read `records.py` for what there is, `tables.py`,
`batch_states.py` and `lease_rows.py` for how it stays true whatever dies, and `runtime.py` for the parts that work:
`lifecycle.py` (validating and closing), `worker.py` (running lines), `sweeper.py` (what is late or not needed).
Modules named `..._rows` are parts of transactions: their functions take a connection, and do not wait.
"""
