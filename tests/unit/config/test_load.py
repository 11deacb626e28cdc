"""Loading a configuration: types, overrides, the alias, and every problem named at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config import RunConfig, load_config, save_resolved, to_yaml
from mega_rl.config.reading.old_keys import REMOVED, RENAMED
from mega_rl.config.reading.typed import leaf_names
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.errors import InputError
from mega_rl.stages.run.progress import is_due

MINIMAL = "model:\n  path: models/tiny\n"


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return file

    return write_file


def message(files: Path | list[Path], *overrides: str) -> str:
    with pytest.raises(InputError) as raised:
        load_config(files, overrides)
    return str(raised.value)


def test_a_minimal_file_gets_the_defaults_as_dataclasses(write):
    config = load_config(write(MINIMAL))
    assert isinstance(config, RunConfig)
    expected = RunConfig()
    expected.model.path = "models/tiny"
    assert config == expected


def test_values_of_every_kind(write):
    config = load_config(
        write(
            MINIMAL + "data: {train_files: [a.jsonl, b.parquet], system_prompt: null, shuffle: no}\n"
            "bridge: {verify: off}\n"
            "rollout: {stop: ['#'], vllm: {enforce_eager: true, nested: {x: [1]}}}\n"
            "optimizer: {lr: 5e-7, clip_grad: 1}\n"
            "rewards:\n- name: math\n  options: {anything: 1}\n- {name: length, weight: 2}\n"
            "logging:\n"  # an empty section, all its keys commented out
        )
    )
    assert config.data.train_files == ["a.jsonl", "b.parquet"]
    assert config.data.shuffle is False
    assert config.bridge.verify == "off"  # YAML 1.1 would make it False
    assert config.rollout.vllm == {"enforce_eager": True, "nested": {"x": [1]}}
    assert config.optimizer.lr == 5e-7
    assert isinstance(config.optimizer.clip_grad, float)
    assert config.rewards == [RewardConfig("math", 1.0, {"anything": 1}), RewardConfig("length", 2.0)]
    assert config.logging.jsonl is True


def test_overrides_of_every_kind(write):
    file = write(MINIMAL + "rewards: [{name: a, weight: 3}, {name: b}]\nrollout: {vllm: {x: 1}}\n")
    config = load_config(
        file,
        [
            "model.path=a=b",
            "data.val_files=[c.jsonl, d.jsonl]",
            "trainer.total_steps=7",
            "algorithm.importance_cap=null",
            "optimizer.lr=1e-3",
            "rewards[0].weight=0.5",
            "rewards.1.options.deep.er=4",
            "rollout.vllm.y=two",
            "parallel.sequence=true",
            "trainer.total_steps=8",
        ],
    )
    assert config.model.path == "a=b"
    assert config.data.val_files == ["c.jsonl", "d.jsonl"]
    assert config.trainer.total_steps == 8  # the last one counts
    assert config.algorithm.importance_cap is None
    assert config.optimizer.lr == 1e-3
    assert config.rewards == [RewardConfig("a", 0.5), RewardConfig("b", 1.0, {"deep": {"er": 4}})]
    assert config.rollout.vllm == {"x": 1, "y": "two"}
    assert config.parallel.sequence is True


def test_interpolation(write):
    file = write(MINIMAL + "data: {train_files: [a.jsonl], val_files: '${data.train_files}'}\n")
    assert load_config(file).data.val_files == ["a.jsonl"]
    assert load_config(file, ["validation.n=${rollout.n}"]).validation.n == 8  # of a default too
    assert "expected a whole number" in message(file, "validation.n=${model.path}")
    assert "data.val_files" in message(write(MINIMAL + "data: {val_files: '${data.nowhere}'}\n"))


@pytest.mark.parametrize(
    ("override", "named", "nearest"),
    [
        ("rollout.temprature=1", "rollout.temprature", "rollout.temperature"),
        ("rolout.n=2", "rolout", "rollout"),
        ("temperature=1", "temperature", "rollout.temperature"),
        ("rewards=[{name: a, wieght: 2}]", "rewards[0].wieght", "rewards[0].weight"),
        ("validation.m=1", "validation.m", "n, temperature"),
        ("trainer.noise_injection.sigma_strat=1", "trainer.noise_injection.sigma_strat", "sigma_start"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(write, override, named, nearest):
    text = message(write(MINIMAL), override)
    assert f"unknown key {named}:" in text
    assert nearest in text.split(f"unknown key {named}:")[1]


def test_a_value_of_the_environment_has_the_type_of_its_key(write, monkeypatch):
    keys = ("optimizer.lr", "trainer.total_steps", "data.shuffle", "logging.wandb_project", "rollout.dtype")
    overrides = [f"{key}=${{oc.env:MEGA_RL_TEST_{number}}}" for number, key in enumerate(keys)]
    for number, value in enumerate(("1e-3", "7", "false", "8", "float32")):
        monkeypatch.setenv(f"MEGA_RL_TEST_{number}", value)
    config = load_config(write(MINIMAL), overrides)
    assert (config.optimizer.lr, config.trainer.total_steps, config.data.shuffle) == (1e-3, 7, False)
    assert (config.logging.wandb_project, config.rollout.dtype) == ("8", "float32")
    monkeypatch.setenv("MEGA_RL_TEST_1", "seven")
    assert "trainer.total_steps is 'seven'" in message(write(MINIMAL), *overrides)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_is_answered_with_the_new_one(write, old, new):
    assert old not in leaf_names() and new in leaf_names()
    assert new.rpartition(".")[2] == old.rpartition(".")[2], "a key keeps its last word"
    assert message(write(MINIMAL), f"{old}=1").endswith(f": {old} is now {new}: rename it")


@pytest.mark.parametrize("old", REMOVED)
def test_a_key_that_is_gone_is_answered_with_the_reason(write, old):
    assert old not in leaf_names()
    text = message(write(MINIMAL), f"{old}=1")
    assert text.endswith(
        f": there is no key {old}, since the trainer's log-probabilities are those of the whole vocabulary: remove it"
    )


def test_old_keys_of_a_file_come_with_all_other_problems(write):
    file = write(
        MINIMAL + "trainer: {save_freq: 5, resume: auto}\nrolout: {n: 3}\n"
        "rollout: {top_k: 40, validation: {n: 4, temperature: 0.7, wrong: 1}}\n"
    )
    lines = message(file, "trainer.test_freq=3").splitlines()
    assert "8 problems" in lines[0]
    for part in (
        "trainer.save_freq is now checkpoint.save_freq: rename it",
        "trainer.resume is now checkpoint.resume: rename it",
        "trainer.test_freq is now validation.test_freq: rename it",
        "rollout.validation.n is now validation.n: rename it",
        "rollout.validation.temperature is now validation.temperature: rename it",
        "unknown key rollout.validation.wrong",
        "there is no key rollout.top_k",
        "unknown key rolout",
    ):
        assert sum(part in line for line in lines) == 1, part


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.n=many", ("rollout.n is 'many'", "a whole number (int)")),
        ("rollout.n=2.5", ("rollout.n is 2.5", "int")),
        ("rollout.n=true", ("rollout.n is True", "int")),
        ("optimizer.lr=fast", ("optimizer.lr is 'fast'", "a number (float)")),
        ("parallel.sequence=2", ("parallel.sequence is 2", "true or false")),
        ("trainer.output_dir=", ("trainer.output_dir is null", "a string")),
        ("checkpoint.resume=false", ("checkpoint.resume is False", "a string")),
        ("rollout.stop=a.jsonl", ("rollout.stop is 'a.jsonl'", "a list")),
        ("rollout.stop_token_ids=[1, x]", ("rollout.stop_token_ids[1] is 'x'", "int")),
        ("aqn=1", ("aqn is 1", "a section of keys")),
        ("rollout.vllm=[1]", ("rollout.vllm is [1]", "a section of keys")),
        ("rewards={name: a}", ("rewards is", "a list")),
        ("trainer.noise_injection.num_stages=x", ("(given as trainer.noise_injection.num_stages)", "'x'")),
    ],
)
def test_a_wrong_type_names_field_value_and_type(write, override, parts):
    text = message(write(MINIMAL), override)
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("foo", "override 'foo' is malformed"),
        ("more.yaml", "override 'more.yaml' is malformed: give it as --config more.yaml"),
        ("=3", "malformed"),
        ("rollout.n=[1", "no readable value"),
        ("rewards[0].weight=1", "rewards has 0 entries"),
        ("model.path.deeper=1", "model.path is 'models/tiny' and has no keys below it"),
    ],
)
def test_a_bad_override_is_one_sentence(write, override, part):
    text = message(write(MINIMAL + "rewards: []\n"), override)
    assert part in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"model: [1", "not valid YAML"),
        (b"model: {path: a}\nmodel: {path: b}\n", "'model' stands twice at line 2"),
        (b"- a\n", "no sections of keys"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, content, part):
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    text = message(file)
    assert part in text and str(file) in text
    assert "\n" not in text


def test_a_missing_file(tmp_path):
    text = message(tmp_path / "no.yaml")
    assert "no.yaml" in text and "no such file" in text and "\n" not in text


def test_all_problems_are_reported_at_once_and_numbered(write):
    file = write("rolout: {n: 3}\nrewards: [{weight: 1}, {name: x, wait: 1}]\noptimizer: {lr: x}\n")
    lines = message(file, "nonsense", "trainer.total_steps=[]").splitlines()
    assert "7 problems" in lines[0]
    assert [line.split(".")[0].strip() for line in lines[1:]] == list("1234567")
    for part in ("rolout", "model.path is not set", "rewards[0].name is not set", "rewards[1].wait", "optimizer.lr"):
        assert sum(part in line for line in lines) == 1, part


class TestNoiseAlias:
    ALIAS = (
        MINIMAL + "trainer:\n  total_steps: 3\n  noise_injection: {enabled: true, sigma_start: 0.02, num_stages: 4}\n"
    )

    def test_it_is_moved_to_aqn(self, write):
        config = load_config(write(self.ALIAS + "aqn: {num_stages: 4, seed: 9}\n"))
        assert (config.aqn.enabled, config.aqn.sigma_start, config.aqn.num_stages) == (True, 0.02, 4)
        assert (config.aqn.sigma_end, config.aqn.seed, config.trainer.total_steps) == (0.0005, 9, 3)

    @pytest.mark.parametrize("spelling", ["aqn", "trainer.noise_injection"])
    def test_an_override_in_either_spelling_beats_the_file(self, write, spelling):
        assert load_config(write(self.ALIAS), [f"{spelling}.sigma_start=0.03"]).aqn.sigma_start == 0.03

    def test_two_values_are_an_error(self, write):
        text = message(write(self.ALIAS + "aqn: {num_stages: 5}\n"))
        assert "aqn.num_stages is 5" in text and "trainer.noise_injection.num_stages is 4" in text
        both = ["aqn.seed=1", "trainer.noise_injection.seed=2"]
        assert "give one of the two" in message(write(MINIMAL), *both)

    def test_it_must_be_a_section(self, write):
        assert "trainer.noise_injection is 3" in message(write(MINIMAL), "trainer.noise_injection=3")


def test_the_resolved_file_loads_to_the_same_configuration(write, tmp_path):
    file = write(
        MINIMAL + "bridge: {verify: off}\n"
        "rollout: {stop: ['1e-6', 'yes', '7', '\\${x}', \"a\\nb\"], vllm: {a: '1e3'}}\n"
        "rewards: [{name: a, options: {b: [1, {c: null}]}}]\noptimizer: {lr: 1e-7}\n"
    )
    config = load_config(file)
    assert config.rollout.stop == ["1e-6", "yes", "7", "${x}", "a\nb"]
    target = tmp_path / "new" / "resolved.yaml"
    save_resolved(config, target)
    assert target.read_text() == to_yaml(config)
    assert load_config(target) == config
    assert [p.name for p in target.parent.iterdir()] == ["resolved.yaml"]  # no temporary file is left


def test_one_file_needs_no_list_and_saving_can_be_off(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = "model: {path: m}\ndata: {train_files: a.jsonl, val_files: [b.jsonl]}\ncheckpoint: {save_freq: null}\n"
    file.write_text(text)
    config = load_config(file)
    assert (config.data.train_files, config.data.val_files) == (["a.jsonl"], ["b.jsonl"])
    assert config.checkpoint.save_freq is None
    assert not is_due(10, config.checkpoint.save_freq, 10) and is_due(10, -1, 10)


class TestSeveralFiles:
    """Each changes those before it."""

    @pytest.fixture
    def files(self, tmp_path: Path):
        def write_files(*texts: str) -> list[Path]:
            paths = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
            for path, text in zip(paths, texts, strict=True):
                path.write_text(text)
            return paths

        return write_files

    def test_sections_merge_and_lists_replace(self, files):
        given = files(
            MINIMAL + "rollout: {n: 4, stop: [a, b], vllm: {x: 1, deep: {y: 2}}}\nrewards: [{name: a}, {name: b}]\n",
            "rollout: {stop: [c], vllm: {deep: {z: 3}}}\nrewards: [{name: c}]\n",
        )
        config = load_config(given, ["rollout.n=5"])
        assert config.model.path == "models/tiny" and config.rollout.n == 5
        assert config.rollout.stop == ["c"] and config.rollout.vllm == {"x": 1, "deep": {"y": 2, "z": 3}}
        assert config.rewards == [RewardConfig("c")]
        assert load_config(given[::-1]).rewards == [RewardConfig("a"), RewardConfig("b")]
        assert load_config(given[:1]) == load_config(given[0])

    def test_an_empty_section_changes_nothing_and_null_is_a_value(self, files):
        given = files(
            MINIMAL
            + "rollout: {n: 4, vllm: {x: {y: 1}}}\nalgorithm: {dual_clip: 3.0, dynamic_sampling: {budget: 2}}\n",
            "rollout:\nalgorithm: {dual_clip: null, dynamic_sampling: }\n",
        )
        config = load_config(given)
        assert config.rollout.n == 4 and config.rollout.vllm == {"x": {"y": 1}}
        assert config.algorithm.dual_clip is None and config.algorithm.dynamic_sampling.budget == 2
        (given[1]).write_text("rollout: {vllm: {x: null}}\n")
        assert load_config(given).rollout.vllm == {"x": None}  # another program's key

    def test_interpolations_are_those_of_the_whole(self, files):
        given = files(MINIMAL + "validation: {n: '${rollout.n}'}\nrollout: {n: 2}\n", "rollout: {n: 6}\n")
        assert load_config(given).validation.n == 6

    def test_a_name_sets_what_no_file_sets(self, files):
        given = files(MINIMAL + "algorithm: {clip_ratio_high: 0.5}\n", "algorithm: {name: dapo}\n")
        assert load_config(given).algorithm.clip_ratio_high == 0.5

    def test_either_spelling_of_the_noise_in_a_later_file_counts(self, files):
        given = files(MINIMAL + "aqn: {seed: 1, num_stages: 4}\n", "trainer: {noise_injection: {seed: 2}}\n")
        config = load_config(given)
        assert (config.aqn.seed, config.aqn.num_stages) == (2, 4)

    def test_a_problem_is_named_with_its_file(self, files, tmp_path):
        given = files(MINIMAL + "rolout: {n: 1}\n", "trainer: {total_steps: many}\n", "rollout: {m: 1}\n")
        text = message(given)
        assert text.splitlines()[0].startswith(f"configuration {given[0]}: unknown key rolout: ")
        assert text.splitlines()[1].startswith(f"configuration {given[1]}: trainer.total_steps is 'many'")
        assert text.splitlines()[2].startswith(f"configuration {given[2]}: unknown key rollout.m: ")
        assert len(text.splitlines()) == 3
        both = files(MINIMAL, "rollout: {n: 2}\n")
        assert message(both, "rollout.m=1").startswith(f"configuration {both[0]} + {both[1]}: unknown key rollout.m")
        gone = tmp_path / "gone.yaml"
        assert message([both[0], gone]).startswith(f"configuration {gone} cannot be read (no such file")

    def test_what_no_file_sets_is_one_sentence(self, files):
        given = files("rollout: {n: 2}\n", "platform: {name: npu}\n")
        assert message(given) == (
            f"configuration {given[0]} + {given[1]}: model.path is not set: give it in the file or as model.path=VALUE"
        )

    def test_a_file_is_given_once(self, files, tmp_path):
        (given,) = files(MINIMAL)
        again = tmp_path / ".." / tmp_path.name / given.name
        assert message([given, again]) == (
            f"configuration {again} is given twice: give it once, and what changes it after it"
        )

    def test_the_resolved_file_is_complete(self, files, tmp_path):
        config = load_config(files(MINIMAL, "rollout: {n: 2}\n"))
        save_resolved(config, tmp_path / "config.yaml")
        assert load_config(tmp_path / "config.yaml") == config
