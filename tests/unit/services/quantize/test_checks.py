"""What is refused before anything is loaded: combinations, texts, checkpoints, places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.model.spec import CheckpointError
from runtime.errors import ConfigError
from services.quantize.calibration import BUNDLED, HELD_OUT, CalibrationSet, CalibrationText, read_calibration
from services.quantize.choices import METHODS, SCHEMES, MethodName, SchemeName, check_choice, config_group
from services.quantize.kept import check_out, model_digest, working_folder
from services.quantize.run import QuantizeJob, check_checkpoint, choose_group, key_of
from tests.unit.engine.checkpoints import edit_config, make_checkpoint

SENSIBLE = {
    *((scheme, "rtn") for scheme in SCHEMES),
    *(("int4", method) for method in ("awq", "gptq")),
    *(("int8", method) for method in ("awq", "gptq")),
    *(("w8a8", method) for method in ("gptq", "smoothquant")),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", METHODS)
def test_combinations_that_make_no_sense_are_refused_by_name(scheme: SchemeName, method: MethodName) -> None:
    if (scheme, method) in SENSIBLE:
        check_choice(scheme, method, "texts.jsonl")
        assert (config_group(scheme, method, 128) == "") == (scheme == "nf4")
        return
    with pytest.raises(ConfigError, match=f"--method {method} with --scheme {scheme}: .* is made by rtn"):
        check_choice(scheme, method, "texts.jsonl")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_methods_that_read_texts_demand_them(method: MethodName) -> None:
    with pytest.raises(ConfigError, match=f"--method {method} .*give --calibration FILE"):
        check_choice("int4", method, "")
    check_choice("int4", "rtn", "")


# --- texts ------------------------------------------------------------------------------------------------


def read(path: Path, *lines: object, divided: bool = False, most: int = 100) -> CalibrationSet:
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return read_calibration(str(path), divided=divided, most=most)


def test_lines_are_texts_or_conversations(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    found = read(tmp_path / "a.jsonl", {"text": "One.", "id": 7}, "", {"messages": said})
    assert found.texts == (
        CalibrationText(line=1, text="One."),
        CalibrationText(line=3, messages=tuple(said)),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2: .*a line is one JSON object"),
        ("[1]", r"a\.jsonl:2: .*a line is one JSON object"),
        ({"prompt": "x"}, r"a\.jsonl:2: give either text or messages"),
        ({"text": "x", "messages": []}, r"a\.jsonl:2: give either text or messages"),
        ({"text": "  "}, r"a\.jsonl:2: text is empty"),
        ({"text": 3}, r"a\.jsonl:2: .*text"),
        ({"messages": []}, r"a\.jsonl:2: messages are empty"),
        (
            {"messages": [{"role": "me", "content": "x"}]},
            r"a\.jsonl:2: messages\[0\]\.role = 'me'; expected sys",
        ),
        ({"messages": [{"role": "user", "content": [1]}]}, r"a\.jsonl:2: messages\[0\]\.content is no text"),
    ],
)
def test_bad_lines_are_named(line: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "a.jsonl", {"text": "A good one."}, line)


def test_files_that_hold_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.txt: No such file"):
        read_calibration(str(tmp_path / "none.txt"), divided=False, most=9)
    (tmp_path / "bytes.txt").write_bytes(b"good \xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 text at byte 5"):
        read_calibration(str(tmp_path / "bytes.txt"), divided=False, most=9)
    with pytest.raises(ConfigError, match=r"empty\.jsonl: it holds no text"):
        read(tmp_path / "empty.jsonl", "")


def test_plain_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {number}. " + "word " * 150 for number in range(9)]
    found = read(tmp_path / "book.txt", "\n\n".join(paragraphs))
    assert len(found.texts) == 3
    assert [text.line for text in found.texts] == [1, 7, 13]
    assert " ".join(text.text for text in found.texts).split() == " ".join(paragraphs).split()


def test_texts_for_the_gate_never_calibrate(tmp_path: Path) -> None:
    lines = [{"text": f"Text {number}."} for number in range(24)]
    found = read(tmp_path / "a.jsonl", *lines, divided=True, most=10)
    assert [text.line for text in found.held_out] == [HELD_OUT, 2 * HELD_OUT, 3 * HELD_OUT]
    assert len(found.texts) == 10
    assert not {text.line for text in found.texts} & {text.line for text in found.held_out}
    few = read(tmp_path / "b.jsonl", *lines[:8], divided=True)
    assert (len(few.texts), few.held_out) == (8, ())


def test_the_bundled_texts_are_the_same_each_time() -> None:
    found = read_calibration(BUNDLED, divided=True, most=50)
    assert len(found.texts) == 50
    assert len(set(found.texts)) == 50
    assert found.digest == read_calibration(BUNDLED, divided=False, most=50).digest


# --- checkpoints ------------------------------------------------------------------------------------------


def test_the_group_is_the_largest_that_divides_all_inputs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", hidden_size=192, intermediate_size=256)
    assert choose_group(tmp_path, "int4", None) == 64
    assert choose_group(tmp_path, "int4", 32) == 32
    assert choose_group(tmp_path, "mxfp4", None) == 32
    assert choose_group(tmp_path, "int8", None) == 0
    with pytest.raises(ConfigError, match=r"_proj\.weight has 192 inputs.*groups of 128"):
        choose_group(tmp_path, "int4", 128)
    with pytest.raises(ConfigError, match="--group-size is of --scheme int4"):
        choose_group(tmp_path, "w8a8", 64)
    with pytest.raises(ConfigError, match="the groups of mxfp4 are of 32"):
        choose_group(tmp_path, "mxfp4", 64)


def test_layers_that_have_no_group_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", hidden_size=64, intermediate_size=88)
    with pytest.raises(ConfigError, match=r"down_proj\.weight has 88 inputs.*128 or 64 or 32.*int8"):
        choose_group(tmp_path, "int4", None)


def test_what_is_quantized_already_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    check_checkpoint(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match=r"is quantized already.*give the dense original"):
        check_checkpoint(tmp_path)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nothing")
    with pytest.raises((ConfigError, CheckpointError), match=r"model\.gguf"):
        check_checkpoint(tmp_path / "model.gguf")


# --- places -----------------------------------------------------------------------------------------------


def test_a_result_never_replaces_what_is_there(tmp_path: Path) -> None:
    check_out(tmp_path / "new")
    with pytest.raises(ConfigError, match="is there already; remove it"):
        check_out(tmp_path)
    with pytest.raises(ConfigError, match="is no folder; make it first"):
        check_out(tmp_path / "none" / "new")


def test_one_process_makes_a_result(tmp_path: Path) -> None:
    with (
        working_folder(tmp_path / "out", "abc") as folder,
        pytest.raises(ConfigError, match="another process makes"),
        working_folder(tmp_path / "out", "abc"),
    ):
        pass
    with working_folder(tmp_path / "out", "abc") as again:
        assert again == folder


def test_the_key_depends_on_all_that_decides_the_numbers(tmp_path: Path) -> None:
    def job(**changes: object) -> QuantizeJob:
        values = {"model": "m", "checkpoint": tmp_path, "scheme": "int4", "method": "gptq", "group_size": 64}
        texts = CalibrationSet(name="a", texts=(CalibrationText(line=1, text="x"),))
        return QuantizeJob(**values | {"out": tmp_path / "out", "calibration": texts} | changes)  # type: ignore[arg-type]

    other = CalibrationSet(name="a", texts=(CalibrationText(line=1, text="y"),))
    changes = (
        {},
        {"scheme": "int8"},
        {"method": "awq"},
        {"group_size": 32},
        {"max_tokens": 9},
        {"calibration": other},
    )
    keys = [key_of(job(**change), "digest") for change in changes] + [key_of(job(), "another")]
    assert len(set(keys)) == len(keys)
    # Where it lies, and with how much memory and how many threads, decides nothing.
    same = job(out=tmp_path / "else", memory_bytes=1 << 30, threads=3)
    assert key_of(same, "digest") == keys[0]


def test_a_digest_is_that_of_weights_and_configuration(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    before = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert model_digest(tmp_path) == before
    edit_config(tmp_path, rope_theta=1.0)
    assert model_digest(tmp_path) != before
