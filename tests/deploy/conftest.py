"""A local Ray cluster for the tests of a module that are marked `ray`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Serve's models use what pydantic deprecates
    import ray.serve  # noqa: F401  so that later imports find it done

from ray import cloudpickle

from deploy.launch.cluster import Endpoints, local_cluster
from tests.deploy import fake_engines


@pytest.fixture(scope="module")
def cluster() -> Iterator[Endpoints]:
    """Ray and Serve with more logical CPUs than tests take; fakes are sent by value, as workers cannot import tests."""
    cloudpickle.register_pickle_by_value(fake_engines)
    with local_cluster(num_cpus=8) as endpoints:
        yield endpoints
    cloudpickle.unregister_pickle_by_value(fake_engines)
