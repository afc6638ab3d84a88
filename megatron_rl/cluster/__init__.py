"""Processes of one run: the run directory, starting and watching roles, agreement between trainer ranks."""
