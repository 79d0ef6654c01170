"""Schedules over several types of device, by many dispatches."""
