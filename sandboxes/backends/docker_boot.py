"""The first thing that runs in a container: takes the agent's configuration from its stdin, then becomes the agent.

Given to the image's Python as `-c` text with the arguments AGENT CHANNEL, never imported. The configuration holds the
nonce, so it comes neither as an argument nor in the environment (`docker inspect` shows both), and it leaves no file.
On stdin: its length as eight digits, then so many bytes. With the CHANNEL "attach", stdin goes on with frames.
"""

import os
import sys


def take(count: int) -> bytes:
    """Exactly so many bytes of stdin, and not one more."""
    taken = b""
    while len(taken) < count:
        piece = os.read(0, count - len(taken))
        if not piece:
            sys.exit("boot: the configuration is cut short")
        taken += piece
    return taken


def main(agent: str, channel: str) -> None:
    """Never returns while the sandbox lives."""
    configuration = take(int(take(8)))
    source, sink = os.pipe()
    os.write(sink, configuration)  # bounded by the host to what a pipe holds
    os.close(sink)
    if channel != "attach":
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.close(null)
    sys.argv = [agent, f"fd:{source}"]
    with open(agent, encoding="utf-8") as file:  # noqa: PTH123 - pathlib doubles the start time
        program = compile(file.read(), agent, "exec")
    exec(program, {"__name__": "__main__", "__file__": agent})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
