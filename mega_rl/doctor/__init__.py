"""What is wrong with this machine, found before a run: every check answers in one sentence with its fix."""
