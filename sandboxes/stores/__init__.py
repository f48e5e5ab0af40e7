"""Interchangeable places for session records and receipts, one file each, behind the contract in `base`."""
