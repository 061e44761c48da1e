"""evals.data: data sets of the hub, without the network."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals.data import DataError, Document, load_documents
from evals.schema import DatasetConfig

CONF = Path(__file__).parents[2] / "conf" / "dataset"


def option(name: str, **fields: Any) -> DatasetConfig:
    return DatasetConfig(**{**yaml.safe_load((CONF / f"{name}.yaml").read_text()), **fields})


class FakeHub:
    """Stands for datasets.load_dataset: answers with rows, keeps what was asked."""

    def __init__(self, columns: dict[str, list[Any]] | Exception) -> None:
        self.columns = columns
        self.asked: tuple[str, dict[str, Any]] | None = None

    def __call__(self, path: str, **arguments: Any) -> Any:
        import datasets

        self.asked = (path, arguments)
        if isinstance(self.columns, Exception):
            raise self.columns
        return datasets.Dataset.from_dict(self.columns)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(columns: dict[str, list[Any]] | Exception) -> FakeHub:
        fake = FakeHub(columns)
        monkeypatch.setattr("datasets.load_dataset", fake)
        return fake

    return install


@pytest.mark.parametrize(("name", "field"), [("wikitext2", "text"), ("ptb", "sentence")])
def test_lines_of_a_hub_set_are_joined(hub: Any, name: str, field: str) -> None:
    fake = hub({field: ["", "one", "two"]})
    (document,) = load_documents(option(name), seed=0)
    assert document.text == "\n\none\n\ntwo"
    assert fake.asked[1]["split"] == "test"
    assert fake.asked[1]["revision"]
    assert "trust_remote_code" not in fake.asked[1]


def test_c4_reads_one_file_and_keeps_documents(hub: Any) -> None:
    fake = hub({"text": ["one", "two", "three"], "url": ["u", "v", "w"]})
    documents = load_documents(option("c4", limit=2), seed=0)
    assert documents == [Document("c4-000000", "one"), Document("c4-000001", "two")]
    path, arguments = fake.asked
    assert path == "allenai/c4"
    assert arguments["data_files"] == {"validation": "en/c4-validation.00000-of-00008.json.gz"}
    assert re.fullmatch("[0-9a-f]{40}", arguments["revision"])


def test_hub_field_is_missing(hub: Any) -> None:
    hub({"sentence": ["one"]})
    with pytest.raises(DataError, match=r"Salesforce/wikitext .*no field .*'text'; .*sentence"):
        load_documents(option("wikitext2"), seed=0)


def test_hub_out_of_reach_says_how_to_bring_the_file(hub: Any) -> None:
    hub(ConnectionError("Couldn't reach 'Salesforce/wikitext' on the Hub (OfflineModeIsEnabled)"))
    with pytest.raises(DataError) as caught:
        load_documents(option("wikitext2"), seed=0)
    message = str(caught.value)
    assert "dataset=wikitext2, Salesforce/wikitext (config wikitext-2-raw-v1, split test" in message
    assert "OfflineModeIsEnabled" in message
    assert "dataset=file dataset.path=DATA.parquet" in message
    assert "dataset.join_documents=true" in message
    call = re.search(r"datasets\.load_dataset\((.*)\)\.to_parquet", message)
    assert call
    assert "'wikitext-2-raw-v1'" in call[1]
    assert str(option("wikitext2").revision) in call[1]


@pytest.mark.parametrize("variable", ["HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_variables_are_honoured(tmp_path: Path, variable: str) -> None:
    script = (
        "from evals.data import load_documents\n"
        "from evals.schema import DatasetConfig\n"
        "load_documents(DatasetConfig(name='w', source='hub', repo='no/such'), 0)\n"
    )
    # an unroutable endpoint: without the variable this would try, retry and say so
    environment = {variable: "1", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", script],
        cwd=CONF.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "DataError" in run.stderr
    assert "OfflineModeIsEnabled" in run.stderr
    assert "Retrying" not in run.stderr
