"""Settings from everywhere at once: a Config within its limits, or a ConfigError that repeats no secret."""

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelexpress.config import STRATEGIES, Config, resolve_config
from modelexpress.errors import ConfigError
from tests.fuzz.inputs import ODD, TEXTS, anything_near, fuzzed

NAMES = st.sampled_from([*Config.__dataclass_fields__, "registri", "", "MX_REGISTRY", "x" * 3000])
VALUES = st.one_of(
    ODD,
    TEXTS,
    st.sampled_from(
        ["on", "off", "true", "5", "1e400", "-1", "rdma,disk", "gms", "file:///tmp/x", ["disk"], ["disk", "disk"],
         1e400, 10**400, "1" * 5000, "\ud800", {"a": 1}, "loaded", "ready", b"on", ["rdma", 3]]
    ),
)  # fmt: skip
OPTIONS = st.dictionaries(NAMES, VALUES, max_size=3)
GOOD_JSON = json.dumps({"strategies": ["disk"], "verify": "on", "transfer_timeout_s": 5, "strict": True}).encode()
EXTRA = st.one_of(
    OPTIONS,
    st.dictionaries(st.one_of(NAMES, st.integers(), st.none()), VALUES, max_size=2),
    anything_near(GOOD_JSON).map(lambda data: data.decode(errors="surrogateescape")),
    st.text(max_size=20),
    st.sampled_from(["[" * 100_000, '{"threads":' * 5000, '{"threads":1e999}', '{"threads":' + "9" * 5000 + "}"]),
)
ENVIRON = st.dictionaries(
    st.sampled_from([f"MX_{name.upper()}" for name in Config.__dataclass_fields__] + ["MX_", "MX_X", "PATH"]),
    st.text(st.characters(exclude_characters="\0"), max_size=20) | TEXTS.filter(lambda text: "\0" not in text),
    max_size=3,
)


@fuzzed
@given(options=OPTIONS, extra=st.none() | EXTRA, environ=ENVIRON)
@example(options={"transfer_timeout_s": 10**400}, extra=None, environ={})  # an OverflowError went up
@example(options={}, extra={1: 2}, environ={})  # a TypeError of difflib went up
@example(options={"strategies": "1" * 5000}, extra=None, environ={})  # was repeated whole
@example(options={}, extra='{"' + "x" * 5000 + '":1,"' + "x" * 5000 + '":1}', environ={})
@example(options={}, extra="[" * 100_000, environ={})  # a RecursionError went up
def test_settings_are_within_their_limits_or_an_error(options, extra, environ):
    try:
        config = resolve_config(options, extra_config=extra, environ=environ)
    except ConfigError as exc:
        assert len(str(exc)) < 4000  # noqa: PT017 - the form of any refusal
        return
    for seconds in (config.transfer_timeout_s, config.connect_timeout_s, config.lease_ttl_s):
        assert isinstance(seconds, float)
        assert math.isfinite(seconds)
        assert seconds > 0
    assert all(type(count) is int and 1 <= count <= 1024 for count in (config.threads, config.max_sources))
    assert config.strategies
    assert set(config.strategies) <= set(STRATEGIES)
    assert config.verify in ("on", "off", "sampled")
    assert config.publish_when in ("loaded", "ready")
    assert config.direct_reads in ("auto", "on", "off")
    assert type(config.publish) is type(config.strict) is bool
    for text in (config.registry, config.gms, config.revision, config.model_name, config.signing_key):
        assert text is None or (isinstance(text, str) and text and "\0" not in text and text.encode())


SECRET = st.sampled_from(["hush", "redis://:hush@host/0"])
HIDING = st.one_of(
    SECRET.map(lambda s: [s]), SECRET.map(lambda s: {"url": s}), SECRET.map(lambda s: s + "\0"), SECRET.map(str.encode)
)


@fuzzed
@given(name=st.sampled_from(["registry", "signing_key"]), value=HIDING, where=st.sampled_from(["option", "extra"]))
def test_no_error_repeats_a_secret(name, value, where):
    """`registry=["redis://:password@host"]` was repeated whole."""
    given_ = {name: value}

    with pytest.raises(ConfigError) as caught:
        resolve_config(
            given_ if where == "option" else {}, extra_config=given_ if where == "extra" else None, environ={}
        )

    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_key_twice_in_json_is_an_error():
    """Which of the two was meant is a guess, and others guess otherwise."""
    with pytest.raises(ConfigError, match="'verify' occurs twice"):
        resolve_config({}, extra_config='{"verify": "off", "verify": "on"}', environ={})


def test_the_repr_of_a_config_shows_no_password():
    assert "hush" not in repr(Config(registry="redis://:hush@host/0", signing_key="hush"))
