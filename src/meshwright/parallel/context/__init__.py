"""Context parallelism: the tokens of a sequence on several ranks, which exchange what attention needs of each other."""
