"""Settings are what the user said, or an error that names the setting and the accepted form."""

import msgspec
import pytest

from modelexpress.config import Config, resolve_config
from modelexpress.errors import ConfigError


def test_keyword_beats_extra_config_beats_environment():
    environ = {"MX_VERIFY": "off", "MX_MAX_SOURCES": "7", "MX_THREADS": "2"}
    extra = {"verify": "sampled", "max_sources": 5}

    config = resolve_config({"verify": "on", "registry": None}, extra_config=extra, environ=environ)

    assert (config.verify, config.max_sources, config.threads) == ("on", 5, 2)


def test_defaults():
    config = resolve_config({}, environ={})

    assert config == Config()
    assert config.strategies == ("rdma", "gms", "disk")
    assert config.verify == "on"


def test_json_text_and_a_mapping_mean_the_same():
    extra = {"strategies": ["disk"], "strict": True, "transfer_timeout_s": 5}

    assert resolve_config({}, extra_config=msgspec.json.encode(extra).decode(), environ={}) == resolve_config(
        {}, extra_config=extra, environ={}
    )


NUMBERS = ("transfer_timeout_s", "connect_timeout_s", "lease_ttl_s", "threads", "max_sources")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["abc", "5m", "-1", "0", "nan", "inf", "1e400", "1e10"])
def test_malformed_numbers_name_the_variable_and_the_form(name, value):
    """A38: a bad timeout must not become a traceback far from its cause."""
    with pytest.raises(ConfigError, match=rf"environment variable MX_{name.upper()} is .*; give a "):
        resolve_config({}, environ={f"MX_{name.upper()}": value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, -1, 0, float("nan"), [], "5m"])
def test_malformed_numbers_in_options_and_extra_config(name, value):
    with pytest.raises(ConfigError, match=f"option {name}"):
        resolve_config({name: value}, environ={})
    with pytest.raises(ConfigError, match=f"extra-config key {name}"):
        resolve_config({}, extra_config={name: value}, environ={})


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"strategies": []}, "no strategy"),
        ({"strategies": "rdma,rdma"}, "twice"),
        ({"strategies": "rmda"}, "unknown strategy 'rmda'.*rdma,gms,disk"),
        ({"strategies": ""}, "unknown strategy"),
        ({"strategies": 3}, "some of rdma,gms,disk"),
        ({"verify": "yes"}, "on, off or sampled"),
        ({"strict": "maybe"}, "true or false"),
        ({"publish": 1}, "true or false"),
        ({"revision": ""}, "commit hash"),
        ({"revision": "\udcff"}, "commit hash"),
        ({"registry": "a\0b"}, "URL"),
        ({"strategies": "gms"}, "gms is not set"),
        ({"strategies": "rdma"}, "registry is not set"),
        ({"publish": True}, "neither registry nor gms"),
        ({"takeover_lock": "/run/llama.lock"}, "takeover_lock is set and gms is not"),
        ({"takeover_lock": "", "gms": "s"}, "the path of a file"),
    ],
)
def test_values_that_cannot_be_meant(option, reason):
    with pytest.raises(ConfigError, match=reason):
        resolve_config(option, environ={})


def test_unknown_keys_are_errors_with_a_suggestion():
    with pytest.raises(ConfigError, match="unknown option 'registri'; did you mean 'registry'"):
        resolve_config({"registri": "x"}, environ={})
    with pytest.raises(ConfigError, match="unknown extra-config key 'zzz'; known are strategies"):
        resolve_config({}, extra_config={"zzz": 1}, environ={})


@pytest.mark.parametrize("extra", ["{", "[]", "3", "nan"])
def test_extra_config_that_is_no_object(extra):
    with pytest.raises(ConfigError, match="extra-config"):
        resolve_config({}, extra_config=extra, environ={})


def test_empty_and_unknown_variables_are_ignored_with_a_warning(caplog):
    assert resolve_config({}, environ={"MX_REGISTRY": " ", "MX_REGISTRI": "x"}).registry is None
    assert "MX_REGISTRY is empty" in caplog.text
    assert "MX_REGISTRI: no such setting; did you mean 'registry'" in caplog.text


def test_the_signing_key_is_never_shown():
    config = resolve_config({}, environ={"MX_SIGNING_KEY": "hush-hush"})

    assert config.signing_key == "hush-hush"
    assert "hush" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        resolve_config({"signing_key": 12345}, environ={})
    assert "12345" not in str(caught.value)
