"""The demo: one year of New York weather and flights, staged four ways, trained on, compared bit
for bit.

It is written as a user's program: a team's own batch classes (`batch`), their data (`data`), their
model (`model`), four ways to bring a batch to the device (`ways`), a training loop that times them
(`train`) and the output (`report`). Without a GPU, `workers` times loaders. `run` calls them in
order, with the options of `command`. The demo uses only public names of pinstage.
"""
