"""The documentation says what is there: generated flags, flags that pages name, and the diffs of CONTRIBUTING."""

import argparse
import json
import re
from dataclasses import replace

import numpy
import pytest
import torch

from attn_reg_plugin.cli import COMMANDS
from attn_reg_plugin.experiments.steps import plan
from attn_reg_plugin.regularizers import REGISTRY, Regularizer, options_of
from tests.loading import ROOT, load

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
EXAMPLES = [path for path in sorted(ROOT.glob("examples/*/README.md")) if path.parent.name != "huggingface"]
#: of programs that are neither fairseq's nor ours: pip, hydra, torchrun, SLURM
FOREIGN = {"--help", "--no-build-isolation", "--config-dir", "--config-name"}
FOREIGN |= {f"--{name}" for name in ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")}
FOREIGN |= {f"--{name}" for name in ("rdzv_id", "rdzv_backend", "rdzv_endpoint")}
FOREIGN |= {f"--{name}" for name in ("nodes", "ntasks-per-node", "gpus-per-node")}
FOREIGN |= {"--p", "--q"}  # values of the papers' configurations
SHARED = {option.name for option in options_of(Regularizer)}


hooks = load("docs/hooks.py")
evidence_results, evidence_claims, evidence, models, architectures, flags, cost_model = (
    load(f"scripts/{name}.py")
    for name in ("evidence_results", "evidence_claims", "evidence", "models", "architectures", "flags", "cost_model")
)


def test_the_tables_of_the_evidence_are_those_of_its_results():
    found = list(evidence.experiments())
    made = evidence.tables(found)
    for path in (evidence.PAGE, evidence.APPENDIX, *evidence.MORE):
        page = path.read_text(encoding="utf-8")
        assert found and evidence.filled(page, made) == page
    shown = {name for path in (evidence.PAGE, evidence.APPENDIX, *evidence.MORE) for name in evidence.places(path)}
    assert shown <= {*made, "cost_model"}, "a place without a table"
    assert set(made) - shown == {one.name for one in found} - shown, "the appendix has the rest under `experiments`"
    assert all(f"evidence/{one.name}.yaml" in made["experiments"] for one in found)
    pictures = {path.name for path in (ROOT / "docs").glob("evidence_*.png")}
    assert pictures == {f"evidence_{name}.png" for name in ["summary", *evidence.plotted(found)]}
    for path in evidence.RESULTS.rglob("results.json"):
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        for part in evidence_results.read_experiments(path.parent):
            for row in part.rows:
                own = [run for name, run in runs.items() if name.startswith(f"{row.method}-seed")]
                reported = [evidence_results.reported_scores(run) for run in own]
                figures, seeds = [scores[part.subset, part.metric.lower()] for scores in reported], row.score.seeds
                assert len(figures) == seeds and sum(figures) / seeds == pytest.approx(row.score.mean)
                for seed, one in row.examples.items():
                    assert one.scores(numpy.ones((1, one.count))) == pytest.approx(row.scores[seed])


def test_the_evidence_is_one_page_of_short_sections():
    """Words without tables and captions: 2,500 in all, 150 a section; no section has two tables."""
    text = re.sub(r"^(\||\*p |<!-- end|!\[).*\n", "", evidence.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    assert len(text.split()) <= 2500 and all(one.count("<!-- table") <= 1 for one in sections)
    words = {one.splitlines()[0]: len(re.sub("<!--.*-->", "", one).split()) for one in sections[1:]}
    assert max(words.values()) <= 150, words


def test_what_the_best_of_many_runs_gains_by_chance():
    random = numpy.random.default_rng(1)
    drawn = random.normal(size=(20_000, evidence_claims.SETTINGS)).max(1).mean()
    assert evidence_claims.expected_best(1.0) == pytest.approx(drawn, abs=0.02)
    assert evidence_claims.expected_best(2.0) == pytest.approx(2 * evidence_claims.expected_best(1.0))
    assert evidence_claims.expected_best(1.0, settings=1) == pytest.approx(0)


def test_the_best_on_one_half_is_reported_on_the_other():
    right = numpy.random.default_rng(0).random((27, 400)) < 0.6
    there, beyond = evidence_claims.chosen_on_a_half(right, halvings=200)
    assert there > 100 * right.mean() + 4 and beyond == pytest.approx(100 * right.mean(), abs=1.5), "all luck"
    better = right | (numpy.arange(27) == 3)[:, None]
    assert evidence_claims.chosen_on_a_half(better, halvings=20) == pytest.approx((100, 100))


def test_rows_that_several_tables_have_are_the_same_runs():
    """Said under "A seed": the first three seeds of the phrasebook with a quarter of wrong targets."""
    found = {one.name: one for one in evidence.experiments()}
    places = [("ten_seeds", "", "ad_drop"), ("noisy_phrasebook", "", "ad_drop")]
    places += [("noise_levels", "0.25", "ad_drop"), ("drop_rates", "", "ad_drop_09")]
    scores = [evidence_claims.row_of(found, place)[1].scores for place in places]
    assert all([one[seed] for seed in (1, 2, 3)] == list(scores[1].values()) for one in scores)


def test_attribution_beats_chance_with_each_seed_of_twice_the_epochs():
    gains = evidence_claims.paired({one.name: one for one in evidence.experiments()}, evidence_claims.LONGER)
    assert len(gains) == 10 and min(gains) > 0
    assert evidence_claims.over_seeds(gains[5:]).low > 0  # the seeds that were trained to test it


def test_the_tables_of_models_are_those_of_the_records():
    page, records = models.PAGE.read_text(encoding="utf-8"), models.read_records()
    made = models.tables(records)
    assert models.filled(page, made) == page and all(table.strip() in page for table in made.values())
    tables = page.split("<!-- table ")
    for name, made in records.items():
        kind = name.split("/")[1]
        works = any(r["outcome"] == "same" for n, r in records.items() if n.split("/")[1] == kind)
        assert re.search(rf"(\| |, ){re.escape(kind)}( \||,)", tables[2] if works else tables[3] + tables[4]), name
        assert made["outcome"] == "same" or made["reason"]


def test_the_page_of_flags_is_that_of_the_parsers():
    page = flags.PAGE.read_text(encoding="utf-8")
    assert flags.filled(page) == page


def test_every_option_of_every_method_is_on_the_page_of_flags():
    text = flags.PAGE.read_text(encoding="utf-8")
    for name, method in REGISTRY.items():
        assert f"| `{name}` | `{method.__name__}` |" in text and f"\n### {name}\n" in text
        for option in options_of(method):
            flag = (f"attn_{option.name}" if option.name in SHARED else f"{name}_{option.name}").replace("_", "-")
            row = re.search(rf"^\| `--{flag}` \| `?(.*?)`? \| (.*?) \| (.*) \|$", text, re.MULTILINE)
            default, values, meaning = row.groups()
            shown = {"off": "False", "true": "True"}
            assert shown.get(default, default) == str(option.default)
            assert flags.cell(option.metadata["help"]) in (meaning, f"{meaning}, in {values}")
            allowed = option.metadata["within"] or ", ".join(option.metadata["choices"] or ())
            assert values in (allowed, "true, false") or (values and values in meaning)


def test_tasks_criterions_models_and_subcommands_are_on_the_page_of_flags():
    text = flags.PAGE.read_text(encoding="utf-8")
    for value in ("--task attn_reg_translation", "--criterion attn_reg_tagging", "--arch opus_mt", "--bpe opus_mt"):
        assert f"| `{value}` | " in text
    assert all(f"| `--{name}` |" in text for name in ("hf-model", "label-smoothing", "renormalize-search"))
    assert text.count("| `--arch` |") == text.count("| `--ad-drop-p` |") == 1, "fairseq's own and the methods' once"
    for name in [name for commands in COMMANDS.values() for name in commands]:
        assert f"| `{name}` | " in text
    assert "| `--seeds` | `1` |  | seeds, with commas |" in text and "| `--threads` | `PyTorch's` | [1, inf) |" in text
    assert "(default: " not in text.replace("(default: all)", "") and "%(" not in text


def test_what_pages_import_is_in_the_api_once():
    pages = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")}
    filled = pages["api.md"].replace("<!-- api of the methods -->", hooks.api_of_methods())
    listed = re.findall(r"^::: ([\w.]+)$", filled, re.MULTILINE)
    assert len(listed) == len(set(listed))
    names = re.findall(r"^ *from attn_reg_plugin[\w.]* import ([\w, ]+)$", "\n".join(pages.values()), re.MULTILINE)
    assert set(", ".join(names).split(", ")) - {path.rpartition(".")[2] for path in listed} == set()


def test_the_page_of_architectures_is_that_of_its_results():
    result, page = json.loads(architectures.RESULT.read_text(encoding="utf-8")), architectures.PAGE
    text, made = page.read_text(encoding="utf-8"), architectures.tables(result)
    assert architectures.filled(text, made) == text and made["architectures"] in text
    tried = [(row["task"], row["arch"]) for row in result["rows"]]
    assert tried == [(row.task, row.arch) for row in architectures.ROWS]
    works = {row["task"] for row in result["rows"] if row["ad_drop"] == "works"}
    assert works >= {"translation", "translation_multi_simple_epoch", "speech_to_text", "online_backtranslation"}


def test_every_architecture_and_task_of_fairseq_is_on_the_page():
    from fairseq.models import MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    result = json.loads(architectures.RESULT.read_text(encoding="utf-8"))
    models = {row["model"] for row in result["rows"]} | set(result["untried"]["models"])
    tasks = {row["task"] for row in result["rows"]} | set(result["untried"]["tasks"])
    for known, registry in ((models, MODEL_REGISTRY), (tasks, TASK_REGISTRY)):
        assert {name for name, owner in registry.items() if owner.__module__.startswith("fairseq.")} - known == set()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", ["plain", "AD-DROP"])
@pytest.mark.usefixtures("one_thread")
def test_the_formulas_of_the_costs_are_what_is_counted(name, recomputes):
    shape = replace(cost_model.SMALL, length=24, recomputes=recomputes)
    assert cost_model.count_operations(shape, name) == cost_model.STEPS[name](shape)


@pytest.mark.usefixtures("one_thread")
def test_the_memory_of_the_costs_is_what_is_counted():
    assert cost_model.count_ranking(cost_model.Shape(heads=4, length=256)) == pytest.approx(cost_model.RANKING, abs=0.1)
    page = cost_model.PAGE.read_text(encoding="utf-8")
    made = cost_model.tables(cost_model.Shape())
    assert cost_model.filled(page, made) == page and made["cost_model"] in page


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Every flag of fairseq's programs, of the package's classes, and of attn-reg and the scripts."""
    from fairseq import options
    from fairseq.dataclass.utils import gen_parser_from_dataclass
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    configs = [config for registry in REGISTRIES.values() for config in registry["dataclass_registry"].values()]
    for config in filter(None, [*configs, *TASK_DATACLASS_REGISTRY.values()]):
        gen_parser_from_dataclass(parser, config())
    for name in ("transformer", "transformer_align"):
        ARCH_MODEL_REGISTRY[name].add_args(parser)
    parsers = [parser, options.get_training_parser(), options.get_generation_parser(interactive=True)]
    known = {string for parser in parsers for action in parser._actions for string in action.option_strings}
    generated = flags.PAGE.read_text(encoding="utf-8")
    scripts = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("scripts/*.*"))
    programs = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("examples/**/*.py"))
    return known | set(re.findall(r"--[a-z][\w-]*", generated + scripts + programs))


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_on_a_page_exist(path, known_flags):
    text = path.read_text(encoding="utf-8")
    if path.name == "CONTRIBUTING.md":
        text = text[: text.index("## Documentation")]
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert named - known_flags - FOREIGN == set()


def test_documented_commands_train_for_a_time_and_score_words():
    """fairseq trains until it is stopped, and its own BLEU is of pieces."""
    pages = [path.read_text(encoding="utf-8") for path in (*PAGES, *EXAMPLES)]
    commands = [line for page in pages for line in page.replace("\\\n", " ").splitlines()]
    trained = [line for line in commands if re.match(r"fairseq-train (?!--help)", line) and "..." not in line]
    assert trained and all(re.search(r"--max-(epoch|update) \d", line) for line in trained)
    generated = [line for line in commands if line.startswith("fairseq-generate ")]
    assert generated and all("--scoring sacrebleu" in line for line in generated)


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_on_a_page_lead_somewhere(path):
    """In the repository; mkdocs checks those of the site."""
    text = re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (path.parent / target).exists(), target


def test_the_configuration_of_the_recipes_is_one(tmp_path):
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    file = tmp_path / "mine.yaml"
    file.write_text(re.search(r"```yaml\n(.*?)```", recipes, re.DOTALL)[1], encoding="utf-8")
    assert len(plan(file, ["--epochs", "12", "--methods", "plain,ad_drop_random"])) == 2
    with pytest.raises(ValueError, match="dropout_of_mine"):
        plan(file, ["--methods", "dropout_of_mine"])[1]()


CAUSAL, ADAPTERS, COMPILED = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "decoders.md").read_text(encoding="utf-8"), re.DOTALL
)


def ran(*programs: str) -> dict:
    """The names that the programs leave; their regularizer dropped something at every site."""
    world: dict = {}
    for program in programs:
        exec(program, world)
    dropped = {key: float(value) for key, value in world["regularizer"].statistics.take().items() if "dropped/" in key}
    assert len(dropped) == 2 and all(dropped.values())
    return world


@pytest.mark.usefixtures("one_thread")
def test_a_causal_language_model_and_layers_that_are_compiled() -> None:
    assert ran(CAUSAL)["regularizer"].updates == 4
    world = ran(CAUSAL, COMPILED.replace("layer.compile()", 'layer.compile(backend="eager")'))
    torch.compiler.reset()
    assert world["epoch"] == world["regularizer"].epoch == 2


@pytest.mark.clients
@pytest.mark.usefixtures("one_thread")
def test_adapters() -> None:
    pytest.importorskip("peft")
    model = ran(CAUSAL, ADAPTERS)["adapted"]
    assert all((p.grad is not None) is p.requires_grad for p in model.parameters())
