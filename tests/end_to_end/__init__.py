"""The command as a user meets it: real processes, real text, real mistakes."""
