"""The watch over loader workers: one that dies or hangs ends the run with one line; opened by common."""

import contextlib
import signal
import threading

import common
from common import UserError, worker_died


def watched(batches, workers):
    """The items of a loader with its workers' misfortunes as one line.

    Short of memory, Python waits for a thread that never began, and no timeout of a loader ends that: an alarm does.
    Raises: UserError where a worker died, or none answers for common.LOADER_SECONDS and a little."""
    source = None
    while True:
        try:
            with alarm(common.LOADER_SECONDS + 30 if workers else 0):
                source = source or iter(batches)
                item = next(source)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:  # a worker's pipe may end, too
            if not workers or isinstance(error, RuntimeError) and "worker" not in str(error):
                raise
            raise UserError(worker_died(error)) from error
        yield item


@contextlib.contextmanager
def alarm(seconds):
    """Raises RuntimeError inside when that many seconds have passed; 0, or outside of the main thread: never."""
    main = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
    if not (seconds and main and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL):
        yield
        return
    def ring(*_):
        raise RuntimeError(f"no loader worker answered for {seconds:g} s")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
