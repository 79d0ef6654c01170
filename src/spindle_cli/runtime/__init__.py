"""What one worker does: its share of a plan, step after step. Start reading at `worker.py`, then
`executor.py`.
"""
