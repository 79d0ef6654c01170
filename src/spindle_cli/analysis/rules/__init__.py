"""How torch's operators treat the samples of a batch."""
