"""The supervisor that runs inside a sandbox as PID 1. Standard library only; relative imports only."""
