"""Which part of what devices share out each of them has."""
