"""Plans in which several teams of devices share out the same parameters, each among itself."""
