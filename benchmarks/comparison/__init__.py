"""The comparison with rivals: how long until a nested batch is on the device, beside every rival
that is installed.

The shapes of batches (`batches`), the ways to stage them (`rivals`), a fresh process for each way
(`harness`), what that process does (`staging`), the rows that come of it (`record`), how they are
shown (`table`, `plot`, `progress`); `run` puts them in order, behind the options of `command`. Of
pinstage it uses the public names only. The scripts beside this folder use `harness`, `record` and
`table` too.
"""
