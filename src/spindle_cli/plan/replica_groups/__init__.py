"""Plans in which several replica groups of devices share out the same parameters, each among itself."""
