"""Fakes for the cluster that tests share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Serve's models use what pydantic deprecates
    import ray.serve  # noqa: F401  so that later imports find it done

from ray import cloudpickle

from deploy.launch.cluster import Endpoints
from tests.deploy import fake_engines


@pytest.fixture(scope="module")
def cluster_for_fakes(cluster: Endpoints) -> Iterator[None]:
    """Fakes are sent by value, as the workers of the cluster cannot import tests."""
    cloudpickle.register_pickle_by_value(fake_engines)
    yield
    cloudpickle.unregister_pickle_by_value(fake_engines)
