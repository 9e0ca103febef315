"""Reports about other projects, each a test with the right outcome here."""
