"""Quant_b: one literal table of bases, and what each of them says and does.

A base quantizes one side of a block; GEAR adds L·R and S to whatever it is. It works on rows: V is
[batch, heads, tokens, head_dim]; K too, or transposed for a base with ``keys_by_channel``. What it
says (settings, bytes, layout) needs no MLX; what it does (`store`, `read`, `cut`) loads it inside
the methods. CONTRIBUTING.md has the recipe.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from gear.checks import SettingError

if TYPE_CHECKING:
    import mlx.core as mx

    from gear.config import SideSettings
    from gear.outliers import Rows
    from gear.precision import Store

BASES = {
    "grouped": "gear.grids.Grouped",
    "vector": "gear.grids.Vector",
    "affine_mlx": "gear.grids.AffineMlx",
    "per_token": "gear.methods.per_token.PerTokenBase",
    "kvquant": "gear.methods.kvquant.KvQuantBase",
    "turboquant": "gear.methods.turboquant.TurboQuantBase",
    "turboquant_prod": "gear.methods.turboquant_prod.TurboQuantProdBase",
    "qjl": "gear.methods.qjl.QjlBase",
    "rabitq": "gear.methods.rabitq.RabitqBase",
    "skvq": "gear.methods.skvq.SkvqBase",
    "svdq": "gear.methods.svdq.SvdqBase",
    "palu": "gear.methods.palu.PaluBase",
    "vecinfer": "gear.methods.vecinfer.VecInferBase",
    "commvq": "gear.methods.commvq.CommVqBase",
    "cachegen": "gear.methods.cachegen.CacheGenBase",
}
Options = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=64)
def load_base(name: str) -> Base:
    """Return the one base called ``name``, a key of BASES."""
    module, _, cls = BASES[name].rpartition(".")
    return getattr(import_module(module), cls)()


class Held(NamedTuple):
    """One array that a base stores, [batch, heads, ...] of a block."""

    term: str = "codes"
    """What its bytes count as: codes or scales."""
    joined: int | None = None
    """The axis (2 or 3) along which equal blocks are joined; None: they get a block axis, 2."""


class Base:
    """A quantizer of one side. Subclasses have no state: there is one object of each."""

    name: ClassVar[str]
    keys_by_channel: ClassVar[bool] = False
    """K comes as [batch, heads, head_dim, tokens]."""
    packed: ClassVar[bool] = False
    """Codes, scale and zero lie as packed attention and the fused kernel read them."""
    graph: ClassVar[bool] = True
    """`store` is a graph of MLX operations alone, which a GPU compiles; `read` always is."""
    takes: ClassVar[frozenset[str]] = frozenset()
    """Which of ``clip`` and ``scale_bits`` it knows; the others must stay at their defaults."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """gear.base_options with their defaults, whose types the values must have (None: any)."""

    # -- what it says ----------------------------------------------------------------------

    def check(self, side: str, s: SideSettings, where: str) -> None:
        """Refuse settings that it cannot use; ``where`` is the prefix of their names.

        ``side`` is "k" or "v", or "" for what both have in common. Types and common ranges are
        right already. Raises :class:`SettingError`.
        """

    def check_shape(self, side: str, s: SideSettings, head_dim: int, where: str) -> None:
        """Refuse a head_dim that it cannot use. Raises :class:`SettingError`."""

    def default_block(self, s: SideSettings) -> int:
        """Return n_b where that is null."""
        return 64

    def least_block(self, s: SideSettings) -> int:
        """Return the fewest tokens that a block may have."""
        return 1

    def unit(self, side: str, s: SideSettings) -> int:
        """Return what n_b must be a multiple of; ``side`` is "k" or "v"."""
        return 1

    def layout(self, side: str) -> Mapping[str, Held]:
        """Return every array it may store, by name; left, right and outlier_* are GEAR's."""
        raise NotImplementedError

    def terms(
        self, side: str, s: SideSettings, heads: int, tokens: int, head_dim: int,
        picked: Mapping[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return the bytes of one block and batch row: codes and scales, floats at 2 bytes.

        ``picked`` is `picked` of the block, or empty before there is one: the worst case then.
        """
        raise NotImplementedError

    def picked(self, arrays: Mapping[str, mx.array]) -> dict[str, int]:
        """Return what the data decided and the bytes depend on (a rank), from the arrays held."""
        return {}

    # -- what it does ----------------------------------------------------------------------

    def store(self, store: Store, rows: Rows, s: SideSettings) -> mx.array:
        """Add its arrays, [batch, heads, ...] each, and return the base that a reader will see.

        That is fp32 in the shape of ``rows.x``, made of what ``store.add`` returned. What it says
        at the places of outliers does not matter; they may shape nothing else (``rows.filled``).
        """
        raise NotImplementedError

    def read(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, tokens: int,
        head_dim: int,
    ) -> mx.array:  # fmt: skip
        """Return the base in fp32, [batch, heads, count, rows, cols] of ``count`` blocks.

        Every array has the block axis, 2: [batch, heads, count, ...].
        """
        raise NotImplementedError

    def cut_unit(self, side: str, s: SideSettings) -> int | None:
        """Return where a long block may be cut, in tokens; None: it is read as a whole."""
        return 1

    def cut(
        self, arrays: Mapping[str, mx.array], side: str, s: SideSettings, start: int, stop: int
    ) -> dict[str, mx.array]:
        """Return the arrays of tokens ``start`` to ``stop`` of one block.

        This one cuts what is joined along axis 2, tokens, and leaves the rest as it is.
        """
        layout = self.layout(side)
        return {n: a[:, :, start:stop] if layout[n].joined == 2 else a for n, a in arrays.items()}

    # -- shared by all ---------------------------------------------------------------------

    def check_common(self, s: SideSettings, where: str) -> None:
        """Refuse the common settings that it does not take."""
        for name, plain in (("clip", False), ("scale_bits", 16)):
            value = getattr(s, name)
            if name not in self.takes and value != plain:
                raise SettingError(
                    f"{where}{name}", value, f"{plain} with base={self.name}",
                    f"This base has nothing that {name} could change.",
                )  # fmt: skip

    def options(self, given: Mapping[str, Any], where: str) -> Options:
        """Return every option with its value, by name; refuse unknown names and other types."""
        values = dict(self.defaults)
        for name, value in given.items():
            if name not in values:
                near = difflib.get_close_matches(str(name), values, n=1)
                allowed = f"among the options of base={self.name}: {', '.join(values)}"
                if not values:
                    allowed = f"left out, as base={self.name} has no options"
                hint = f"Did you mean {near[0]}?" if near else ""
                raise SettingError(f"{where}base_options", {name: value}, allowed, hint)
            values[name] = _typed(f"{where}base_options.{name}", value, values[name])
        return tuple(sorted(values.items()))


def _typed(name: str, value: Any, default: Any) -> Any:
    """Return an option's value, a list as a tuple; refuse another type than the default's."""
    kind = type(default)
    value = tuple(value) if isinstance(value, list) else value
    if kind is float and type(value) is int:
        return float(value)
    if default is not None and type(value) is not kind:
        word = {int: "an integer", float: "a number", bool: "true or false", tuple: "a list"}
        raise SettingError(name, value, word.get(kind, "text"), f"Default: {default!r}.")
    return value
