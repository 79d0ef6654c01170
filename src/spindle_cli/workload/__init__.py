"""What a user declares: tasks over plain modules (`types.py`), the workload file (`file.py`, `settings/`),
how one is built from the other (`building/`), and the graph that it is analysed into (`graph.py`).
"""
