"""Supernets: one ONNX graph with many subnets in one set of weights (SuperServe, section 3).

A subnet is what is left of the graph when some blocks are skipped (:mod:`.depth`, LayerSelect) and
some weights are sliced to their first channels (:mod:`.width`, WeightSlice). Each subnet has its
own statistics in normalising layers (:mod:`.norm`, SubnetNorm). The paper's operators choose at run
time, inside one dynamic graph; here each subnet is a static graph, which runtimes optimise, and
weights are shared as views of one file: :mod:`.extract` finds which of a subnet's weights are the
first bytes of the supernet's, and :mod:`.weight_layout` stores the supernet's weights so that this
is possible for most of them.

Start with :class:`~offramp.supernet.graphs.elastic_model.Supernet`: a model, and the elastic parts
that :mod:`.spec_file` read.
"""

from offramp.supernet.graphs.elastic_model import Supernet
from offramp.supernet.graphs.elastic_spec import ElasticSpec, SubnetChoice
from offramp.supernet.graphs.extract import Subnet, extract_subnet
from offramp.supernet.graphs.norm import SubnetNorm
from offramp.supernet.graphs.search import RatedChoice, prune, search
from offramp.supernet.graphs.spec_file import read_spec
from offramp.supernet.graphs.weight_layout import laid_out

__all__ = [
    "ElasticSpec",
    "RatedChoice",
    "Subnet",
    "SubnetChoice",
    "SubnetNorm",
    "Supernet",
    "extract_subnet",
    "laid_out",
    "prune",
    "read_spec",
    "search",
]
