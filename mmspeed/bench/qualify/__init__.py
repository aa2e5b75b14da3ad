"""`mmspeed qualify`: one command that runs every kernel of a device against its oracle and measures its rates, swaps and steps.

rows.py         checks that run one after the other within a time limit, and the table of their outcomes
oracle.py       cases of attention, their float64 truth, and relative errors with the limits of each number type
kernels.py, sparse_kernels.py   dense, block, ring and sparse kernels, forward and backward, against it
operators.py    operators of language models, each implementation against its eager twin
rates.py, noise.py, swapping.py, steps.py       rates beside the peak, draws, swap and tiers, whole training steps
run.py          all of them on a device: `qualify`
bundle.py       the wheels that a machine without a package index needs for it: `make bundle`
"""
