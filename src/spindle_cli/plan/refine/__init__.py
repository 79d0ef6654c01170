"""The last stage of planning where memory is short: one search over allocations, cuts, devices, the order of
passes and recomputation, in compiled loops.
"""
