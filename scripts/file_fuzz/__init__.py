"""What `scripts/fuzz.py` is made of: whole files, damage to them, commands that read them."""
