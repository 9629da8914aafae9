"""Whether a method helps: comparisons at equal budget, claims with verdicts, and the catalogue of both."""
