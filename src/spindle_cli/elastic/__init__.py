"""Go on with fewer devices: plan again for those that are left, and resume."""
