"""`make serve` as a program: its start, its end, its neighbours and its repair."""
