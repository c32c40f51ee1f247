"""What the tests of calls by a collective do on a rank."""

from __future__ import annotations

PATIENCE_S = 60.0  # less than a test has
SHORT_S = 1.5  # of waits that are to end
ALWAYS = {"collective": True, "timeout_s": PATIENCE_S}


def launches_of(op):
    """Return a list that grows with each launch of the operation's own kernel."""
    launch, launched = op._launch, []

    def counted(*args, **kwargs):
        launched.append(1)
        launch(*args, **kwargs)

    op._launch = counted
    return launched


def prefer(op, choose):
    """Have this rank want a collective where `choose()` says so, whatever its peers want."""
    op._collective.wants = lambda rows, key: choose()


def note_agreements(op, made):
    """Append what the ranks agree on in each call."""
    agree = op._collective.agree

    def noted(*args, **given):
        made.append(agree(*args, **given))
        return made[-1]

    op._collective.agree = noted
