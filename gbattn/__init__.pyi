# What gbattn/__init__.py finds when it is asked, for editors and type checkers.
from gbattn.attention import attend as attend
from gbattn.blocks import Block as Block
from gbattn.boosted import GradientBoostedAttention as GradientBoostedAttention
from gbattn.cache import KeyValueCache as KeyValueCache
from gbattn.interop import TorchAttention as TorchAttention
from gbattn.language_model import LanguageModel as LanguageModel
from gbattn.language_model import ModelConfig as ModelConfig
from gbattn.layers import LinearAttention as LinearAttention
from gbattn.layers import MultiHeadAttention as MultiHeadAttention
from gbattn.layers import make_attention as make_attention
from gbattn.twicing import TwicingAttention as TwicingAttention

__version__: str
