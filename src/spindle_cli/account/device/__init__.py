"""One device: what it holds while its ops run."""
