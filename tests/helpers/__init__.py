"""What tests of several packages build their cases from."""
