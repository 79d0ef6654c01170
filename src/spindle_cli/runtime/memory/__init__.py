"""Memory of a device that is lent for a while."""
