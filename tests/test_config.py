"""Configurations: defaults, settings, and every problem named at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from fedopt_flwr import ConfigError, DataError, ModelError, RunConfig, simulate
from fedopt_flwr.algorithms import FedAvg
from fedopt_flwr.config.text import as_setting, changed
from fedopt_flwr.problems import validation_problems


def problems(settings: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_file(None, settings)
    return caught.value.problems


def test_the_defaults_are_those_of_the_design() -> None:
    config = RunConfig()
    federation, training = config.federation, config.training
    assert (config.algorithm.name, config.data.name, config.model.name) == (
        "autofed",
        "digits",
        "mlp",
    )
    assert (federation.num_clients, federation.clients_per_round, federation.num_rounds) == (
        20,
        5,
        50,
    )
    assert (training.local_steps, training.local_epochs, training.batch_size) == (10, None, 32)
    assert (federation.seed, config.data.partition.concentration) == (0, 0.3)


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.booleans())
def test_a_value_that_becomes_a_setting_comes_back_as_it_was(value: object) -> None:
    assert changed({}, [as_setting("model.name", value)]) == {"model": {"name": value}}


def test_a_rule_of_ones_own_may_lie_in_a_package() -> None:
    config = RunConfig.from_file(None, ["rules.pkg.mod:Rule.momentum=0.5"])
    assert config.rules["pkg.mod:Rule"] == {"momentum": 0.5}


@pytest.mark.parametrize("key", ["output.directory", "data.path"])
def test_an_empty_path_is_not_the_current_folder(key: str) -> None:
    assert problems([f"{key}="]) == [
        f"{key}: got ''; must not be empty; name a path, '.' for this folder"
    ]


def test_settings_are_toml_or_bare_strings() -> None:
    config = RunConfig.from_file(
        None,
        [
            "federation.num_rounds=7",
            "model.options.hidden=[8, 4]",
            "data.name=synthetic",
            'data.partition={kind = "classes", classes_per_client = 3}',
            "algorithm.momentum=0.5",
        ],
    )
    assert config.federation.num_rounds == 7
    assert config.model.options == {"hidden": [8, 4]}
    assert config.data.name == "synthetic"
    assert config.data.partition.classes_per_client == 3
    assert config.algorithm.hyperparameters == {"momentum": 0.5}


@pytest.mark.parametrize("text", ["2024-01-01", "20240101", "1_000", "1.50"])
def test_a_folder_named_like_a_date_or_number_keeps_its_name(text: str) -> None:
    config = RunConfig.from_file(None, [f"output.directory={text}", f"data.path={text}"])
    assert (str(config.output.directory), str(config.data.path)) == (text, text)


def test_a_changed_copy_still_looks_into_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[federation]\nseed = 4\n")
    config = RunConfig.from_file(tmp_path / "run.toml")
    for copy in (config.updated(["federation.seed=5"]), config.for_rule("fedavg")):
        assert copy.import_folders == (tmp_path, Path.cwd())


def test_a_configuration_survives_its_own_file(tmp_path: Path) -> None:
    import tomli_w

    config = RunConfig.from_file(None, ["training.local_epochs=2", "output.directory=/tmp/x"])
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config.to_dict()))
    again = RunConfig.from_file(tmp_path / "config.toml")
    assert again.to_dict() == config.to_dict()
    assert again.training.local_steps is None


def test_all_problems_are_reported_together() -> None:
    found = problems(
        ["federation.num_rounds=0", "training.batch_size=-1", "model.nam=cnn", "federations.seed=1"]
    )
    assert len(found) == 4
    assert any(line.startswith("federation.num_rounds: got 0;") for line in found)
    assert any("did you mean 'name'?" in line for line in found)
    assert any("federations: unknown" in line and "'federation'?" in line for line in found)


def test_a_section_that_was_changed_as_an_object_is_checked_too() -> None:
    config = RunConfig()
    many = config.federation.model_copy(update={"clients_per_round": 99})
    both = config.training.model_copy(update={"local_epochs": 2})
    with pytest.raises(ConfigError) as caught:
        RunConfig(federation=many, training=both)
    assert len(caught.value.problems) == 2
    assert RunConfig(federation=config.federation).to_dict() == config.to_dict()


def test_fields_that_do_not_fit_together_speak_up_beside_other_problems() -> None:
    sizes = ["clients_per_round=99", "foo=1", "sampler=all"]
    work = ["local_steps=1", "local_epochs=1", "device=gpu"]
    ranges = ["data.partition.examples_per_client=[9,3]", "data.partition.shape=[0, 1]"]
    found = problems(
        [*(f"federation.{s}" for s in sizes), *(f"training.{s}" for s in work), *ranges]
    )
    fields = {line.partition(":")[0] for line in found}
    assert fields == {
        *("federation.clients_per_round", "federation.foo", "federation.sampler"),
        *("training.local_epochs", "training.device"),
        *("data.partition.examples_per_client", "data.partition.shape.0"),
    }


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("training.batch_size=-1", "(allowed: >= 0 and <= 1000000000)*the default, 32"),
        ("algorithm.momentum=1.5", "(allowed: > 0 and <= 1); change it, or leave it out"),
        ("federation.sampler=all", "'clustered'; change it*the default, 'uniform'"),
        ("federation.num_clients=0", "change it, or leave it out for the default, 20"),
        ("rules.fedprox.proximal_strength=-1", "(allowed: >= 0)*the default, 0.01"),
        ("data.partition.shape=[1]", "Field required; change it*the default, (2.0, 5.0)"),
    ],
)
def test_what_is_allowed_and_what_to_do_is_said(setting: str, remedy: str) -> None:
    (line,) = problems([setting])
    parts = remedy.split("*")
    assert parts[0] in line
    assert parts[-1] in line


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "federation.clients_per_round=99",
            r"federation.clients_per_round: got 99; .* num_clients \(20\)",
        ),
        ("federation.min_replies=6", r"federation.min_replies: got 6; .* \(5\)"),
        ("federation.seed=-1", "federation.seed: got -1"),
        ("federation.round_timeout=0", "federation.round_timeout: got 0"),
        ("federation.buffers=global", "federation.buffers: got 'global'.*'average' or 'local'"),
        (
            "training.local_steps=0",
            "training.local_steps: got 0; should be greater than or equal to 1",
        ),
        ("training.batch_size=-4", "training.batch_size: got -4"),
        ("training.device=tpu", "training.device: got 'tpu'"),
        ("training.weight_decay=nan", "training.weight_decay: got nan"),
        ("data.partition.concentration=0", "data.partition.concentration: got 0"),
        ("data.partition.examples_per_client=[9, 3]", r"got \[9, 3\]; must be \[low, high\]"),
        ("data.partition.shape=[1, -1]", r"data.partition.shape.1: got -1; should be"),
        ("data.partition.alpha=1", "unknown 'alpha'"),
        ("federation.num_rounds=" + "9" * 400, "got 9{60}... of 400 characters; should be less"),
        ("federation.num_rounds=" + "9" * 5000, "should be a valid integer"),
        ("training.threads=1000000", "training.threads: got 1000000; should be less"),
        ("training.device=cuda:99999999999", r"should match pattern '\^\(auto\|cpu\|cuda"),
        ("federation.round_timeout=1e300", "federation.round_timeout: got 1e"),
        ("data.partition.examples_per_client=[1, 1000000000000]", "examples_per_client.1: got"),
        ("federation.num_clients='20'", "federation.num_clients: got '20'; must be a whole"),
        ("federation.seed=true", "federation.seed: got True; should be a valid integer"),
        ("rules.fedavg=3", "rules.fedavg: got 3; must be a section of keys and values"),
        ("rules.fedavg.foo=3", "rules.fedavg.foo: unknown 'foo'"),
        ("seed=1", "must have the form section.key=VALUE"),
        ("federation.seed", "must have the form section.key=VALUE"),
        ("data.name.x=1", None),
    ],
)
def test_bad_values_name_field_value_and_what_is_allowed(setting: str, text: str | None) -> None:
    import re

    (line,) = problems([setting])
    assert text is None or re.search(text, line), line


def test_a_field_without_a_default_is_asked_for() -> None:
    class Strict(FedAvg):
        name = "strict"
        strength: float = Field(ge=0)
        parts: list[int] = Field(default_factory=list)

    with pytest.raises(ValidationError) as caught:
        Strict(strength=-1.0, parts=5)
    assert validation_problems(caught.value, Strict) == [
        "strength: got -1.0; should be greater than or equal to 0 (allowed: >= 0); give it another "
        "value",
        "parts: got 5; should be a valid list; change it, or leave it out for the default, []",
    ]


def test_steps_and_epochs_exclude_each_other() -> None:
    (line,) = problems(["training.local_steps=3", "training.local_epochs=1"])
    assert "local_epochs: got 1 beside local_steps = 3" in line


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"name": "scafold"}, "unknown 'scafold'; did you mean 'scaffold'?"),
        ({"name": "padamfed", "momentum": 1.5}, "algorithm.momentum: got 1.5; should be less than"),
        ({"name": "fedavg", "momentum": 0.5}, "algorithm.momentum: unknown 'momentum'"),
        ({"name": "fedavg", "client_learning_rat": 1}, "did you mean 'client_learning_rate'?"),
        ({"name": "fedavg", "client_learning_rate": 0}, "got 0; should be greater than 0"),
        ({"name": "fedavg", "client_learning_rate": float("inf")}, "got inf"),
    ],
)
def test_bad_rules_and_hyperparameters_are_named(section: dict, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(algorithm=section).make_rule()
    assert text in str(caught.value)


def test_files_that_are_not_there_or_not_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml' is not a file"):
        RunConfig.from_file(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[federation\nseed = 1")
    with pytest.raises(ConfigError, match=r"broken.toml' is not TOML: .*line 1"):
        RunConfig.from_file(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"is not TOML"):
        RunConfig.from_file(broken)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"data": {"name": "digit"}}, ConfigError, "did you mean 'digits'?"),
        (
            {"data": {"name": "nothing:here"}},
            ConfigError,
            "data.name: cannot import 'nothing:here'",
        ),
        ({"model": {"name": "math:nothing"}}, ConfigError, "model.name: cannot import"),
        ({"model": {"loss": "math:nothing"}}, ConfigError, "model.loss: cannot import"),
        ({"model": {"metric": "accurracy"}}, ConfigError, "did you mean 'accuracy'?"),
        (
            {"model": {"options": {"depth": 3}}},
            ConfigError,
            "model.options of 'mlp': unknown 'depth'",
        ),
        ({"model": {"options": {"hidden": [0]}}}, ConfigError, "must be a list of positive"),
        ({"data": {"options": {"a": 1}}}, ConfigError, "'digits' has no options"),
        ({"data": {"name": "mnist", "path": "/no/such/folder"}}, DataError, "data.path: '/no/such"),
        ({"training": {"device": "cuda:77"}}, ConfigError, "training.device: got 'cuda:77'"),
        ({"federation": {"num_clients": 5000}}, DataError, "federation.num_clients: got 5000"),
        (
            {
                "data": {
                    "partition": {"kind": "dirichlet", "concentration": 0.001, "min_examples": 40}
                }
            },
            DataError,
            "with concentration 0.001 and num_clients 20 leaves a client",
        ),
        (
            {"data": {"partition": {"kind": "iid", "min_examples": 900}}},
            DataError,
            "kind 'iid' with num_clients 20 leaves client 2 with 72 examples, fewer than min",
        ),
        (
            {"data": {"name": "synthetic", "options": {"model_spread": float("nan")}}},
            DataError,
            "got model_spread nan, data_spread 1.0; both are variances and must be from 0",
        ),
        (
            {"model": {"options": {"hidden": [10**12]}}},
            ConfigError,
            "can't allocate memory",
        ),
        (
            {"data": {"partition": {"kind": "classes", "classes_per_client": 11}}},
            ConfigError,
            "classes_per_client: got 11; the data has 10",
        ),
        ({"data": {"partition": {"kind": "natural"}}}, ConfigError, "has no owner"),
    ],
)
def test_what_only_shows_when_a_run_is_put_together(settings: dict, error: type, text: str) -> None:
    with pytest.raises(error) as caught:
        simulate(settings)
    assert text in str(caught.value)


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    import torch

    with pytest.raises(ModelError, match="no trainable parameter"):
        simulate({}, model=lambda: torch.nn.Linear(64, 10).requires_grad_(False))
    with pytest.raises(ConfigError, match=r"must return an nn\.Module"):
        simulate({}, model=lambda: "a model")


def test_rules_are_checked_in_a_fresh_interpreter_whatever_was_imported_before() -> None:
    program = (
        "from fedopt_flwr import ConfigError, RunConfig\n"
        "try:\n    RunConfig(algorithm={'name': 'nope'}, federation={'num_clients': 0},"
        " rules={'fedavg': {'speed': 1}})\n"
        "except ConfigError as error:\n    print(*error.problems, sep='\\n')"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert [line.partition(":")[0] for line in output.splitlines()] == [
        "federation.num_clients",
        "algorithm.name",
        "rules.fedavg.speed",
    ]
