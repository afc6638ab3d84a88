"""Verifiers of a user as the tests of the reward pool need them; loaded by worker processes as `module:function`."""

import os
import signal
import sys
import time

factor = 3


def length(response, record, scale=1.0):
    return len(response) * scale


def obey(response, record):
    """Does what the response says."""
    word, _, argument = response.partition(" ")
    if word == "hang":
        time.sleep(3600)
    elif word == "spin":
        return 10 ** (10**10)  # one computation inside C that no signal handler interrupts
    elif word == "die":
        os._exit(3)
    elif word == "die_once" and not os.path.exists(argument):
        open(argument, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "raise":
        raise LookupError(f"no\n {argument}")
    elif word == "exit":
        sys.exit(0)
    elif word == "print":
        print("noise on standard output " * 1000)
    elif word == "nan":
        return float("nan")
    elif word == "inf":
        return float("inf")
    elif word == "text":
        return "1.0"
    elif word == "long":
        return 10**400
    elif word == "huge":
        return -1e308
    elif word == "pid":
        return os.getpid()
    elif word == "env":
        return argument in os.environ
    elif word == "module":
        return argument in sys.modules
    elif word in ("child", "own-session"):
        if not os.fork():
            if word == "own-session":
                os.setsid()
            time.sleep(3600)
        time.sleep(3600)
    return 0.5


async def later(response, record):
    return 1.0


def one_argument(response):
    return 1.0
