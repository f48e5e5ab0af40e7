"""Search providers behind one protocol, found by name in `registry`; `chain` asks them in order."""
