"""Time: the clock that is passed as an argument, rates over a window, and the kernel's scheduling of processes.

Each module stands alone. May import nothing.
"""
