"""How a workload is trained, from the settings of its file: which samples a step reads (`batches.py`,
`items.py`, `data/`), which tasks run in it (`sampling.py`), in which precision (`precision.py`), and how its
parameters are updated (`optimizing/`).
"""
