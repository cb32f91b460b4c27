from .estimator import BlockEstimator as BlockEstimator
from .estimator import GradientEstimator as GradientEstimator
from .mvue import MVUE as MVUE
from .mvue import ApproxMVUE as ApproxMVUE
from .top_n import TopN as TopN
