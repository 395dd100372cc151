"""What `pinstage bench` measures: how long until a nested batch is on the device, beside every rival that is installed.

The shapes of batches (`batches`), the ways to stage them (`rivals`), a fresh process for each way (`harness`), what
that process does (`staging`), the rows that come of it (`record`), how they are shown (`table`, `plot`, `progress`);
`run` puts them in order. Of pinstage it uses the public names only. The other benchmarks of the repository use
`harness`, `record` and `table` too.
"""
