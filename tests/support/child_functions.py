"""What the tests of processes run in them; light, because each process imports it."""

import os
import time


def counts(send, most):
    for number in range(most):
        send(number)


def raises(send):
    send("before")
    raise ValueError("the reason")


def dies(send):
    send("before")
    os._exit(3)


def hangs(send):
    time.sleep(600)


def question_that_dies(setting):
    os._exit(3)


def question_that_lives(setting):
    return {"dry run": setting.dry_run}


def run(report):
    """The part that this module is."""
    report.ask("dies", question_that_dies, apart=True)
    report.ask("lives", question_that_lives, apart=True)


class Part:
    """Stands for the module of a part."""

    def __init__(self, run):
        self.run = run
