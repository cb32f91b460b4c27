from .cnn import ResidualCNN as ResidualCNN
from .data import ResumableDataModule as ResumableDataModule
from .exact_resume import ExactResume as ExactResume
from .gpt import GPT as GPT
from .help_topics import HelpTopics as HelpTopics
from .images import Digits as Digits
from .images import FashionMNIST as FashionMNIST
