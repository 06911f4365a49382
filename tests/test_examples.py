"""Manifests in the documentation are what Kubernetes takes, by its own schemas."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

DOCS = Path(__file__).parent.parent / "docs"
KUBERNETES = "1.31"


def manifests() -> list[tuple[str, dict]]:
    found = []
    for path in sorted(DOCS.rglob("*.yaml")):
        found += [(path.name, each) for each in yaml.safe_load_all(path.read_text())]
    for path in sorted(DOCS.rglob("*.md")):
        for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
            found += [(path.name, each) for each in yaml.safe_load_all(block)]
    return [(name, each) for name, each in found if each and "kind" in each]


@pytest.mark.parametrize(
    ("name", "manifest"), manifests(), ids=lambda each: each if isinstance(each, str) else each["kind"]
)
def test_a_manifest_fits_the_schema(name, manifest):
    assert kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_there_are_manifests_to_look_at():
    assert {name for name, _ in manifests()} >= {"operating.md", "gms.md", "sglang-fleet.yaml"}
