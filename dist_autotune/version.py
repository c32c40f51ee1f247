"""The package's version, for entries of the cache, logs and the check that ranks agree on it."""

from importlib import metadata

try:
    __version__ = metadata.version("dist-autotune")
except metadata.PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
