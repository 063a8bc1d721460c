"""The model card: every number from a file, and refusals before anything is written."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from evaluation.mixture import main as mixture
from evaluation.records import read_records
from evaluation.report import build_report
from evaluation.score import _parser as score_parser
from evaluation.score import main as score
from hub_cards import model_facts, rendering
from hub_cards.cards import check_rendered, main, model_card, read_recipe, shared_recipe
from hub_cards.run_files import read_all_sums
from training.config import load_recipe
from training.train import main as train


def test_numbers_come_from_the_files(scored_runs):
    base, table = scored_runs
    card = model_card(table, base, repo_id="someone/b-table")
    results = json.loads((table / "results.json").read_text())
    gains = json.loads((table / "gains.json").read_text())["sets"]["dev_val.training"]
    text = str(card)
    for shown in (
        f"{results['parameters']:,}",
        f"{gains['bits_per_byte']:.5f}",
        f"{gains['gain']:+.4f}",
        f"{gains['gain_interval'][0]:+.4f}",
        f"{gains['gain_by']['target_cell']['order_1']:+.4f}",
        f"{results['flops_per_token'] * results['tokens']:.3e}",
        results["target_sha256"],
        results["final_sha256"],
        'folder = "someone/b-table"',
        "copy up to 4 tokens back, visible",
        "which saw the same targets",
    ):
        assert shown in text
    assert card.data.license == "apache-2.0"
    values = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert values["bits_per_byte"] == round(gains["bits_per_byte"], 5)


def test_the_card_has_every_section_of_a_model_that_explains_itself(scored_runs):
    titles = [title for title, _ in rendering.sections(str(model_card(scored_runs[1])))]
    assert titles == [
        "b_table",
        "Load and generate",
        "Results",
        "Gain over b",
        "Gain by target cell",
        "Evaluation format",
        "Training",
        "Limits",
        "Reproduce",
        "Licence",
        "Citation",
    ]


def test_limits_are_those_that_apply(scored_runs):
    base, table = (str(model_card(run)) for run in scored_runs)
    named = [re.findall(r"^- \*\*(.+?)\.\*\*", text, re.M) for text in (base, table)]
    common = ["Scale", "Seeds", "Confirmation", "Evaluation format", "Comparators"]
    assert named == [common, [*common, "Regime", "Reach", "Mechanism", "Inference"]]
    assert "No confirmation set was scored" in table


def test_the_template_holds_no_numbers_of_its_own():
    text = (Path(rendering.__file__).parent / "model_card.md.jinja").read_text()
    text = re.sub(r"\{[{%].*?[%}]\}", "", text, flags=re.S)
    known = r"95% interval|RWKV-8|Section 4\.6|Apache-2\.0|sha256|max_new_tokens=40|\)\[0\]"
    assert re.findall(r"\d+", re.sub(known, "", text)) == []


def test_a_base_arm_has_a_card_without_gains(scored_runs):
    text = str(model_card(scored_runs[0]))
    assert "Gain over" not in text
    assert "| document table | none |" in text
    assert "table    |" not in text


def test_figures_are_drawn_and_the_same_numbers_make_the_same_file(scored_runs, tmp_path):
    texts = [str(model_card(scored_runs[1], figures=tmp_path / n)) for n in ("one", "two")]
    assert texts[0] == texts[1]
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", texts[0])
    assert shown == ["figures/gain_by_target_cell.png", "figures/learning_curve.png"]
    for name in shown:
        content = (tmp_path / "one" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert content == (tmp_path / "two" / name).read_bytes()


def test_command_writes_card_and_recipe_beside_the_model(runs, capsys):
    base, table = runs
    assert main([str(table), "--baseline", str(base), "--repo-id", "me/x"]) == 0
    assert (table / "final" / "README.md").read_text().startswith("---\n")
    recipe = yaml.safe_load((table / "final" / "recipe.yaml").read_text())
    assert recipe["name"] == "b_table"
    assert "output_dir" not in recipe
    assert "chunk_set" not in recipe["data"]


def test_refusals(runs, tmp_path, capsys):
    table = runs[1]
    assert main([str(tmp_path)]) == 2
    assert "results.json, which does not exist" in capsys.readouterr().err
    assert main([str(table), "--license", "mine"]) == 2
    assert "license must be one of" in capsys.readouterr().err
    assert main([str(table), "--license", "other"]) == 2
    assert "Add --license_name" in capsys.readouterr().err
    assert main([str(table), "--baseline", str(table)]) == 2
    assert "other records" in capsys.readouterr().err
    assert not (table / "final" / "README.md").exists()


def _edit(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_a_baseline_of_other_targets_is_refused(runs):
    base, table = runs
    _edit(base / "results.json", lambda r: r.update(target_sha256="0" * 64))
    with pytest.raises(ValueError, match="baseline must have seen this run's targets"):
        model_card(table, base)


def test_gains_that_the_records_do_not_give_are_refused(runs):
    table = runs[1]
    key = "dev_val.training"
    _edit(table / "gains.json", lambda g: g["sets"][key].update(bits_per_byte=1.0))
    with pytest.raises(ValueError, match="must be the records'"):
        model_card(table)
    (table / "records" / f"{key}.parquet").unlink()
    with pytest.raises(ValueError, match=r"needs records/dev_val.training.parquet"):
        model_card(table)


def test_a_field_that_a_file_lacks_is_an_error_that_names_it(runs):
    with pytest.raises(ValueError, match="'repo_id' is undefined"):
        rendering.render("model_card.md.jinja", {"metadata": "", "name": "", "summary": ""} | _FULL)
    (runs[1] / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"config.yaml, which does not exist"):
        model_card(runs[1])


_FULL = dict.fromkeys(
    ["parameters", "flops_per_token", "row_length", "windows", "table", "drawing", "has_table"], "x"
)


def test_an_empty_section_is_refused():
    rendering.check_sections("# a\ntext\n## b\n### c\ntext\n")
    for body in ("", "![curve](curve.png)", "<!-- later -->", "```\n```", "| |\n| :-- |"):
        with pytest.raises(ValueError, match="section 'b' must have content"):
            rendering.check_sections(f"# a\ntext\n## b\n\n{body}\n## c\ntext\n")
    rendering.check_sections("# a\ntext\n```\n# comment\n```\n")


def test_a_wrong_number_on_a_rendered_card_is_found(scored_runs):
    table = scored_runs[1]
    gains = json.loads((table / "gains.json").read_text())
    text, records = str(model_card(table)), read_all_sums(table)
    values = gains["sets"]["dev_val.training"]
    check_rendered(ModelCard(text), gains, records)
    wrong = {
        f"| {values['bits_per_byte']:.5f} |": "| 1.00000 |",
        f"| {values['gain']:+.4f} |": "| +9.0000 |",
        f"{values['gain_interval'][1]:+.4f}]": "+9.0000]",
        f"| {values['num_targets']:,} |": "| 7 |",
        f"value: {round(values['perplexity'], 5)}": "value: 1.5",
    }
    for shown, other in wrong.items():
        assert shown in text, shown
        with pytest.raises(ValueError, match="must"):
            check_rendered(ModelCard(text.replace(shown, other)), gains, records)
    without = re.sub(r"(?m)^\| dev_val \|.*\n", "", text)
    with pytest.raises(ValueError, match="must show bits per byte on dev_val.training"):
        check_rendered(ModelCard(without), gains, records)


def test_licences_are_the_hubs():
    assert len(rendering.LICENSES) > 75
    for license in ("apache-2.0", "mit", "cc-by-4.0", "openrail++", "llama3.3", "unknown"):
        rendering.check_license(license)
    with pytest.raises(ValueError, match="Use apache-2.0"):
        rendering.check_license("Apache-2")


def test_the_commands_of_the_card_are_ones_that_the_project_takes(
    scored_runs, chunk_set, tmp_path, capsys
):
    """The recipe that travels is the run's, by its hash; the scoring makes the same records."""
    run = scored_runs[1]
    commands = re.search(r"```bash\n(.*?)```", str(model_card(run)), re.S)[1].splitlines()
    assert [line.split()[0] for line in commands] == ["accelerate", "python"]
    recipe_path = tmp_path / "recipe.yaml"
    recipe_path.write_text(shared_recipe(read_recipe(run)))
    words = commands[0].replace("recipe.yaml", str(recipe_path)).replace("DIR", str(chunk_set))
    capsys.readouterr()
    assert train([*words.split("training.train ")[1].split(), "--dry_run", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)
    results = json.loads((run / "results.json").read_text())
    for same in ("parameters", "flops_per_token", "num_updates", "tokens", "data_sha256"):
        assert planned[same] == results[same]
    assert load_recipe(recipe_path).sha256() == results["recipe_sha256"]
    name = "dev_val.training.parquet"
    again = tmp_path / "again"
    again.mkdir()
    for part in ("final", "config.yaml", "results.json"):
        copy = shutil.copytree if (run / part).is_dir() else shutil.copy
        copy(run / part, again / part)
    scored = commands[1].replace("RUN", str(again)).replace("DIR", str(chunk_set))
    assert score(scored.split("evaluation.score ")[1].split()) == 0
    assert read_records(again / "records" / name).sha256 == (
        read_records(run / "records" / name).sha256
    )


def test_each_format_has_its_own_words_and_command():
    header = {
        "set_name": "dev_val",
        "format": "training",
        "ablated": False,
        "data_sha256": "d" * 64,
    }
    stride = header | {"format": "stride16-window", "ablated": True}
    other = header | {"set_name": "dev_heldout"}
    found = model_facts.score_commands([header, stride, other])
    assert [command.split("--sets ")[1] for command in found] == [
        "dev_val dev_heldout --format training",
        "dev_val --format stride --stride 16 --reach window --ablate_table",
    ]
    for command in found:
        score_parser().parse_args(command.split("evaluation.score ")[1].split())
    packed = header | {"set_name": "val", "format": "packed", "data_sha256": "e" * 64}
    assert model_facts.score_commands([header, packed, other]) == [
        "python -m evaluation.score RUN --chunk_set DIR_dddddddd --sets dev_val dev_heldout "
        "--format training",
        "python -m evaluation.score RUN --chunk_set DIR_eeeeeeee --sets val --format training",
    ]
    words = model_facts.format_words("stride16-window-ablated", 32, 64, True)
    assert "advance by 16" in words
    assert "searches the window, with the table ablated" in words


def test_several_formats_ablation_and_the_mixture_stand_side_by_side(runs, chunk_set, tmp_path):
    base, table = runs
    data = ["--chunk_set", str(chunk_set), "--sets", "dev_val"]
    stride = ["--format", "stride", "--stride", "16"]
    assert score([str(base), str(table), *data, *stride]) == 0
    assert score([str(table), *data, "--ablate_table"]) == 0
    mixture([str(base), *data])
    build_report([base, table], tmp_path / "report", num_resamples=50, show_violations=True)
    keys = set(json.loads((table / "gains.json").read_text())["sets"])
    assert keys == {f"dev_val.{f}" for f in ("training", "training-ablated", "stride16-chunk")}
    assert any(
        key.endswith(".mixture") for key in json.loads((base / "gains.json").read_text())["sets"]
    )
    text = str(model_card(table, base))
    shown = [row["format"] for row in next(t for t in rendering.tables(text) if "set" in t[0])]
    assert sorted(shown) == ["stride16-chunk", "training", "training-ablated"]
    assert "--format stride --stride 16 --reach chunk" in text
    assert "with the table ablated" in text
    assert text.count("Its table knew less than the row shows") == 1
    assert "mixture" not in str(model_card(base))
