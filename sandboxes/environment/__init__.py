"""What sandboxes run in: the embedded environment (a directory that is mounted) and the image.

Above: `toolhost setup` builds; the bubblewrap backend loads; `doctor` asks for the status. Below: spec, errors, pip.
The image's half is `sandboxes.environment.image`, imported by those who have the docker SDK in hand.
"""

from sandboxes.environment.command import BuildFailed, Progress, Report, Step
from sandboxes.environment.embedded import (
    Environment,
    Mount,
    Status,
    build_environment,
    environment_status,
    load_environment,
)

__all__ = [
    "BuildFailed",
    "Environment",
    "Mount",
    "Progress",
    "Report",
    "Status",
    "Step",
    "build_environment",
    "environment_status",
    "load_environment",
]
