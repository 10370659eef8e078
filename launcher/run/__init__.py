"""One run: from recipe and flags to a plan, a session, and the loop that trains, evaluates and saves."""
