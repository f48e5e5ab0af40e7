"""What an operator decides about sessions. Frozen; the host fills it from its own settings.

Above: `manager` and its parts. Below: `spec`. Durations are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sandboxes.spec import SandboxSpec


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """See docs of each field; every default is the one that a small machine can live with."""

    spec: SandboxSpec = field(default_factory=SandboxSpec)

    # A call. A caller may ask for less than `timeout_s`, or for more, up to `max_timeout_s`.
    timeout_s: float = 120.0
    max_timeout_s: float = 3600.0
    grace_step_s: float = 2.0  # the ladder's step, as the agents are configured
    max_characters: int = 20_000
    max_waiting_calls: int = 32  # of one session

    # A session.
    idle_s: float = 20 * 60.0
    max_idle_s: float = 24 * 3600.0  # the most that a request may ask for with `ttl_s`
    lifetime_s: float = 24 * 3600.0
    grace_s: float = 30.0  # for a request's session whose connection went without cleaning up
    max_sessions: int = 64  # open sessions with a sandbox, and pooled sandboxes, in total
    max_sessions_per_principal: int = 64
    max_records: int = 10_000  # open sessions with or without a sandbox

    # Admission: how many calls may wait for a sandbox, and how long.
    max_waiting: int = 256
    queue_s: float = 30.0
    evict_after_s: float = 60.0  # a session that was idle for less is never evicted for another
    evict_retained_after_s: float = 10 * 60.0  # a retained one not for less than this

    # The warm pool.
    pool_size: int = 0

    # Engine calls: launching, ending, and everything else. A backend's own deadlines are shorter.
    launch_s: float = 60.0
    destroy_s: float = 100.0
    engine_s: float = 20.0

    # Sweeps.
    sweep_s: float = 1.0
    orphan_sweep_s: float = 60.0
    outcomes_kept_s: float = 24 * 3600.0  # texts of outcomes
    audit_s: float = 7 * 24 * 3600.0  # records of closed sessions

    # Where several hosts share sandboxes: how often each says that it lives.
    beat_s: float = 2.0

    health_kept_s: float = 5.0
    health_failed_kept_s: float = 1.0  # a failure: who mended it wants to see so
    health_s: float = 30.0  # of one check in all
    shutdown_s: float = 10.0  # for running calls to end, and again for sandboxes to go
    keep_on_shutdown: bool = True  # leave chosen and retained sessions' sandboxes for the next start
