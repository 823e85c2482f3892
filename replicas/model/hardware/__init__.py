"""The device and data type, huge pages, and the C++ kernels compiled for this processor.

Read `device.py` first. May import `replicas.errors`.
"""
