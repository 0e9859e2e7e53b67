"""The embedded toolbox suite: small stateful tools with their own task generator."""

from rods_jax.tools.toolbox.entities import KINDS
from rods_jax.tools.toolbox.generator import RequestedProfile, generate
from rods_jax.tools.toolbox.lexicon import lexicon
from rods_jax.tools.toolbox.splits import split
from rods_jax.tools.toolbox.structure import structure_key
from rods_jax.tools.toolbox.suite import ToolboxSuite

__all__ = ["KINDS", "RequestedProfile", "ToolboxSuite", "generate", "lexicon", "split", "structure_key"]
