"""Measuring the machine at hand. In: nothing but the machine. Out: a ``Machine``, kept on disk and used from then on by its name.

Host DRAM is measured in this process; whatever needs jax runs in a child process, so that the user's own backend is not touched and a
crash of a driver is a message. Importing this loads neither jax nor numpy.
"""

from forebay.hardware.probing.probing import probe

__all__ = ["probe"]
