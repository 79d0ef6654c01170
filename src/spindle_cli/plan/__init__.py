"""`spindle_cli.plan`: a package, and the function of the library by that name."""

from spindle_cli.packages import make_callable

make_callable(__name__)
