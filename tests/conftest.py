"""What holds for all tests."""

import signal

# Shells start jobs in the background with SIGINT ignored, and commands that tests interrupt would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
