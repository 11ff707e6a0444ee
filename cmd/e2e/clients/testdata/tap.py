"""Runs functions as test cases and prints TAP."""

import contextlib
import os
import re
import signal
import sys
import uuid

CASES = []


def case(function):
    """case registers a function as a test case."""
    CASES.append(function)
    return function


def refused(function):
    """refused registers a case that the policy has to refuse."""
    function.tag = " [policy]"
    return case(function)


def unique(prefix):
    return "%s-%s" % (prefix, uuid.uuid4().hex[:10])


def equal(got, want):
    if got != want:
        raise AssertionError("got %r, want %r" % (got, want))


def within(item, collection):
    if item not in collection:
        raise AssertionError("%r isn't in %.300r" % (item, collection))


def raises(error, function, *args, **options):
    try:
        function(*args, **options)
    except error as e:
        return e
    raise AssertionError("no %s" % error.__name__)


def expire(*_):
    raise TimeoutError("the case takes too long")


def main(fixture):
    """main runs the cases. Each gets what fixture makes of a stack, whose callbacks end the case."""
    wanted = re.compile(os.environ.get("CASES", ""))
    signal.signal(signal.SIGALRM, expire)
    failed = False
    chosen = [f for f in CASES if wanted.search(f.__name__)]
    for number, function in enumerate(chosen, 1):
        name, reason = function.__name__ + getattr(function, "tag", ""), ""
        signal.alarm(45)
        try:
            with contextlib.ExitStack() as stack:
                function(fixture(stack))
        except Exception as e:
            reason = "%s: %s" % (type(e).__name__, e)
        signal.alarm(0)
        if reason:
            failed = True
            print("not ok %d - %s # %s" % (number, name, " ".join(reason.split())[:600]))
        else:
            print("ok %d - %s" % (number, name))
        sys.stdout.flush()
    print("1..%d" % len(chosen))
    sys.exit(failed)
