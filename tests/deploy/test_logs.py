from __future__ import annotations

import io
import json
import logging

import pytest
from ray.serve._private.constants import SERVE_LOGGER_NAME

from deploy import logs

NAMES = (*logs.PACKAGES, SERVE_LOGGER_NAME)


@pytest.fixture
def loggers():
    """Restored after the test."""
    found = [logging.getLogger(name) for name in NAMES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in found]
    yield dict(zip(NAMES, found, strict=True))
    for logger, (handlers, level, propagate) in zip(found, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_what_we_log_in_a_replica_goes_where_serve_s_own_lines_go(loggers):
    serves = loggers[SERVE_LOGGER_NAME]
    serves.handlers = []
    serves.setLevel(logging.INFO)
    logs.log_with_serve()
    out = io.StringIO()
    serves.addHandler(logging.StreamHandler(out))  # as when Serve changes its settings later
    logging.getLogger("deploy.serve.deployments").info("an engine has died")
    logging.getLogger("orchestrator.dispatch.runner").debug("too much")
    assert out.getvalue() == "an engine has died\n"


def test_lines_go_to_standard_output_as_json_if_that_is_set(loggers, capsys):
    loggers[SERVE_LOGGER_NAME].setLevel(logging.INFO)
    logs.log_with_serve(is_json=True)
    logging.getLogger("orchestrator.dispatch.runner").info("session %s goes on", "r#1")
    assert json.loads(capsys.readouterr().out)["message"] == "session r#1 goes on"


def test_an_engine_s_process_keeps_what_is_not_yet_a_warning_with_its_time(loggers, capsys):
    logs.log_to_stderr()
    logging.getLogger("workers.runtime.runtime").info("loaded")
    line = capsys.readouterr().err
    assert line.startswith("INFO 20")
    assert line.endswith(" loaded\n")
