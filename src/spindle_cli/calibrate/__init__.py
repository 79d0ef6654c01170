"""Corrects a profile by what runs have measured."""
