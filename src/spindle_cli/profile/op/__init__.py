"""Run one op alone: its time and its memory."""
