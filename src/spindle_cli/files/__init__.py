"""What one stage hands to the next: files with versions, and their parts."""
