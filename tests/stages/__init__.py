"""What `.ci/run` runs: stages of `table.toml`, each a command, with the times and outcomes as the last lines.

Needs the standard library alone, because the first stage makes the environment.
"""
