"""Where the gateway keeps what must outlive a process: one contract, one file an implementation."""
