def prune() -> None:
    """x"""
