"""``lightning-nm`` as a user calls it, in this process."""

from lightning_nm.cli import main


def status_of(*words):
    """The exit status of the command with these words."""
    try:
        return main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code or 0


def refused(capsys, *words):
    """What a command says that is refused; it prints nothing else."""
    status = status_of(*words)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    return err
