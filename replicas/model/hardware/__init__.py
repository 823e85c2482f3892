"""Hardware of a replica: its device and dtype, huge pages, and the C++ kernels compiled for its processor.

Read `device.py` first. May import `replicas.child_processes`, `replicas.errors`.
"""
