"""`spindle init`: a workload file, a Python stub and a cluster file for a model that somebody has."""
