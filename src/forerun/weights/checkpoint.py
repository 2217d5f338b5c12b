"""A checkpoint: files opened lazily, every tensor checked for shape and accounted for.

>>> checkpoint = open_checkpoint(folder)                     # doctest: +SKIP
>>> checkpoint.take("model.norm.weight", (576,))             # doctest: +SKIP
>>> checkpoint.finish(lambda name: name.endswith("inv_freq"))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, first_line
from forerun.weights.config import read_config
from forerun.weights.config_reader import ConfigReader
from forerun.weights.described import config_place
from forerun.weights.folder import weight_files
from forerun.weights.schemes import INT8, MLX, Scheme, scheme_of

if TYPE_CHECKING:
    import torch

    from forerun.kernels.matrix import Table, Weight

SCALE = ".scale"  # added to the name of a tensor that is stored in 8 bits: one float32 per row

LFS_POINTER = b"version https://git-lfs"
# Number formats of ordinary weights; anything else means a quantised model whose config does not say so.
READABLE = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """The tensors of one model. `take` each one, then `finish` to be sure that nothing was overlooked."""

    def __init__(self, path: Path, config: dict[str, Any], files: list[Path]) -> None:
        self.path = path
        self.config = config
        self._handles: dict[str, tuple[Any, str]] = {}  # tensor name -> the open file it is in, and its name there
        self._taken: set[str] = set()
        self.matrices: set[str] = set()  # names that `weight` was asked for
        self._decoded: dict[str, list[str]] = {}  # names of tensors that are not used as they are stored, by the reason
        for file in files:
            self._open(file)

    @property
    def reader(self) -> ConfigReader:
        """The config for those who read it value by value."""
        return ConfigReader(self.config, config_place(self.path))

    def _open(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            _check_file(file)
            handle: Any = safe_open(file, framework="pt")
            names = list(handle.keys())
        except OSError as error:
            raise ForerunError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
        except (SafetensorError, ValueError) as error:
            raise ForerunError(f"{file} is truncated or damaged ({first_line(error)}); download it again") from error
        for stored in names:
            name = self._renamed(stored)
            if name in self._handles:
                raise ForerunError(f"{file}: the tensor {name} is also in another file of {self.path}")
            if name is not None:
                self._handles[name] = handle, stored

    def _renamed(self, stored: str) -> str | None:
        """What a tensor of a file is called here; None: it is none of the model's."""
        return stored

    @property
    def notes(self) -> list[str]:
        """What a user should know about the way it is read."""
        return [f"{_some(names)} decoded when loaded: {why}" for why, names in self._decoded.items()]

    def names(self) -> set[str]:
        return set(self._handles)

    def has(self, name: str) -> bool:
        return name in self._handles

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it is stored (mapped from the file, read when touched); its shape must be the one expected."""
        self._check_shape(name, shape)
        if (kind := self.number_format(name)) not in READABLE:
            alone = f" without {name + SCALE}" if kind == "I8" and not self.has(name + SCALE) else ""
            raise ForerunError(f"{self.path}: tensor {name} is stored as {kind}{alone}, a format that is not read")
        self._taken.add(name)
        return self.raw(name)

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        """As `take`, for a matrix (or a stack of them) that `forerun convert` may have stored in 8 bits."""
        from forerun.kernels.matrix import Rounded

        self.matrices.add(name)
        if not self.has(name) or self.number_format(name) != "I8" or not self.has(name + SCALE):
            return self.take(name, shape)
        self._check_shape(name, shape)
        values, scale = self.raw(name), self.raw(name + SCALE)
        usable = self.number_format(name + SCALE) == "F32" and bool((scale.isfinite() & (scale > 0)).all())
        if scale.shape != values.shape[:-1] or not usable:
            raise ForerunError(
                f"{self.path}: tensor {name + SCALE} must hold a positive float32 for each row of {name}"
            )
        self._taken |= {name, name + SCALE}
        return Rounded(values, scale)

    def table(self, name: str, shape: tuple[int, ...]) -> Table:
        """As `weight`, for a matrix whose rows are looked up, which is never rounded."""
        return self.take(name, shape)

    def floats(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `weight`, in floating point however it is stored."""
        return self.weight(name, shape).float()

    def raw(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, whatever it is; for copying."""
        handle, stored = self._handle(name)
        tensor: torch.Tensor = handle.get_tensor(stored)
        return tensor

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are stored alike, to the last bit."""
        import torch

        first, second = self.raw(name), self.raw(other)
        return first.dtype == second.dtype and torch.equal(first, second)

    def edges(self, name: str, size: int) -> tuple[bytes, bytes]:
        """The first and the last bytes of a tensor as it is stored."""
        import torch

        stored = self.raw(name).reshape(-1).view(torch.uint8)
        return stored[:size].numpy().tobytes(), stored[-size:].numpy().tobytes()

    def integers(self, name: str) -> torch.Tensor:
        """A tensor of whole numbers, such as token ids."""
        if self.number_format(name) not in ("I64", "I32"):
            raise ForerunError(f"{self.path}: tensor {name} must hold whole numbers")
        self._taken.add(name)
        return self.raw(name)

    def number_format(self, name: str) -> str:
        """What the file calls the tensor's number format: "F32", "BF16", …"""
        return str(self._slice(name).get_dtype())

    def leftovers(self, ignore: Callable[[str], bool]) -> list[str]:
        """Names that nobody took and `ignore` does not know, sorted."""
        return sorted(name for name in self.names() - self._taken if not ignore(name))

    def release(self) -> None:
        """Give back the memory of what has been read and packed; mapped weights can be read again."""

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """Raises when tensors are left over: the model is not the one its config describes."""
        left = self.leftovers(ignore)
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise ForerunError(f"{self.path}: tensors that a {self.config['model_type']} model does not have: {shown}")

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if (found := self.shape(name)) != tuple(shape):
            raise ForerunError(f"{self.path}: tensor {name} has shape {found}, expected {tuple(shape)}")

    def _slice(self, name: str) -> Any:
        handle, stored = self._handle(name)
        return handle.get_slice(stored)

    def _handle(self, name: str) -> tuple[Any, str]:
        handle = self._handles.get(name)
        if handle is None:
            raise ForerunError(f"{self.path}: tensor {name} is missing; the weights do not fit config.json")
        return handle


def _some(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{len(names)} tensors ({names[0]}, …) are"


def _check_file(file: Path) -> None:
    """What safetensors would complain about as if the file were damaged, or absent."""
    with file.open("rb") as stream:
        beginning = stream.read(len(LFS_POINTER))
    if beginning == LFS_POINTER:  # what git leaves in the place of a large file where git-lfs is not installed
        raise ForerunError(f"{file} is only a pointer to the weights: run git lfs pull there")
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        raise ForerunError(f"{file}: its name, or that of a folder above it, is not UTF-8: rename it") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a model folder or a GGUF file: its config is checked, its files are mapped, no tensor is read yet."""
    config = read_config(path)
    if path.is_file():
        from forerun.weights.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path, config)
    files, scheme = weight_files(path), scheme_of(config, str(path))
    if scheme is None or scheme.method == INT8:
        plain = Checkpoint(path, config, files)
        return as_mlx_wrote_it(plain, files)
    from forerun.weights.quantised import MlxCheckpoint, QuantisedCheckpoint

    return (MlxCheckpoint if scheme.method == MLX else QuantisedCheckpoint)(path, config, files, scheme)


def as_mlx_wrote_it(checkpoint: Checkpoint, files: list[Path]) -> Checkpoint:
    """MLX gives tensors other names, and those of Qwen3.5 other values, in plain floats too."""
    if not any(name.startswith("language_model.") or name.endswith("conv1d.weight") for name in checkpoint.names()):
        return checkpoint
    from forerun.weights.quantised import MlxCheckpoint, written_by_mlx

    if not written_by_mlx(checkpoint):
        return checkpoint
    return MlxCheckpoint(checkpoint.path, checkpoint.config, files, Scheme(MLX, "MLX"))
