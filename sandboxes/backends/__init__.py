"""Interchangeable ways to isolate a sandbox, one file each, behind the contract in `base`."""
