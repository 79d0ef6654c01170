"""In which order devices run the forward and backward passes of placed slices."""
