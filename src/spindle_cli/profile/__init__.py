"""From a workload to its profile: measured on the device at hand, or estimated from published peaks.

Reading order: `types.py` (the file), `jobs.py` (what has to be timed, each once), `measure.py` and
`worker.py` (timing it), `estimate.py` (or computing it), `assemble.py` (putting the curves together),
`fit.py`.
"""

from spindle_cli.packages import make_callable

make_callable(__name__)
