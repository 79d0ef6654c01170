"""Prove a program: shares no code with what derives it."""
