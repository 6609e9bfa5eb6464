"""What is generated from the code is up to date, and the samples are configurations that the processes take."""

import importlib

import pytest

from springtide import config
from springtide.cli import reference


@pytest.mark.parametrize("path", list(reference.files()), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path):
    assert path.exists(), "run `python -m springtide.cli.reference`"
    assert path.read_text() == reference.files()[path], "run `python -m springtide.cli.reference`"


@pytest.mark.parametrize("name", list(reference.PROCESSES))
def test_samples_load_as_they_are_and_with_every_key_set(name, tmp_path):
    """CM5: a sample is valid, names every key, and each shown default is one that the process accepts."""
    module, attribute, _ = reference.PROCESSES[name]
    cls = getattr(importlib.import_module(module), attribute)
    sample = reference.ROOT / "deploy" / "config" / f"{name}.toml"
    as_shipped = config.load(cls, sample, environ={})
    for key, value in reference.SAMPLE_VALUES[name].items():
        found = getattr(as_shipped, key)
        assert (list(found) if isinstance(found, tuple) else found) == value
    text = sample.read_text()
    for key, *_ in config.reference(cls):
        assert f"{key.rpartition('.')[2]} =" in text or key == "pools"
    keys = [line[2:] for line in text.splitlines() if line.startswith("# ") and _is_a_setting(line, cls)]
    with_all = "\n".join(line for line in _uncommented(text, keys) if not line.endswith("="))
    (tmp_path / "all.toml").write_text(with_all)
    assert config.load(cls, tmp_path / "all.toml", environ={}) == as_shipped


def _is_a_setting(line, cls):
    names = {key.rpartition(".")[2] for key, *_ in config.reference(cls)}
    return line[2:].partition(" =")[0] in names


def _uncommented(text, keys):
    for line in text.splitlines():
        yield line[2:] if line[2:] in keys else line
