"""Errors of communicators: ranks make different calls, or a rank is lost."""

__all__ = ["CollectiveMismatch", "OUT_OF_MEMORY", "PeerFailed", "Refused"]

OUT_OF_MEMORY = 81  # exit code


class CollectiveMismatch(RuntimeError):
    """Ranks entered one collective with different calls, dtypes, sizes, ops, roots or names.

    Args:
        is_leader: whether this rank reports it; False where rank 0 of the same ranks raises the same error.
    """

    def __init__(self, message: str, is_leader: bool = True) -> None:
        super().__init__(message)
        self.is_leader = is_leader


class Refused(RuntimeError):
    """The system refused this rank shared memory or a thread. The job ends with `exit_code` and one line."""

    def __init__(self, message: str, exit_code: int = OUT_OF_MEMORY) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PeerFailed(RuntimeError):
    """Another rank failed or left while this one waited for it."""
