"""What several test files share; oracles here use nothing of what they check."""
